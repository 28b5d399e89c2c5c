"""What the commands share: everything that more than one folder of ``stages/`` imports is named here.

outputs.py, rewriting.py    what a recipe writes for a source, and the run of a command that writes a checkpoint
kv_cache.py                 the scales of an FP8 KV cache
units.py, moments.py        a unit quantized by its rule, with what statistics know of its inputs
text.py                     what several commands say
"""

from ptqpipe.card import CARD, ORIGINAL, card_sha256, is_ours, write_quality
from ptqpipe.checkpoint import name_of
from ptqpipe.machine import (
    BASE_BYTES,
    WORKER_BYTES,
    Job,
    Machine,
    MemoryPool,
    Ranks,
    Share,
    bars_of,
    compute_threads,
    counting_bar,
    default_workers,
    one_thread_each,
    peak_bytes,
    progress_bar,
    run_jobs,
    threads,
    without_collections,
)
from ptqpipe.quantities import table
from ptqpipe.stages.common.kv_cache import CACHE_REASON, WriteCacheScales, check_cached, write_scales
from ptqpipe.stages.common.moments import (
    InputScales,
    check_model,
    describe_statistics,
    means_of,
    module_of,
    open_statistics,
    unit_extra_bytes,
)
from ptqpipe.stages.common.outputs import (
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
from ptqpipe.stages.common.rewriting import (
    CopyTensor,
    Done,
    Rewrite,
    Run,
    as_quantized,
    merged,
    named_source,
    parts_of_stage,
    records_of,
    rewrite,
    run_parts_of,
    write_whole,
)
from ptqpipe.stages.common.text import finite, json_differences, run_facts, same_json, sqnr_db
from ptqpipe.stages.common.units import QuantizedRows, correct_unit, learned_codes, low_rank_bytes, quantize_unit
from ptqpipe.tensor_names import expert_of, experts_of, layer_of, name_pattern, role_of
