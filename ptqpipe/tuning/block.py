"""One decoder layer as tune sees it, and --method gptq: error feedback in the order in which its linear layers run.

`BlockWork` has the units of the plan in the layer, their weights, and what its quantized form computes. `follow` takes
the linear layers in the order in which they are called; each compensates for the error of earlier ones. For each, both
models are run up to it: the float one, and the one that is quantized so far, inputs quantized as the scheme says. The
target is what the float layer computed (``algorithms.asymmetric``); that weight is quantized by GPTQ in the metric of
the input that it will get. Where a few of its rows so quantized lose more on held-out samples than with the nearest
codes, it is quantized without such a target, and where they still do, it keeps the nearest codes. None of this is taken
where the layer's output on held-out samples is not better than with the nearest codes.

Knows plans, assemblies and runners; must not know where codes are kept.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ptqpipe.algorithms import LoadedWeight, Task, asymmetric, gptq, joined, two_sided
from ptqpipe.algorithms.metric import Metric
from ptqpipe.calibration.assembly import Assembly, assemble
from ptqpipe.calibration.collect import Collector
from ptqpipe.calibration.gradients import Gradients, rows_of
from ptqpipe.calibration.paired import Known, Paired, paired_inputs, paired_moments, quantized_inputs
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.store import BlockInputs
from ptqpipe.errors import NumericsError
from ptqpipe.inputs import OUT_ROWS, Moments
from ptqpipe.kernels.decoding import decoded
from ptqpipe.options import ALGORITHMS
from ptqpipe.plan import Member, Slice, Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import Rule
from ptqpipe.rewriting import module_of, quantize_unit
from ptqpipe.rewriting.conversion import Conversion, check_kept_alive
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.schemes import Activation
from ptqpipe.source import SourceRows
from ptqpipe.statistics import KnownInputs

TRIED_ROWS, TRIED_SHARE = 64, 16  # of a weight so many of its rows are tried first, but at most one of so many


@dataclass(frozen=True, slots=True)
class BlockWork:
    """A decoder layer before its codes are chosen.

    units       of the plan whose weights are the block's
    weights     key -> the matrix [N, K] whose codes are chosen: the source's, rotated where its inputs are; on the
                block's device, where its codes are, too
    assemblies  of those parameters that are made of nothing but quantized matrices
    quantizers  module of the block (expert of a stack) -> what happens to its input, at the static scale that convert
                writes
    """

    block: Block
    prepared: Conversion
    units: tuple[Unit, ...]
    weights: Mapping[str, torch.Tensor]
    assemblies: tuple[Assembly, ...]
    quantizers: Mapping[str, InputQuantizer]

    @classmethod
    def of(cls, block: Block, prepared: Conversion, runner: Runner) -> "BlockWork":
        """Reads the weights of the block's units."""
        tensors = {tensor for found in block.origins.values() for tensor in found}
        units = tuple(u for u in prepared.outputs.plan.units if all(m.source.tensor in tensors for m in u.members))
        members = {m.key: m for unit in units for m in unit.members}
        weights = {key: _read(prepared, m, m.source, block.device) for key, m in members.items()}
        # The parameters of the float model are not rotated.
        turned = {key: replace(m.source, rotation=0) for key, m in members.items() if m.source.rotation}
        plain = weights | {key: _read(prepared, members[key], where, block.device) for key, where in turned.items()}
        parameters = {name.removeprefix(f"{block.name}."): t for name, t in _parameters(block, runner).items()}
        origins = {name.removeprefix(f"{block.name}."): found for name, found in block.origins.items()}
        assemblies = tuple(assemble(parameters, origins, members, plain))
        return cls(block, prepared, units, weights, assemblies, _quantizers(assemblies, units, prepared))

    @property
    def modules(self) -> dict[str, str]:
        """Key -> the module of the block whose whole parameter it is (or is part of); none for stacked experts."""
        return {key: a.parameter.rpartition(".")[0] for a in self.assemblies if not a.stacked for key in a.keys}

    @property
    def followed(self) -> tuple[Unit, ...]:
        """Units that `follow` finds codes of: those of whole modules."""
        modules = self.modules
        return tuple(unit for unit in self.units if all(m.key in modules for m in unit.members))

    @property
    def usable(self) -> frozenset[str]:
        """Keys of the weights whose place in the layer is understood, so that it can run with other values of them."""
        return frozenset(key for a in self.assemblies for key in a.keys)

    def parameters(self, decoded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The block's quantized parameters, made of the decoded matrices."""
        return {a.parameter: a.build(decoded) for a in self.assemblies}

    def outputs(
        self, x: torch.Tensor, batch: int, decoded: Mapping[str, torch.Tensor], known: Known | None = None
    ) -> torch.Tensor:
        """What the quantized block makes of hidden states ``x``, by what is ``known`` of earlier runs with these
        weights. Records gradients unless under ``torch.no_grad``."""
        ready = {} if known is None else known.outputs(batch)
        left = {name: q for name, q in self.quantizers.items() if name not in ready}
        reusing = contextlib.nullcontext() if known is None else known.reusing(self.block, batch)
        with reusing, quantized_inputs(self.block.module, left):
            return self.block.forward(x, batch, parameters=self.parameters(decoded))

    def start(self, inputs: KnownInputs | None = None, *, followed: bool = False) -> dict[str, QTensor]:
        """Key -> the weight as convert would write it: with ``inputs``, the statistics of the block, as convert --stats
        would by the full moments. A weight that no sample reached has its nearest codes.

        followed  whether `follow` comes next: then what it finds codes of has its nearest ones, too, which cost little
        """
        later = self.followed if followed else ()
        return {key: q for unit in self.units for key, q in self._start(unit, inputs, plain=unit in later).items()}

    def _start(self, unit: Unit, inputs: KnownInputs | None, *, plain: bool) -> dict[str, QTensor]:
        runs: dict[tuple[int, int], QTensor] = {}
        statistics: KnownInputs | None = self.prepared.statistics
        if plain:
            unit = replace(unit, rule=nearest(unit))
        elif inputs is not None:
            reached = all(inputs.has(module_of(member), "second_moment") for member in unit.members)
            statistics = inputs if reached else None
            unit = replace(unit, rule=by_data(unit) if reached else nearest(unit))
        done = quantize_unit(
            unit,
            [LoadedWeight(self.weights[m.key]) for m in unit.members],
            lambda member, row, q: runs.__setitem__((member, row), q),
            statistics=statistics,
            device=self.block.device,
        )
        check_kept_alive(unit, done.errors)  # convert takes the codes as they come
        return {m.key: joined(runs, i) for i, m in enumerate(unit.members)}


def _read(prepared: Conversion, member: Member, where: Slice, device: torch.device) -> torch.Tensor:
    return SourceRows(prepared.source, where, shape=member.shape).rows(0, member.shape[0]).to(device)


def by_data(unit: Unit) -> Rule:
    """The unit's rule where it reads moments, else GPTQ with the weighting that `convert --stats` takes."""
    rule = unit.rule
    return rule if rule.calibrated else replace(rule, algorithm="gptq", weighting=ALGORITHMS["gptq"].weighting)


def nearest(unit: Unit) -> Rule:
    """The unit's rule without what reads moments."""
    return replace(unit.rule, algorithm="rtn", weighting="none")


def observe(block: Block, runner: Runner, run: Callable[[Callable[[int], None]], None]) -> BlockInputs:
    """Statistics of the block's linear inputs, full moments and those of held-out windows apart, as `calibrate` has
    them, but for quantiles.

    run  runs the float block over all batches, and calls what it is given with the number of each before it runs
    """
    collector = Collector(
        block.name, block.module, block.origins, block=False, full=True, device=runner.device, quantiles=False
    )

    def before(batch: int) -> None:
        collector.holding_out = batch >= runner.held_from

    with collector:
        run(before)
    return BlockInputs(block.name, collector)


def _parameters(block: Block, runner: Runner) -> dict[str, torch.Tensor]:
    return {name: runner.skeleton.model.get_parameter(name) for name in block.origins if _is_parameter(runner, name)}


def _is_parameter(runner: Runner, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in runner.skeleton.model.get_submodule(parent)._parameters


def _quantizers(
    assemblies: Sequence[Assembly], units: Sequence[Unit], prepared: Conversion
) -> dict[str, InputQuantizer]:
    """Module -> what happens to its input, as `quantized_inputs` names modules and stacked experts."""
    found: dict[str, InputQuantizer] = {}
    modules = {key: a.parameter.rpartition(".")[0] for a in assemblies if not a.stacked for key in a.keys}
    for a in assemblies:
        module, _, leaf = a.parameter.rpartition(".")
        side = "down" if leaf == "down_proj" else "up"
        stacks = a.stacks if a.stacked else ()
        modules |= {key: f"{module}[{expert}].{side}" for stack in stacks for expert, key in enumerate(stack)}
    for unit in units:
        activation, rotation = unit.scheme.activation, unit.scheme.rotation
        if activation is Activation.NONE and not rotation:
            continue
        scales = prepared.input_scales.of(unit)
        for member, scale in zip(unit.members, scales, strict=True):
            if member.key in modules:
                fixed = None if scale is None else float(scale)
                found.setdefault(modules[member.key], InputQuantizer(activation, fixed, rotation=rotation))
    return found


def follow(
    work: BlockWork,
    start: Mapping[str, QTensor],
    *,
    share: float,
    held_out: float,
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
    known: Known,
    gradients: Gradients | None = None,
    on_unit: Callable[[float, str], None] = lambda part, name: None,
) -> tuple[Mapping[str, QTensor], float, float]:
    """(codes of one block by key, mean errors of its output on the samples that were held out with the start
    and with what was found). The codes are the start's where those are not better; both errors are the same where no
    weight gains on the rows that are tried first.

    start            those of `BlockWork.start`
    share            fraction of the error of earlier layers that each layer compensates for: 0 to 1
    held_out         share of the batches that only the gate sees
    inputs, targets  hidden states of a batch, where the block is: what the quantized ones before return, this should
    known            of the float block's run; of the quantized one's with the codes that are returned, afterwards
    gradients        of the float model in this block, over the batches that are not held out: then errors cost what
                     they add to the KL divergence of the model, and the errors that are returned are in nats
    on_unit          called when a unit is done, with its share of the units and its name

    NumericsError for moments or errors that are not finite.
    """
    seen, judged = divided(work.block.batches, held_out)
    found: dict[str, QTensor] = {}
    weights = {key: decoded(q) for key, q in start.items()}
    metric = None if gradients is None else [g.to(work.block.device) for g in gradients.last]
    before = _loss(work, weights, judged, inputs, targets, metric)
    order = _in_order(work, known.order)
    waiting = {name for _, modules in order for name in modules}
    for unit, modules in order:
        known.settle(set(known.order) - waiting)
        on_unit(1 / len(order), unit.id)
        each, leaders = list(dict.fromkeys(modules)), dict[str, str]()
        parameters, quantizers = work.parameters(weights), work.quantizers
        moments = paired_moments(
            work.block,
            each,
            batches=seen,
            given=inputs,
            parameters=parameters,
            quantizers=quantizers,
            known=known,
        )
        rows = paired_inputs(work.block, each, leaders, judged[0], inputs, parameters, quantizers, known)
        waiting -= set(modules)
        if not all(bool((pair.moment.diagonal() > 0).any()) for pair in moments.values()):
            continue  # no activation has reached it: nothing to compensate for
        outputs = [
            _outputs(work, m.key, None if gradients is None else gradients.outputs.get(name))
            for m, name in zip(unit.members, modules, strict=True)
        ]
        members = [
            _Given(m, moments[name], rows[leaders[name]], of_output, weights[m.key])
            for m, name, of_output in zip(unit.members, modules, outputs, strict=True)
        ]
        codes = _follow_unit(work, unit, members, share=share)
        found |= codes
        weights |= {key: decoded(q) for key, q in codes.items()}
    known.settle(known.order)
    after = _loss(work, weights, judged, inputs, targets, metric, known) if found else before
    if not (before < float("inf") and after < float("inf")):
        raise NumericsError(f"the output error of {work.block.name} is {after}; check the model's weights and the data")
    if found and not after < before:
        known.settle(())  # its codes are others
    return {**start, **found} if after < before else start, before, after


def _outputs(work: BlockWork, key: str, known: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
    """E[g g^T] of the rows of one member, of those of its module; None where nothing is known of them."""
    if known is None:
        return None
    assembly = next(a for a in work.assemblies if key in a.keys)
    if len(assembly.keys) == 1:
        return known
    numbers = {k: torch.full((len(work.weights[k]), 1), -1.0) for k in assembly.keys}
    numbers[key] = torch.arange(len(work.weights[key])).float().unsqueeze(1)
    rows = assembly.build(numbers).flatten()  # of the member, by row of the parameter
    return rows_of(known, torch.argsort(rows, stable=True)[int((rows < 0).sum()) :])


def divided(batches: int, held_out: float) -> tuple[list[int], list[int]]:
    """(numbers of the batches that are learned from, of those that judge): the last ones, as many as the share says; of
    a single batch both."""
    every = list(range(batches))
    judged = every[-max(1, round(batches * held_out)) :] if batches > 1 else every
    return every[: -len(judged)] or every, judged


@dataclass(frozen=True, slots=True)
class _Given:
    """What is known of a weight when it is its turn.

    inputs   of one held-out batch, in the float model and in the quantized one, float32 [tokens, K]
    outputs  E[g g^T] of its rows, by runs; None where nothing is known of them
    nearest  float32 [N, K]: the nearest codes, decoded
    """

    member: Member
    moments: Paired
    inputs: tuple[torch.Tensor, torch.Tensor]
    outputs: Sequence[torch.Tensor] | None
    nearest: torch.Tensor


def _follow_unit(work: BlockWork, unit: Unit, members: Sequence[_Given], *, share: float) -> dict[str, QTensor]:
    """Key -> the codes of one unit; none where it is to keep the nearest ones."""
    options, fmt = replace(by_data(unit), algorithm="gptq"), unit.scheme.fmt
    inputs: dict[int, tuple[Moments, Metric]] = {}  # by what is known of an input
    for m in members:
        if id(m.moments) not in inputs:
            moments = Moments(m.moments.moment.diagonal().clone(), full_moment=m.moments.moment)
            name, device = m.member.weight, work.block.device
            inputs[id(m.moments)] = moments, gptq.metric_of(moments, fmt, options, device=device, name=name)

    def choose(rows: Sequence[slice], share: float, *, outputs: bool) -> dict[str, QTensor]:
        weights = [work.weights[m.member.key][run].float() for m, run in zip(members, rows, strict=True)]
        wanted = list(weights)
        for of_input, (_, metric) in inputs.items() if share else ():
            sharing = [i for i, m in enumerate(members) if id(m.moments) == of_input]
            pair, name = members[sharing[0]].moments, members[sharing[0]].member.weight
            floats = [weights[i] for i in sharing]
            full = asymmetric.targets(floats, pair.moment, pair.cross, metric=metric, name=f"the input of '{name}'")
            for i, w, found in zip(sharing, floats, full, strict=True):
                wanted[i] = w + share * (found - w)
        runs: dict[tuple[int, int], QTensor] = {}
        task = Task(
            [LoadedWeight(w) for w in wanted],
            fmt,
            [m.member.weight for m in members],
            lambda member, row, q: runs.__setitem__((member, row), q),
            options,
            [replace(inputs[id(m.moments)][0], outputs=m.outputs if outputs else None) for m in members],
            device=work.block.device,
        )
        gptq.choose(task, [inputs[id(m.moments)][1] for m in members])
        return {m.member.key: joined(runs, i) for i, m in enumerate(members)}

    if two_sided.possible(fmt):  # else rows share a scale, and some of them do not stand for all
        # An odd step: one that divides the size of a head would try the same places of each.
        rows = [slice(0, None, max(TRIED_SHARE, len(m.nearest) // TRIED_ROWS) | 1) for m in members]
        nearest = _cost(work, members, rows, [m.nearest[run] for m, run in zip(members, rows, strict=True)])
        for tried in dict.fromkeys((share, 0.0)):
            codes = choose(rows, tried, outputs=False)
            if _cost(work, members, rows, [decoded(codes[m.member.key]) for m in members]) <= nearest:
                share = tried
                break
        else:
            return {}
    return choose([slice(None)] * len(members), share, outputs=True)


def _cost(work: BlockWork, members: Sequence[_Given], rows: Sequence[slice], decoded: Sequence[torch.Tensor]) -> float:
    """Squared error of the outputs ``rows`` on held-out inputs, with those rows ``decoded``; each output by what the
    model minds of it, where that is known."""
    total = 0.0
    for m, run, values in zip(members, rows, decoded, strict=True):
        x, seen = m.inputs
        squares = (x @ work.weights[m.member.key][run].float().t() - seen @ values.t()).square_().sum(0).double()
        if m.outputs is not None:
            squares *= torch.cat([g.diagonal() for g in m.outputs])[run].to(squares)
        total += float(squares.sum())
    return total


def _in_order(work: BlockWork, order: Sequence[str]) -> list[tuple[Unit, list[str]]]:
    """(unit, module of every member) for units that the block runs with, by the first call of one of their modules.

    order  modules as the block calls them
    """
    modules = work.modules
    named = [(unit, [modules[m.key] for m in unit.members]) for unit in work.followed]
    called = [(unit, names) for unit, names in named if all(name in order for name in names)]
    return sorted(called, key=lambda found: min(order.index(name) for name in found[1]))


@torch.no_grad()
def _loss(
    work: BlockWork,
    decoded: Mapping[str, torch.Tensor],
    batches: Sequence[int],
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
    metric: Sequence[torch.Tensor] | None,
    known: Known | None = None,
) -> float:
    """Mean squared difference of the quantized block's output to the target; with ``metric``, the
    moments of the gradients there by runs, half of its mean cost in it: nats of KL, to second order."""
    errors = []
    for batch in batches:
        error = work.outputs(inputs(batch), batch, decoded, known).float() - targets(batch).float()
        if metric is None:
            errors.append(error.square().mean())
            continue
        runs = zip(torch.split(error, OUT_ROWS, dim=-1), metric, strict=True)
        errors.append(0.5 * torch.stack([((run @ g) * run).sum(-1).mean() for run, g in runs]).sum())
    return float(torch.stack(errors).mean())
