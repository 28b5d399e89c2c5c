"""Checks a load before it begins: whether config.json makes a model that the checkpoint fits and ranks divide.

Headers and an empty model are enough for that, so a service can refuse in a second what would otherwise stop every one
of its ranks in the middle of loading. Reads no weight.
"""

from pathlib import Path
from typing import Any

from ptqpipe.models.families import check_experts
from ptqpipe.models.language_model import causal_model_of, keep_language_model
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import empty_model
from ptqpipe.runtime.fill import completed, decide
from ptqpipe.runtime.loading import read_config, read_generation_config
from ptqpipe.runtime.parallel import TensorParallel


def check_load(ckpt: Path | str, *, tp: int = 1, packed: bool = True) -> Any:
    """The model, empty; raises what `load` with the same arguments would raise before it reads a weight.

    UsageError where ``tp`` ranks do not divide the model, CheckpointError where files contradict each other.
    """
    with Source.open(Path(ckpt)) as source:
        path = source.reader.path
        check_experts(source.reader.config, source.tensors)
        config = read_config(path)
        read_generation_config(path)
        model = keep_language_model(empty_model(*causal_model_of(config, path), path))
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = completed(model, source, get_model_conversion_mapping(model))
        decide(model, source, conversions, TensorParallel(tp), packed=packed, causal=True)
    return model
