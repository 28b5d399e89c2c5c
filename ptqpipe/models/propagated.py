"""Second moments of a model's inputs that its weights alone let expect: no text, no forward pass.

A norm passes on its gain times a residual stream whose channels have very different energies, and a few weights
decide which: where gate and up projection of one channel are large and point the same way, that channel is a massive
activation (https://arxiv.org/abs/2402.17762), and the column of down_proj that reads it writes the outliers that the
residual stream has from there on. So energies h_k = E x_k^2 are propagated from layer to layer, as if inputs were
normal and independent:

    norm       h = gain^2 r / mean(r) + bias^2, r the energies of the residual stream, all 1 in the beginning
    y = W x    E y^2 = W^2 h + bias^2
    g u        E g^2 E u^2 + 2 (E g u)^2 for a gate g and an up projection u of one input, the fourth moment of normal
               variables; the activation function is taken for the identity, which scales all channels alike
    attention  passes energies of values on: it mixes tokens, never channels
    residual   r + E y^2 of o_proj and down_proj, of experts the mean

Where channels are read and written is what `models/folding` finds. Of inputs behind anything else (states, latents of
attention, an MLP without a gate) nothing is known. What it gains: labs/propagated/README.md.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch

from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.folding import Edge, Matrix, Norm, Structure, find_structure
from ptqpipe.models.slices import Shapes, Slice

RUN_ELEMENTS = 1 << 18  # of a weight at a time: in float64 they stay in a cache
LEAST = 2.0**-7  # of the median: no channel is so small that its weights may be lost, should it be larger than expected
STEPS = 256  # of a number between two powers of two: so coarse that the order of a float64 sum changes none

_Place = tuple[str, int | None]
"""A tensor, and the expert in a stack."""


class Rows(Protocol):
    """A weight [out, in] whose rows are read when they are asked for."""

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


class PropagatedInputs:
    """The expected second moments of the inputs of a model's weights. Computing them reads every weight once.

    tensors, config  of a plain checkpoint, as `find_structure` takes them
    rows             opens a weight
    read             a whole tensor by name
    """

    def __init__(
        self,
        tensors: Shapes,
        config: Mapping[str, Any],
        *,
        rows: Callable[[Slice, tuple[int, int]], Rows],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._tensors, self._config, self._rows, self._read = tensors, config, rows, read
        self._lock = threading.Lock()
        self._moments: dict[_Place, torch.Tensor] | None = None

    def compute(self, *, workers: int = 1) -> Mapping[tuple[str, int | None], torch.Tensor]:
        """By tensor and expert of the weight that reads them, float32 [K], larger than 0; empty for a model whose
        structure is not known. At the first call alone anything is computed, by so many threads."""
        with self._lock:
            if self._moments is None:
                self._moments = _rounded(self._propagate(workers))
            return self._moments

    def of(self, where: Slice, columns: int) -> torch.Tensor | None:
        """Of a weight with so many columns; None where nothing is known of its input, and where that is rotated."""
        moments = None if where.rotation else self.compute().get((where.tensor, where.expert))
        return moments if moments is not None and len(moments) == columns else None

    def _propagate(self, workers: int) -> dict[_Place, torch.Tensor]:
        try:
            structure = find_structure(self._tensors, self._config)
        except (UsageError, CheckpointError):
            return {}
        if not _fits(structure, self._tensors):
            return {}
        with ThreadPoolExecutor(workers) as pool:
            return _Propagation(structure, self._rows, self._read, pool).run()


def _fits(structure: Structure, tensors: Shapes) -> bool:
    """Whether every width is the one that reads or writes it: those of a damaged checkpoint need not be."""
    hidden, outputs = structure.hidden, [tensors[norm][1] for norm in structure.output_norms]
    if not hidden or any(shape != (hidden,) for shape in outputs):
        return False
    matrices = list(structure.writers)
    gates: Mapping[Matrix, Matrix] = {}
    for edge in structure.edges:
        producer = edge.producer
        if isinstance(producer, Norm):
            bias = (edge.channels,) if producer.bias is None else tensors[producer.bias][1]
            if bias != (edge.channels,) or (edge.kind == "norm" and edge.channels != hidden):
                return False
            gates = _gates(edge)
        else:
            gate = _gate_of(producer, gates) if edge.kind == "up" else producer
            if gate is None or gate.shape != producer.shape or gate.start < 0:
                return False
            matrices += [producer, gate]
    biases = ((tensors[m.bias][1], m.start + m.shape[0]) for m in matrices if m.bias is not None)
    return all(writer.shape[0] == hidden for writer in structure.writers) and all(
        len(shape) == 1 and shape[0] >= rows for shape, rows in biases
    )


def _gates(edge: Edge) -> dict[Matrix, Matrix]:
    """Each reader of a norm -> the one before it: for an up projection its gate, where that is a tensor of its own."""
    return dict(zip(edge.consumers[1:], edge.consumers, strict=False))


def _gate_of(up: Matrix, gates: Mapping[Matrix, Matrix]) -> Matrix | None:
    """The rows above it in a fused tensor, else the tensor before it; None where there is none."""
    return replace(up, start=up.start - up.shape[0]) if up.start else gates.get(up)


def _rounded(moments: dict[_Place, torch.Tensor]) -> dict[_Place, torch.Tensor]:
    """In float32 with 8 bits: the same on every machine and with any number of threads, whose sums differ in the last
    of 53. Weights that read one input keep one tensor."""
    done: dict[int, torch.Tensor] = {}
    for h in moments.values():
        if id(h) not in done:
            median = float(h.median())
            significand, exponent = torch.frexp((h / median if median > 0 else h).clamp_min(LEAST))
            done[id(h)] = torch.ldexp((significand * STEPS).round() / STEPS, exponent).float()
    return {place: done[id(h)] for place, h in moments.items() if bool(torch.isfinite(done[id(h)]).all())}


class _Propagation:
    """The energies of the residual stream, and those of inputs so far."""

    def __init__(
        self,
        structure: Structure,
        rows: Callable[[Slice, tuple[int, int]], Rows],
        read: Callable[[str], torch.Tensor],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._structure, self._rows, self._read_whole, self._pool = structure, rows, read, pool
        self._residual = torch.ones(structure.hidden, dtype=torch.float64)
        self._moments: dict[_Place, torch.Tensor] = {}
        self._writers = {_place(writer) for writer in structure.writers}
        self._outputs: dict[str, list[str]] = defaultdict(list)  # norms behind attention and MLP, by layer
        for norm in structure.output_norms:
            self._outputs[norm.removesuffix(".weight").rpartition(".")[0]].append(norm)

    def run(self) -> dict[_Place, torch.Tensor]:
        for layer, edges in _by_layer(self._structure.edges):
            written: dict[bool, list[torch.Tensor]] = defaultdict(list)  # by whether an expert wrote it
            gates: Mapping[Matrix, Matrix] = {}
            norms = self._outputs[layer]
            for edge in edges:
                if edge.kind in ("norm", "latent"):
                    if edge.kind == "norm":
                        self._add(written, norms[:1])
                        gates = _gates(edge)
                    self._read(edge)
                    continue
                h = self._behind(edge, gates)
                if h is None:
                    continue
                for consumer in edge.consumers:
                    self._moments[_place(consumer)] = h
                    if _place(consumer) in self._writers:
                        written[".experts." in edge.id].append(self._energies(consumer, h))
            self._add(written, norms[-1:])
        return self._moments

    def _read(self, edge: Edge) -> None:
        """What the consumers of a norm see."""
        norm = edge.producer
        assert isinstance(norm, Norm)
        h = self._gain(norm)
        if edge.kind == "norm":
            h = h * self._residual / self._residual.mean()
        if norm.bias is not None:
            h = h + self._whole(norm.bias).square()
        for consumer in edge.consumers:
            self._moments[_place(consumer)] = h

    def _behind(self, edge: Edge, gates: Mapping[Matrix, Matrix]) -> torch.Tensor | None:
        """float64 [K] of what the consumers of a value or an up edge read; None where the producer's input is not
        known. ``gates``: as `_gates`."""
        producer = edge.producer
        assert isinstance(producer, Matrix)
        x = self._moments.get(_place(producer))
        if x is None:
            return None
        if edge.kind == "value":
            return self._energies(producer, x)[edge.channel_of()]
        up = producer
        gate = _gate_of(up, gates)
        assert gate is not None
        pairs = self._over_rows((gate, up), lambda g, u: torch.stack([(g * g) @ x, (u * u) @ x, (g * u) @ x]))
        of_gate, of_up = pairs[0] + self._bias(gate), pairs[1] + self._bias(up)
        return of_gate * of_up + 2 * pairs[2].square()

    def _add(self, written: dict[bool, list[torch.Tensor]], norms: Sequence[str]) -> None:
        """What a sublayer wrote joins the residual stream, behind a norm where the model has one there."""
        parts, experts = written.pop(False, []), written.pop(True, [])
        parts += [torch.stack(experts).mean(dim=0)] if experts else []
        if not parts:
            return
        total = torch.stack(parts).sum(dim=0)
        for norm in norms:
            total = self._gain(Norm(norm, self._structure.norms.offset)) * total / total.mean()
        self._residual = self._residual + total

    def _gain(self, norm: Norm) -> torch.Tensor:
        return (self._whole(norm.weight) + norm.offset).square()

    def _whole(self, name: str) -> torch.Tensor:
        """A norm or a bias, float64."""
        return self._read_whole(name).double()

    def _bias(self, matrix: Matrix) -> torch.Tensor | float:
        """bias^2 of its rows."""
        if matrix.bias is None:
            return 0.0
        return self._whole(matrix.bias)[matrix.start : matrix.start + matrix.shape[0]].square()

    def _energies(self, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        """float64 [rows]: E y^2 of y = W x + bias."""
        return self._over_rows((matrix,), lambda w: (w * w) @ x) + self._bias(matrix)

    def _over_rows(self, matrices: Sequence[Matrix], sums: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``sums`` [..., n] of every run of n rows, float64, of weights of one shape, joined to [..., rows]."""
        weights = [self._rows(_slice_of(matrix), matrix.shape) for matrix in matrices]
        count, columns = matrices[0].shape

        def of_run(run: tuple[int, int]) -> torch.Tensor:
            return sums(*(weight.rows(*run).double() for weight in weights))

        step = max(1, RUN_ELEMENTS // columns)
        runs = [(start, min(start + step, count)) for start in range(0, count, step)]
        # Rows with NaN or inf count as zeros: a damaged weight is refused where it is quantized, and copied where not.
        joined = torch.cat(list(self._pool.map(of_run, runs)), dim=-1)
        return joined.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _slice_of(matrix: Matrix) -> Slice:
    return Slice(matrix.tensor, start=matrix.start, expert=matrix.expert, transposed=matrix.transposed)


def _place(matrix: Matrix) -> _Place:
    return matrix.tensor, matrix.expert


def _by_layer(edges: Iterable[Edge]) -> Iterator[tuple[str, list[Edge]]]:
    """Each layer and its edges, in their order, from the first layer to the last; the head's left out."""
    layers: dict[tuple[str, int], list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.kind != "final":
            parts = edge.id.split(".")
            number = next(i for i, part in enumerate(parts) if part.isdigit())
            layers[".".join(parts[:number]), int(parts[number])].append(edge)
    return ((f"{parent}.{number}", layers[parent, number]) for parent, number in sorted(layers))
