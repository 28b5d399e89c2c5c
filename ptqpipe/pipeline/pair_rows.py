"""How many samples rotations are learned from."""

from ptqpipe.calibration.pairs import most_pairs
from ptqpipe.calibration.statistics import of_all_experts
from ptqpipe.checkpoint.tensor_names import layer_of
from ptqpipe.models.source import Source
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.runtime.loading import DEFAULT_LENGTH

LEAST_ROWS = 32  # where there are so many


def pair_samples(source: Source, work: PipelineOptions) -> int:
    """Those that have as many tokens as pairs are kept of, but no fewer than some rows of text."""
    text = source.reader.config.get("text_config")
    configs = [part for part in (text, source.reader.config) if isinstance(part, dict)]
    keys = "max_position_embeddings", "n_positions"
    positions = [value for part in configs for key in keys if isinstance(value := part.get(key), int)]
    seqlen = work.seqlen or min(DEFAULT_LENGTH, next(iter(positions), 0) or DEFAULT_LENGTH)
    return min(work.samples, max(LEAST_ROWS, -(-most_pairs(_columns(source)) // seqlen)))


def _columns(source: Source) -> int:
    """Sum over the inputs of all linear layers of the decoder; experts of a layer share theirs."""
    weights = WeightMap.of(source)
    columns = {of_all_experts(name): member.shape[1] for name, member in weights.weights.items()}
    apart = {member.source.tensor for member in weights.weights.values()}
    for name, stack in weights.stacks.items():
        for expert, member in stack.items():
            if member.source.tensor not in apart:
                columns[of_all_experts(f"{name}[{expert}]")] = member.shape[1]
    return sum(count for name, count in columns.items() if layer_of(name) is not None)
