"""load and load_model: a transformers model of any checkpoint that ptqpipe reads, computing what its format says.

`load` is for serving: weights stay packed, each rank of a tensor-parallel group reads its part alone. `load_model` is
the plain oracle beside it: every weight decoded by ``QTensor.dequantize`` and rounded once to the asked dtype (float32
does not round them). transformers supplies the model code, the conversion of checkpoint names and the tensor-parallel
plan; ``fill.py`` puts the numbers in.
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from ptqpipe.checkpoint import refuse_pipes
from ptqpipe.checkpoint.dtypes import FLOATS
from ptqpipe.errors import (
    CheckpointError,
    PtqWarning,
    UsageError,
    arg,
    first_line,
    is_no_memory,
    is_panic,
    missing_package,
    one_line,
)
from ptqpipe.models.embedder import Pooling, is_embedder
from ptqpipe.models.families import check_experts
from ptqpipe.models.language_model import causal_model_of, keep_language_model, layered_model_of, named_model_of
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import create_config, creating, empty_model, lacks, no_place, other_shape, quiet
from ptqpipe.runtime.fill import Filling, Prepare, completed, decide, instead_of_files, prepare
from ptqpipe.runtime.mtp import add_mtp, find_mtp, require_mtp
from ptqpipe.runtime.parallel import AllReduce, TensorParallel

ActivationMode = Literal["simulated", "none"]
_LONGEST = "max_position_embeddings"
DEFAULT_LENGTH = 2048  # tokens of a window
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one of them has the words
DTYPES = {str(FLOATS[name][1]).removeprefix("torch."): FLOATS[name][1] for name in ("fp32", "bf16", "fp16")}


def load(
    ckpt: Path | str,
    *,
    tp: int = 1,
    rank: int = 0,
    group: ProcessGroup | None = None,
    all_reduce: AllReduce | None = None,
    dtype: torch.dtype | str = "bfloat16",
    packed: bool = True,
    activations: ActivationMode = "simulated",
    device: str = "cpu",
    mtp: bool = False,
) -> Any:
    """A transformers causal language model in evaluation mode, its quantized weights packed in memory; of a model of
    images and text its language model, without vision tower and projector.

    ckpt         a checkpoint folder, plain or in any container; dense or mixture of experts
    tp, rank     how many ranks compute the model, and which this is; it reads its own part of the weights alone, and
                 its attention has its own part of the heads
    group        the process group of the ranks (torch.distributed is initialized before); None is the default group.
                 For several models or replicas in one job: each in a group of its own
    all_reduce   ``f(x) -> sum of x over the ranks``, called with every row-parallel layer's partial output
                 ``[..., hidden]``: contiguous, in ``dtype``, may be written to; every rank must get the same bits. It
                 may choose by ``x.numel()``. None is torch's all_reduce in ``group``. Logits do not pass it
    dtype        what the model computes in: bfloat16, float32, float16 or "auto", the checkpoint's own
    packed       False decodes the weights to ``dtype`` instead
    activations  "simulated" quantizes the inputs of linear layers and the kv cache as the checkpoint says, "none"
                 leaves them
    device       where it computes: cpu, cuda, cuda:N
    mtp          with its multi-token prediction layer as ``model.mtp`` (``runtime/mtp.py``); UsageError without one

    The model has ``model.tensor_parallel`` (TensorParallel). Raises UsageError, before a weight is read, where ``tp``
    does not divide the model, without transformers, and for unknown options; CheckpointError where the checkpoint and
    the model do not fit together: a weight missing, one without a place, a shape that differs.
    """
    ranks = TensorParallel(tp, rank, group, all_reduce)
    return load_rank(Path(ckpt), ranks, dtype=dtype, packed=packed, activations=activations, device=device, mtp=mtp)


def load_model(
    ckpt: Path | str,
    *,
    dtype: torch.dtype | str = torch.float32,
    activations: ActivationMode = "simulated",
    device: str = "cpu",
) -> Any:
    """A transformers model in evaluation mode, of the class that config.json names (``architectures``), every weight
    decoded to floats; of a model of images and text its language model, without vision tower and projector.

    ckpt         a checkpoint folder, plain or in any container; dense or mixture of experts; also encoders, embedding
                 models, classifiers, encoder-decoders
    dtype        what the model computes in; float32, the default, is exact for every decoded weight. "auto": the
                 checkpoint's own
    activations  "simulated" quantizes the inputs of linear layers and the kv cache as the checkpoint says, "none"
                 leaves them
    device       where it computes: cpu, cuda, cuda:N

    Raises UsageError without transformers or for an unknown dtype, CheckpointError where the checkpoint and the model
    do not fit together: a weight missing, one without a place, a shape that differs.

    >>> ptqpipe.load_model("OUT", dtype="bfloat16").dtype
    torch.bfloat16
    """
    if not isinstance(ckpt, str | os.PathLike):
        raise UsageError(f"ckpt is {one_line(repr(ckpt), limit=80)}, expected a path")
    options: Any = {"dtype": dtype, "packed": False, "activations": activations, "device": device}
    return load_rank(Path(ckpt), TensorParallel(), model_of=named_model_of, **options)


def load_rank(
    path: Path,
    ranks: TensorParallel,
    *,
    dtype: torch.dtype | str = "bfloat16",
    packed: bool = True,
    activations: ActivationMode = "simulated",
    device: str = "cpu",
    mtp: bool = False,
    model_of: Callable[[Any, Path], tuple[Any, Any]] = causal_model_of,
) -> Any:
    """`load`, for one rank as a whole: ``ranks`` also says how its sums and gathers are run, and ``model_of`` which
    class of transformers a config and its path are made a model of, with which config."""
    if not isinstance(activations, str) or activations not in ("simulated", "none"):
        raise UsageError(f"activations {activations!r} is unknown; use simulated or none")
    check_device(device)
    ranks.check()
    with Source.open(path) as source:
        config, generation = config_of(source, model_of), read_generation_config(source.reader.path)
        fillings: list[Filling] = []
        if mtp:
            require_mtp(source)
        layer = find_mtp(source) if mtp else None

        def state(model: Any, conversions: Any) -> Filling:
            if layer is not None:
                with torch.device("meta"):
                    conversions = [*add_mtp(model, layer), *conversions]
            simulated = activations == "simulated"
            causal = model_of is causal_model_of
            options: Any = {"packed": packed, "activations": simulated, "causal": causal}
            filling = prepare(model, source, conversions, ranks=ranks, **options)
            fillings.append(filling)
            return filling

        model = _fill(source, model_of(config, source.reader.path), dtype_of(dtype, config), state)
        fillings[0].finish(model)
    if generation is not None:
        model.generation_config = generation
    model.tensor_parallel = ranks
    return model.to(device)


def check_device(device: str) -> None:
    """UsageError for a device that is not here."""
    if not isinstance(device, str):
        raise UsageError(f"device is {type(device).__name__}, expected a name; use cpu, cuda or cuda:N")
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"{arg('device')} {device!r} is unknown; use cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        seen = f"it sees {count}, use cpu or a number below that" if count else "none is visible, use cpu"
        raise UsageError(f"{arg('device')} {device} needs a GPU that torch can use; {seen}")


def read_config(path: Path, model_of: Callable[[Any, Path], Any] = causal_model_of) -> Any:
    """transformers' config of a checkpoint that is to be run, without its description of the quantization.

    UsageError without transformers, CheckpointError for a config that it does not know, or of which ``model_of`` makes
    no model.
    """
    config = create_config(path)
    model_of(config, path)
    for name, value in (
        ("vocab_size", getattr(config.get_text_config(), "vocab_size", None)),
        (_LONGEST, positions_of(config)),
    ):
        if value is not None and value < 1:
            raise CheckpointError(f"{path / 'config.json'} has {name} {value}, expected 1 or more")
    return config


def read_layered_config(path: Path) -> Any:
    """`read_config` of a model whose layers can be run one after another: a language model, or a sentence embedder."""
    return read_config(path, layered_model_of)


def config_of(source: Source, model_of: Callable[[Any, Path], Any] = causal_model_of) -> Any:
    """`read_config` of an open checkpoint, with what foldings change of it."""
    config = read_config(source.reader.path, model_of)
    for key, value in source.reader.changes.items():
        setattr(config, key, value)
    return config


def positions_of(config: Any) -> int | None:
    """The longest context of a model's config, in tokens; None where it has no such field, or null."""
    text = config.get_text_config()
    if isinstance(getattr(type(text), _LONGEST, None), property):  # XLNet's -1: no number in the file
        return None
    count = getattr(text, _LONGEST, None)
    return None if count is None else int(count)


def default_length(config: Any, path: Path) -> int:
    """The default number of tokens of a window: 2048, or the model's positions where they are fewer; of a sentence
    embedder what it reads of a text."""
    read = Pooling.of(path).longest if is_embedder(path) else None
    return min(read or DEFAULT_LENGTH, positions_of(config) or DEFAULT_LENGTH)


def check_length(config: Any, seqlen: int) -> None:
    """UsageError for windows of more tokens than the model has positions for."""
    positions = positions_of(config)
    if positions is not None and seqlen > positions:
        raise UsageError(
            f"{arg('seqlen', seqlen)} is more than the model's {positions} positions; choose {positions} or less"
        )


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint. UsageError without transformers, CheckpointError where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_package("a tokenizer", "transformers", "ptqpipe[hf]") from None
    refuse_pipes(path)
    try:
        config = create_config(path)  # as without what chooses code, which transformers would check
    except CheckpointError:  # code that comes with it, or no config.json: the tokenizer's own files may do
        config = None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(path, config=config, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # of what kind depends on the tokenizer's own code
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if is_no_memory(error):
            raise
        reason, remedy = first_line(error), "copy the model's tokenizer files there"
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            reason = f"it has none of {', '.join(TOKENIZER_FILES)}"
        elif "custom code" in reason:
            reason, remedy = "it comes as code, which is never run", "copy a tokenizer.json of the model there"
        elif isinstance(error, ImportError) or "install" in reason.lower():
            remedy = "install that package"
        raise CheckpointError(f"{path} has no tokenizer that transformers reads: {reason}; {remedy}") from None


def dtype_of(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    """The torch dtype that ``dtype`` names for a model of ``config``. UsageError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise UsageError(f"dtype is {type(dtype).__name__}, expected a name; use {', '.join(DTYPES)} or auto")
    if dtype == "auto":
        own = getattr(config, "dtype", None) or config.get_text_config().dtype
        return own if isinstance(own, torch.dtype) else torch.float32
    if dtype in FLOATS:
        return FLOATS[dtype][1]
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPES)} or auto")
    return DTYPES[dtype]


def read_generation_config(path: Path) -> Any:
    """transformers' generation config of a checkpoint, None without one. CheckpointError for one that is damaged."""
    from transformers import GenerationConfig

    file = path / "generation_config.json"
    if not file.is_file():
        return None
    try:
        with quiet():
            config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers does not understand {file}: {first_line(error)}; check the file") from None
    ends = config.eos_token_id if isinstance(config.eos_token_id, (list, tuple)) else [config.eos_token_id]
    if not all(end is None or type(end) is int for end in ends):
        raise CheckpointError(f"{file} has eos_token_id {config.eos_token_id!r}, expected a token's number or a list")
    return config


def _fill(source: Source, model_of: tuple[Any, Any], dtype: torch.dtype, state: Prepare) -> Any:
    """The model of a class and a config with the tensors of ``source``: built on the meta device, filled one by one."""
    path, created = source.reader.path, False
    check_experts(source.reader.config, source.tensors)
    model_class, config = model_of

    def noted(model: Any, conversions: Any) -> Filling:
        nonlocal created
        created = True
        return state(keep_language_model(model), conversions)

    try:
        # What its report says becomes one error below.
        with creating(path, done=lambda: created), instead_of_files(model_class, noted):
            model, info = model_class.from_pretrained(
                None, config=config, state_dict={}, dtype=dtype, output_loading_info=True
            )
    except RuntimeError as error:
        if is_no_memory(error):
            raise
        raise CheckpointError(f"{path} does not fit its config.json: {first_line(error)}") from None
    _check_fit(source, info)
    model.config.name_or_path = str(path)
    return model.eval()


def _check_fit(source: Source, info: Any) -> None:
    path = source.reader.path
    missing, mismatched, unexpected = (
        sorted(info[key], key=str) for key in ("missing_keys", "mismatched_keys", "unexpected_keys")
    )
    if missing:
        raise lacks(path, missing)
    if mismatched:
        raise other_shape(path, *mismatched[0])
    if unexpected:
        lost = next((name for name in unexpected if name in source.stored), None)
        if lost is not None:
            raise no_place(path, lost)
        warnings.warn(
            one_line(f"{path}: the model has no place for {unexpected[0]!r} ({len(unexpected)} in all); left out"),
            PtqWarning,
            stacklevel=4,
        )


def check_load(ckpt: Path | str, *, tp: int = 1, packed: bool = True) -> Any:
    """The model, empty; raises what `load` with the same arguments would raise before it reads a weight.

    Headers and an empty model are enough for that, so a service refuses in a second what would otherwise stop every one
    of its ranks in the middle of loading.

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
