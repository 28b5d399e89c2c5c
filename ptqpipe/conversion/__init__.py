"""Writing one checkpoint from another: what will be written, how a unit is quantized, and the run itself.

    job.py              `CheckpointJob`, the contract of everything that writes a checkpoint, and what runs it
    planned_outputs.py  what a recipe writes for a source
    units.py            quantizes a unit by its rule; input_moments.py: the statistics of its inputs
    kv_cache.py         the scales of an FP8 KV cache
    conversion.py       the `CheckpointJob` of convert and tune; consume.py: learned codes, deleted once written

Knows no command line and prints nothing but progress.
"""

from ptqpipe.conversion.input_moments import (
    InputScales,
    check_model,
    describe_statistics,
    means_of,
    module_of,
    open_statistics,
    unit_extra_bytes,
)
from ptqpipe.conversion.job import (
    CheckpointJob,
    CopyTensor,
    Run,
    WriteResult,
    as_quantized,
    is_unfinished,
    merged,
    named_source,
    parts_of_stage,
    records_of,
    run_parts_of,
    write_checkpoint,
    write_whole,
)
from ptqpipe.conversion.kv_cache import CACHE_REASON, WriteCacheScales, cache_specs, check_cached, write_scales
from ptqpipe.conversion.planned_outputs import (
    BIAS_REASON,
    MeanErrors,
    OutputJob,
    Outputs,
    QuantizeUnit,
    check_read_back,
    container_of,
    corrected_biases,
    outputs_of,
    with_reasons,
)
from ptqpipe.conversion.units import learned_codes, quantize_unit
