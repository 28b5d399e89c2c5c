"""About how much memory the stages of a run take at their peak, from the shapes of the model.

The numbers were fitted to resident memory as it was measured: of the runs on bench-4m in docs/calibration.md, which are
1 to 14 % below the estimate for GPTQ in order and up to 22 % for the others, and of GPTQ in a layer of 11.8 M weights
with 2816 columns, 2 % below it. Larger layers were not tried. Must not know how a stage works.
"""

from collections import defaultdict
from math import prod

from ptqpipe.evaluation.scores import scoring_bytes
from ptqpipe.options import PipelineOptions
from ptqpipe.quantities import memory_size
from ptqpipe.runtime.loading import DEFAULT_LENGTH
from ptqpipe.source import Origins, Source
from ptqpipe.stages.common import layer_of
from ptqpipe.stages.pipeline.disk import POSITIONS, Disk, config_number, sets_of_states
from ptqpipe.stages.pipeline.table import Way

_PROCESS = 660 << 20  # torch, transformers and what they hold for a small model
# Bytes for each weight of a layer: float32 as it runs, the source's own, codes, decoded codes; and for each square of
# columns: moments in float64 and in float32 of every input, what GPTQ makes of the widest.
_WEIGHT = {"gptq": 14, "layerwise": 9, "": 4}
_EVERY, _WIDEST = 8, {"gptq": 64, "layerwise": 48, "": 0}


def memory_of(
    source: Source, work: PipelineOptions, way: Way | None, *, disk: Disk, limit: int
) -> dict[str, tuple[int, str]]:
    """Stage -> (bytes at its peak, what takes them), for those that --max-memory does not limit.

    limit  of --max-memory, up to which hidden states stay in memory
    """
    found: dict[str, tuple[int, str]] = {}
    whole = _PROCESS + 4 * sum(prod(shape) for _, shape in source.tensors.values())
    if "self" in work.data:
        found["generate"] = whole, "the whole model in float32, without its keys and values"
    if way is not None:
        name = "tune" if way.method else "calibrate"
        sets = sets_of_states(source, way)
        one = disk.hidden // max(sets[-2:])
        hidden = next((n * one for n in sets if n * one <= limit), 0)
        found[name] = _PROCESS + hidden + _of_layer(source, way.method), "one decoder layer at a time"
    if work.eval:
        config = source.reader.config
        window = min(DEFAULT_LENGTH, config_number(config, *POSITIONS) or DEFAULT_LENGTH)
        scoring = scoring_bytes(config_number(config, "vocab_size") or 1, window)
        found["eval"] = whole + scoring, "the whole model in float32, and what it predicts for some thousand tokens"
    return found


def text_of(found: dict[str, tuple[int, str]], limit: int) -> str:
    """The estimates in words."""
    stages = [f"{name} about {memory_size(nbytes)} ({why})" for name, (nbytes, why) in found.items()]
    return ", ".join([*stages, f"convert at most {memory_size(limit)} (--max-memory)"])


def _of_layer(source: Source, method: str) -> int:
    """The largest sum over a layer of what its weights and the moments of their inputs take."""
    weights: dict[int, int] = defaultdict(int)
    squares: dict[int, int] = defaultdict(int)
    widest: dict[int, int] = defaultdict(int)
    for name, member in Origins.of(source).weights.items():
        layer, square = layer_of(name), member.shape[1] ** 2
        if layer is not None:
            weights[layer] += member.shape[0] * member.shape[1]
            squares[layer] += square
            widest[layer] = max(widest[layer], square)
    every = _EVERY if method else 0
    most = [_WEIGHT[method] * n + every * squares[i] + _WIDEST[method] * widest[i] for i, n in weights.items()]
    return max(most, default=0)
