"""Fills transformers' empty model: which weights stay packed, and which part of each a rank reads.

`prepare` takes a model on the meta device and an open checkpoint. It decides everything from names and headers, so that
what does not fit is refused before a weight is read; then it puts packed layers, read from the files, into the model
and says from what transformers is to fill the rest. `Filling.finish` hangs the hooks on the filled model.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptqpipe.checkpoint.layouts import StoredWeight
from ptqpipe.errors import UsageError
from ptqpipe.models.families import in_mtp_layers
from ptqpipe.models.language_model import lacks_head, leave_out_pooler, without_head
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import other_shape
from ptqpipe.runtime.input_quantizers import GROUP, InputQuantizer
from ptqpipe.runtime.linear import PackedLinear
from ptqpipe.runtime.parallel import TensorParallel
from ptqpipe.runtime.parameter_names import Home, Homes, with_expert_names
from ptqpipe.runtime.replace import PackedPlace, packed_places
from ptqpipe.runtime.shard import ShardPlan, axis_of, connect, is_transposed, make_plan, shrink
from ptqpipe.runtime.simulate import input_quantizer, simulate_activations, simulate_kv_cache
from ptqpipe.runtime.state import LazyTensor, Region, lazy_state, parameter_names

Progress = Callable[[int, int], None]
"""(bytes of weights read so far, bytes in all), as they lie in the files: called after each weight, from any thread. An
error that it raises ends the loading."""

_PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Tells ``progress`` about every model that this thread loads meanwhile.

    A rank counts whole weights, though it reads its own part of each.
    """
    token = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


def _counter(source: Source, names: Sequence[str]) -> Callable[[str], None]:
    """A callback for the name of each weight that was read; repeated names are ignored."""
    progress = _PROGRESS.get()
    if progress is None:
        return lambda name: None
    left = {name: source.nbytes(name) for name in names}
    total, lock, done = sum(left.values()), threading.Lock(), 0
    progress(0, total)

    def count(name: str) -> None:
        nonlocal done
        with lock:
            done += left.pop(name, 0)
            progress(done, total)

    return count


@dataclass(frozen=True, slots=True)
class Filling:
    """The source of a model's tensors. Names of ``homes``, ``state`` and ``packed`` are the checkpoint's.

    state        from what transformers fills the parameters
    conversions  by what it makes parameters of the state
    packed       the weights that are in the model already, packed
    """

    source: Source
    homes: Mapping[str, list[Home]]
    plan: ShardPlan
    state: Mapping[str, LazyTensor]
    conversions: Sequence[Any]
    packed: frozenset[str]
    activations: bool

    def finish(self, model: Any) -> None:
        """Completes a filled model: quantized inputs of its float layers, its kv cache, and the ranks' sums."""
        if self.activations:
            simulate_kv_cache(model, self.source, homes=self.homes, cuts=self.plan.cuts)
        simulate_activations(model, self.source, homes=self.homes, packed=self.packed, activations=self.activations)
        connect(model, self.plan)
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.loaded = True
            if self.source.stored and hasattr(module, "config"):  # Jamba then calls a layer that it multiplies itself
                module.config._is_quantized = True


def prepare(
    model: Any,
    source: Source,
    conversions: Sequence[Any],
    *,
    ranks: TensorParallel | None = None,
    packed: bool = True,
    activations: bool = True,
    causal: bool = False,
) -> Filling:
    """Makes ``model``, on the meta device, ready to be filled with this rank's part of ``source``.

    conversions  transformers' own of the model's checkpoint names
    packed       whether quantized weights stay packed where the model has a linear layer or stacked experts for them
    causal       whether the model's head must be there: it is to give probabilities of tokens

    UsageError for ranks that do not divide the model or activations that cannot be simulated, before any weight is
    read; CheckpointError for a damaged checkpoint.
    """
    conversions = completed(model, source, conversions)
    ranks = ranks or TensorParallel()
    homes, plan, regions, places = decide(model, source, conversions, ranks, packed=packed, causal=causal)
    quantizers = {name: _quantizers(source, source.stored[name], activations) for x in places for name in x.weights}
    shrink(model, plan)
    count = _counter(source, list(regions))
    for place in places:
        place.install(model, source, regions, quantizers)
        for name in place.weights:
            count(name)
    gone = frozenset(quantizers)
    rest = {name: region for name, region in regions.items() if name not in gone}
    state = lazy_state(source, rest, read_one=count)
    return Filling(source, homes, plan, state, conversions, gone, activations)


def completed(model: Any, source: Source, conversions: Sequence[Any]) -> list[Any]:
    """transformers' conversions with those that it lacks for this checkpoint."""
    return with_expert_names(model, conversions, {name: source.tensors[name][1] for name in parameter_names(source)})


def decide(
    model: Any, source: Source, conversions: Sequence[Any], ranks: TensorParallel, *, packed: bool, causal: bool
) -> tuple[dict[str, list[Home]], ShardPlan, dict[str, Region], list[PackedPlace]]:
    """Where each tensor goes, how the model is cut, what this rank reads of each, and which weights stay packed.

    From names and headers alone; raises what `prepare` does.
    """
    find, drafts = Homes(model, conversions), in_mtp_layers(source.reader.config)
    all_homes = {name: find.of(name) for name in parameter_names(source) if not find.left_out(name)}
    # A model without its multi-token prediction layers has no place for them, and is whole.
    homes = {name: places for name, places in all_homes.items() if places or not drafts(name)}
    for name, places in homes.items():
        _check_shape(model, source, name, places)
    filled = {home.parameter for places in homes.values() for home in places}
    leave_out_pooler(model, filled)
    if causal and lacks_head(model, filled):
        raise without_head(source.reader.path, model)
    blocks = _blocks(source, homes)
    plan = make_plan(model, ranks, columns=lambda name: blocks.get(name, 1))
    regions = {name: _region(model, source, name, places, plan) for name, places in homes.items()}
    return homes, plan, regions, packed_places(model, source, homes) if packed else []


def _check_shape(model: Any, source: Source, name: str, homes: Sequence[Home]) -> None:
    """CheckpointError for a tensor that goes where another shape is; the model has its whole ones."""
    stored = source.tensors[name][1]
    for home in homes:
        if home.plain and not home.merged:
            expected = tuple(getattr(model.get_submodule(home.module), home.leaf).shape)
            if expected != tuple(stored):
                raise other_shape(source.reader.path, name, stored, expected)


def _blocks(source: Source, homes: Mapping[str, list[Home]]) -> dict[str, int]:
    """How many columns of each parameter stay together: a block of its format, a group of its input's, a rotation."""
    blocks: dict[str, int] = {}
    for name, stored in source.stored.items():
        scheme = stored.scheme
        together = math.lcm(max(scheme.fmt.block[1], GROUP.get(scheme.activation, 1), 1), scheme.rotation or 1)
        for home in homes.get(name, ()):
            blocks[home.parameter] = max(blocks.get(home.parameter, 1), together)
    return blocks


def _region(model: Any, source: Source, name: str, homes: Sequence[Home], plan: ShardPlan) -> Region:
    home = next((home for home in homes if home.parameter in plan.cuts), None)
    if home is None:
        return Region()
    if not home.plain:
        raise UsageError(f"transformers rearranges {name!r} while loading, so its parts cannot be read; use tp=1")
    cut = plan.cuts[home.parameter]
    cut = replace(cut, pieces=1) if home.pieces > 1 else cut
    stored = source.stored.get(name)
    shape = source.tensors[name][1]
    transposed = is_transposed(model.get_submodule(home.module))
    dims = tuple(axis_of(len(shape), axis, transposed=transposed, leaf=home.leaf) for axis in ("out", "in"))
    extent = shape[dims[0 if cut.axis == "out" else 1]] if stored is None else stored.shape[cut.axis == "in"]
    ranges = cut.ranges(extent)
    if cut.axis == "out":
        return Region(rows=ranges, dims=(dims[0], dims[1]))
    return Region(columns=ranges[0], dims=(dims[0], dims[1]))


def _quantizers(source: Source, stored: StoredWeight, activations: bool) -> tuple[InputQuantizer, ...]:
    return tuple(input_quantizer(source, stored, expert, activations=activations) for expert in stored.planes)


Prepare = Callable[[Any, Sequence[Any]], Filling]
"""(empty model, conversions) -> what fills it."""


@contextmanager
def instead_of_files(model_class: Any, prepare_state: Prepare) -> Iterator[None]:
    """Makes ``from_pretrained`` of this class fill its model with what ``prepare_state`` gives.

    transformers calls ``_load_pretrained_model(model, state_dict, files, load_config)`` of the class once, when the
    model stands empty. The override is on that class alone and goes when the block ends.
    """
    undo = override_loading(model_class, lambda load_config: True, prepare_state)
    try:
        yield
    finally:
        undo()


def override_loading(model_class: Any, wanted: Callable[[Any], bool], prepare_state: Prepare) -> Callable[[], None]:
    """The override of `instead_of_files`, which goes after one call. Returns what takes it off, any number of times.

    wanted  whether a call, by its ``load_config``, is the one that was meant
    """
    own = model_class.__dict__.get("_load_pretrained_model")
    original: Callable[..., Any] = model_class._load_pretrained_model
    active = True

    def undo() -> None:
        nonlocal active
        if active and own is None:
            del model_class._load_pretrained_model
        elif active:
            model_class._load_pretrained_model = own
        active = False

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        undo()
        if wanted(load_config):  # the state is a float model's: nothing is left for a quantizer
            filling = prepare_state(model, load_config.weight_mapping or [])
            state_dict = filling.state
            load_config = replace(load_config, hf_quantizer=None, weight_mapping=filling.conversions)
        with torch.no_grad():
            return original(model, state_dict, checkpoint_files, load_config, *rest, **named)

    model_class._load_pretrained_model = staticmethod(load)
    return undo
