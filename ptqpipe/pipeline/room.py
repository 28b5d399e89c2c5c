"""What a run of several stages takes of the disk and of memory, from the shapes of the model. Must not know how a stage
works.

Disk: what each stage leaves for the next beside the output, at most; held by a test that watches the folder.

Memory: about the peak of each stage. The numbers were fitted to resident memory as it was measured: of the runs on
bench-4m in docs/calibration.md, which are 1 to 14 % below the estimate for GPTQ in order and up to 22 % for the others,
and of GPTQ in a layer of 11.8 M weights with 2816 columns, 2 % below it. Larger layers were not tried.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ptqpipe.calibration.backward import enough, least_step, streams
from ptqpipe.calibration.expert_inputs import STREAMS
from ptqpipe.calibration.inputs import EXPERT_ROWS, OUT_ROWS
from ptqpipe.calibration.pairs import LEAST, most_pairs
from ptqpipe.calibration.rows import files_of
from ptqpipe.calibration.statistics import of_all_experts
from ptqpipe.check.evaluate.cache import DEFAULT_LIMIT, MOST
from ptqpipe.check.evaluate.scores import scoring_bytes
from ptqpipe.checkpoint.tensor_names import layer_of
from ptqpipe.conversion.transform.learn import ELEMENTS, STATES, TEMPORARIES
from ptqpipe.conversion.transform.plan import TransformOptions, matrix_bytes
from ptqpipe.models.folding import find_structure
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source
from ptqpipe.pipeline.call import own_weight
from ptqpipe.pipeline.presets import Way
from ptqpipe.quantization.transforms import BATCH, transform_names
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.quantities import disk_size, memory_size
from ptqpipe.runtime.loading import DEFAULT_LENGTH

# Bytes for each channel of a matrix, in float32: maximum, mean, second moment and that of the held-out samples, and the
# mean square of the gradient at an output; the moments of its block of 16 and those of the held-out samples; a factor
# in base64, in the journal and in the file.
_STATISTICS, _BLOCKS, _FACTOR = 5 * 4, 4 * 32, 2 * 11
_MATRIX = 4096  # JSON about one matrix, of all stages
_HIDDEN = "hidden_size", "n_embd"
_POSITIONS = "max_position_embeddings", "n_positions"
_LEAST_ROWS = 32  # samples that rotations are learned from at the least, where there are so many
_TOKEN = 12  # a token of the model's own text, as JSON

_PROCESS = 660 << 20  # torch, transformers and what they hold for a small model
# Bytes for each weight of a layer: float32 as it runs, the source's own, codes, decoded codes; and for each square of
# columns: moments in float64 and in float32 of every input, what GPTQ makes of the widest.
_WEIGHT = {"gptq": 14, "layerwise": 9, "": 4}
_EVERY, _WIDEST = 8, {"gptq": 64, "layerwise": 48, "": 0}


class Disk(NamedTuple):
    """Bytes beside the output while it is made, at most.

    codes   those that `tune` finds, until they are in the output; moments of gradients, until they are found, and the
            slopes that the reverse pass goes on from, until it ends
    small   statistics, factors, the model's own text, the matrices of rotations
    pairs   inputs and gradients that rotations are learned from, until they are
    hidden  hidden states of the samples, which lie on disk only where memory has no room for them
    logits  log-probabilities of the model, for the comparison at the end
    """

    codes: int = 0
    small: int = 0
    pairs: int = 0
    hidden: int = 0
    logits: int = 0

    def __str__(self) -> str:
        """In words, without what is not there."""
        parts = {
            "codes": self.codes,
            "statistics": self.small,
            "inputs and gradients that rotations are learned from": self.pairs,
            "hidden states, if they do not fit in memory": self.hidden,
            "log-probabilities": self.logits,
        }
        return ", ".join(f"{disk_size(nbytes)} of {what}" for what, nbytes in parts.items() if nbytes)


def disk_of(source: Source, work: PipelineOptions, way: Way | None, *, statistics: bool, weights_bytes: int) -> Disk:
    """What a run needs beside its output.

    statistics     whether it makes any for what it writes
    weights_bytes  of the output; 0 where a budget decides it, which the size of the source then bounds
    """
    config = source.reader.config
    texts, vocabulary = [Path(text).expanduser() for text in files_of(work.eval)], _config_number(config, "vocab_size")
    known = bool(vocabulary) and all(text.is_file() for text in texts)  # a data set's size is not
    letters = sum(text.stat().st_size for text in texts) if known else 0  # at least one to a token
    logits = min(DEFAULT_LIMIT, letters * (MOST * vocabulary + 4)) if known else DEFAULT_LIMIT * bool(texts)
    if way is None:
        return Disk(logits=logits)
    gptq, turned = way.method == "gptq", bool(way.rotations)
    planes = [(shape, shape[0] if len(shape) > 2 else 1) for _, shape in source.tensors.values() if len(shape) > 1]
    each = _STATISTICS * (statistics + turned) + (_STATISTICS + _BLOCKS + _FACTOR if way.transform else 0)
    channels = sum(max(shape[-2:]) * count for shape, count in planes)
    tokens = max(_tokens(config, work))
    own_text = _TOKEN * tokens if own_weight(work.data) is not None else 0
    return Disk(
        max((weights_bytes or source.reader.nbytes) if way.method else 0, _slopes(source, work) * gptq)
        + _gradients(source) * gptq,
        channels * each + _MATRIX * sum(count for _, count in planes) + own_text + _matrices(source, way),
        4 * sum(_inputs(source)) * _pairs(source, work) * turned,
        4 * _config_number(config, *_HIDDEN) * max(_states(source, work, way)[-2:]),
        logits,
    )


def memory_of(source: Source, work: PipelineOptions, way: Way | None, *, limit: int) -> dict[str, tuple[int, str]]:
    """Stage -> (bytes at its peak, what takes them), for those that --max-memory does not limit.

    limit  of --max-memory, up to which hidden states stay in memory
    """
    peaks: dict[str, tuple[int, str]] = {}
    config = source.reader.config
    whole = _PROCESS + 4 * sum(prod(shape) for _, shape in source.tensors.values())
    if own_weight(work.data) is not None:
        peaks["generate"] = whole, "the whole model in float32, without its keys and values"
    if way is not None:
        name = "tune" if way.method else "calibrate"
        *backward, least = (4 * _config_number(config, *_HIDDEN) * n for n in _states(source, work, way))
        more = 4 * max(_tokens(config, work)) * _width(source) if way.method == "gptq" else 0
        forward = min(least + more, max(least, limit)), least  # as much more as there is room for
        hidden = max(next((n for n in each if n <= limit), 0) for each in (backward, forward))
        if way.rotations:
            peaks["rotate"] = (
                _PROCESS + _learning(source, work),
                "inputs and gradients of all layers that read the residual stream",
            )
        peaks[name] = _PROCESS + hidden + _largest_layer(source, way.method), "one decoder layer at a time"
    if work.eval:
        window = min(DEFAULT_LENGTH, _config_number(config, *_POSITIONS) or DEFAULT_LENGTH)
        scoring = scoring_bytes(_config_number(config, "vocab_size") or 1, window)
        peaks["eval"] = whole + scoring, "the whole model in float32, and what it predicts for some thousand tokens"
    return peaks


def memory_text(found: dict[str, tuple[int, str]], limit: int) -> str:
    """The estimates in words."""
    stages = [f"{name} about {memory_size(nbytes)} ({why})" for name, (nbytes, why) in found.items()]
    return ", ".join([*stages, f"convert at most {memory_size(limit)} (--max-memory)"])


def _width(source: Source) -> int:
    """How many numbers a token has in the inputs and outputs of a layer's matrices together: GPTQ in order keeps the
    one or the other of each where memory has room, and what is freed in between is not all used again. Not of experts,
    of which it keeps what all of a layer are given."""
    widths: dict[int, int] = defaultdict(int)
    for name, member in _members(source):
        layer = layer_of(name)
        if layer is not None and not _is_expert(name):
            widths[layer] += sum(member.shape)
    return max(widths.values(), default=0)


def _largest_layer(source: Source, method: str) -> int:
    """The largest sum over a layer of what its weights and the moments of their inputs take; GPTQ in order has those
    of one expert at a time."""
    weights: dict[int, int] = defaultdict(int)
    squares: dict[int, int] = defaultdict(int)
    widest: dict[int, int] = defaultdict(int)
    for name, member in _members(source):
        layer, square = layer_of(name), member.shape[1] ** 2
        if layer is not None:
            weights[layer] += member.shape[0] * member.shape[1]
            squares[layer] += 0 if method == "gptq" and _is_expert(name) else square
            widest[layer] = max(widest[layer], square)
    every = _EVERY if method else 0
    most = [_WEIGHT[method] * n + every * squares[i] + _WIDEST[method] * widest[i] for i, n in weights.items()]
    return max(most, default=0)


def _tokens(config: Mapping[str, Any], work: PipelineOptions) -> tuple[int, int]:
    """How many the samples have that are run backwards, and all of them with those held out."""
    seqlen = _seqlen(config, work)
    return enough(work.samples, seqlen) * seqlen, -(-work.samples * 9 // 8) * seqlen


def _seqlen(config: Mapping[str, Any], work: PipelineOptions) -> int:
    return work.seqlen or min(DEFAULT_LENGTH, _config_number(config, *_POSITIONS) or DEFAULT_LENGTH)


def _states(source: Source, work: PipelineOptions, way: Way) -> tuple[int, ...]:
    """How many hidden states there are at once: in the reverse pass before GPTQ in order, where memory has room for
    those of every layer and where not, and in GPTQ in order; else those that enter a layer."""
    count, (few, every) = _layers(source), _tokens(source.reader.config, work)
    if way.method != "gptq":
        return (every,)
    forward = 3 + (STREAMS if any(_is_expert(name) for name, _ in _members(source)) else 0)
    return streams(count, 1) * few, streams(count, least_step(count)) * few, forward * every


def _gradients(source: Source) -> int:
    """What the moments of gradients at the outputs of weights and layers take: half of each symmetric matrix, in
    float32."""
    outputs = [(_is_expert(name), member.shape[0]) for name, member in _members(source)]
    outputs += [(False, _config_number(source.reader.config, *_HIDDEN))] * _layers(source)
    return sum(2 * n * (min(n, EXPERT_ROWS if expert else OUT_ROWS) + 1) for expert, n in outputs)


def _slopes(source: Source, work: PipelineOptions) -> int:
    """What the reverse pass goes on from behind a layer, in float32, and that of the layer before until it is there."""
    few, _ = _tokens(source.reader.config, work)
    return 2 * 4 * few * _config_number(source.reader.config, *_HIDDEN)


def _members(source: Source) -> Iterator[tuple[str, Member]]:
    """Every weight that could be quantized, by a name; the experts of a stack one by one."""
    origins = WeightMap.of(source)
    yield from origins.weights.items()
    apart = {member.source.tensor for member in origins.weights.values()}
    for name, stack in origins.stacks.items():
        for expert, member in stack.items():
            if member.source.tensor not in apart:
                yield f"{name}[{expert}]", member


def _is_expert(weight: str) -> bool:
    return of_all_experts(weight) != weight


def _inputs(source: Source) -> list[int]:
    """Columns of the input of each linear layer of the decoder, those of a layer's experts once."""
    known = {of_all_experts(name): member.shape[1] for name, member in _members(source)}
    return [columns for name, columns in known.items() if layer_of(name) is not None]


def pair_samples(source: Source, work: PipelineOptions) -> int:
    """How many samples rotations are learned from: those that have as many tokens as pairs are kept of, but no fewer
    than some rows of text."""
    seqlen = _seqlen(source.reader.config, work)
    return min(work.samples, max(_LEAST_ROWS, -(-most_pairs(sum(_inputs(source))) // seqlen)))


def _pairs(source: Source, work: PipelineOptions) -> int:
    """Of how many tokens pairs are kept, at most."""
    tokens = pair_samples(source, work) * _seqlen(source.reader.config, work)
    return min(tokens, most_pairs(sum(_inputs(source))))


def _matrices(source: Source, way: Way) -> int:
    """What the matrices of rotations take as text, in the journal and in both files that have them."""
    if not way.rotations:
        return 0
    options = TransformOptions(way.rotations, learn=way.steps)
    structure = find_structure(source.tensors, source.reader.config)
    return 3 * matrix_bytes(transform_names(way.rotations), structure, options)


def _learning(source: Source, work: PipelineOptions) -> int:
    """The pairs of the residual stream, and what a step takes; a layer's pairs and what they are found from is less."""
    hidden, readers = _config_number(source.reader.config, *_HIDDEN), 2 * _layers(source)
    tokens = min(_pairs(source, work), max(LEAST, ELEMENTS // max(1, 2 * readers * hidden)))
    return 4 * tokens * hidden * (readers + 1) + hidden * (8 * STATES * 256 + 4 * TEMPORARIES * BATCH)


def _layers(source: Source) -> int:
    """Decoder layers; 1 where the config does not say."""
    return _config_number(source.reader.config, "num_hidden_layers", "n_layer") or 1


def _config_number(config: Mapping[str, Any], *keys: str) -> int:
    """A count of the text model's config, whatever its family calls it; 0 where it has none."""
    text = config.get("text_config")
    values = [part.get(key) for part in (text, config) if isinstance(part, Mapping) for key in keys]
    return next((value for value in values if isinstance(value, int)), 0)
