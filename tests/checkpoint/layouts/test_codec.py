"""Claims about bytes: write and read are inverse, runs of rows are runs of bytes, and the payload is the peers'."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from ptqpipe.checkpoint.layouts import (
    ConfigRequest,
    Part,
    PartKind,
    StoredWeight,
    Target,
    decode,
    decode_input_global,
    encode_part,
    get_container,
    part_bytes,
    part_offset,
)
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, FORMATS
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import get_scheme
from tests.checkpoint.layouts.builders import INPUT_SCALE, Checkpoint, absmax, stored_parts
from tests.checkpoint.layouts.test_spelling import SPELLINGS

W = "model.layers.0.mlp.up_proj.weight"
SHAPE = (256, 384)


def weight(seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """Rows of very different size, an outlier, a block of zeros, a tiny negative."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.03
    w *= torch.exp2(torch.arange(shape[0]).remainder(9) - 4.0)[:, None]
    w[3, 5], w[7, :32], w[9, 0] = 4.0, 0.0, -1e-6
    return w.bfloat16()


def written(container: str, scheme_name: str) -> tuple[QTensor, Checkpoint]:
    """A weight, and the checkpoint that holds it alone."""
    scheme, layout = get_scheme(scheme_name), get_container(container)
    q = absmax(weight(), scheme.fmt)
    configs = layout.configs(ConfigRequest({}, [Target(W, scheme)], [], {}))
    return q, Checkpoint(configs, stored_parts(layout, W, q, scheme))


@pytest.mark.parametrize(("container", "scheme"), SPELLINGS)
def test_what_is_written_is_read_back_bit_for_bit(container: str, scheme: str) -> None:
    q, checkpoint = written(container, scheme)
    assert checkpoint.names == {
        p.name: (p.dtype, p.shape) for p in get_container(container).parts(W, SHAPE, get_scheme(scheme))
    }
    stored = checkpoint.stored(container)
    assert list(stored) == [W]
    again = decode(stored[W], checkpoint.load)
    assert stored[W].scheme.activation is get_scheme(scheme).activation
    assert torch.equal(again.data, q.data)
    assert torch.equal(again.scales.float(), q.scales.float())
    if container != "modelopt" and container != "deepseek_fp8":  # these two store FP8 scales as float32 only
        assert stored[W].scheme == get_scheme(scheme)
        assert (again.fmt, again.scales.dtype) == (q.fmt, q.scales.dtype)
    # The divisor of a canonical global scale is the same numbers.
    assert torch.equal(again.dequantize(), q.dequantize())
    if q.global_scale is not None:
        assert again.global_scale is not None
        same = 1 / again.global_scale if again.global_divides else again.global_scale
        assert torch.equal(same, q.global_scale)


@pytest.mark.parametrize(("container", "scheme"), SPELLINGS)
def test_runs_of_rows_fill_the_file_of_the_whole(container: str, scheme: str) -> None:
    """What the writer does: each run's bytes at its offset, in any order, equal the bytes of the whole."""
    q, checkpoint = written(container, scheme)
    rows = q.fmt.block_extent(SHAPE)[0]
    cuts = [0, SHAPE[0]] if q.fmt.block[0] == 0 else [0, rows, SHAPE[0]] if rows > 1 else [0, 1, 100, 101, 256]
    for part in get_container(container).parts(W, SHAPE, get_scheme(scheme)):
        file = torch.zeros(part_bytes(part), dtype=torch.uint8)
        for start, stop in reversed(list(pairwise(cuts))):
            run = encode_part(part, q.narrow(0, start, stop - start), input_global_scale=INPUT_SCALE)
            raw = run.reshape(-1).view(torch.uint8)
            offset = part_offset(part, q.fmt, SHAPE, start)
            file[offset : offset + len(raw)] = raw
        assert torch.equal(file, checkpoint.tensors[part.name].reshape(-1).view(torch.uint8))


def test_stacks_are_written_expert_by_expert() -> None:
    """gpt-oss and our own layout; every expert in two runs of rows."""
    experts, shape = 3, (64, 96)
    for container, name in (("gptoss_mxfp4", "mxfp4a16"), ("ptqpipe", "nvfp4_w4a4"), ("ptqpipe", "e2m3/8/ue5m3")):
        scheme, stack = get_scheme(name), "model.layers.0.mlp.experts.gate_up_proj"
        quantized = [absmax(weight(e, shape), scheme.fmt) for e in range(experts)]
        parts = get_container(container).parts(stack, shape, scheme, experts=experts, transposed=True)
        files = {part.name: torch.zeros(part_bytes(part), dtype=torch.uint8) for part in parts}
        for e, q in enumerate(quantized):
            for part in parts:
                for start, stop in ((0, 16), (16, 64)):
                    run = encode_part(part, q.narrow(0, start, stop - start), input_global_scale=INPUT_SCALE)
                    raw = run.reshape(-1).view(torch.uint8)
                    offset = part_offset(part, scheme.fmt, shape, start, expert=e)
                    files[part.name][offset : offset + len(raw)] = raw
        dtypes = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
        tensors = {part.name: files[part.name].view(dtypes[part.dtype]).reshape(part.shape) for part in parts}
        target = Target(stack, scheme, experts, transposed=True)
        configs = get_container(container).configs(ConfigRequest({}, [target], [], {}))
        checkpoint = Checkpoint(configs, tensors)
        stored = checkpoint.stored(container)[stack]
        assert (stored.experts, stored.shape, stored.transposed) == (experts, shape, True)
        for e, q in enumerate(quantized):
            again = decode(stored, checkpoint.load, expert=e)
            assert torch.equal(again.data, q.data)
            assert torch.equal(again.scales, q.scales)
            assert torch.equal(again.dequantize(), q.dequantize())
            some = decode(stored, checkpoint.load, expert=e, rows=(8, 24))
            assert torch.equal(some.dequantize(), q.dequantize()[8:24])
        assert (decode_input_global(stored, checkpoint.load, expert=1) is not None) is scheme.needs_input_global_scale


def test_a_transposed_weight_is_marked_and_stored_as_out_by_in() -> None:
    """GPT-2's Conv1D: the float model has [in, out]."""
    scheme, name = get_scheme("nvfp4"), "h.0.attn.c_attn.weight"
    layout = get_container("ptqpipe")
    q = absmax(weight().T.contiguous().T, scheme.fmt)
    configs = layout.configs(ConfigRequest({}, [Target(name, scheme, transposed=True)], [], {}))
    checkpoint = Checkpoint(configs, stored_parts(layout, name, q, scheme))
    stored = checkpoint.stored("ptqpipe")[name]
    assert (stored.shape, stored.transposed) == (SHAPE, True)
    assert torch.equal(decode(stored, checkpoint.load).dequantize(), q.dequantize())


@pytest.mark.parametrize("scheme", [name for container, name in SPELLINGS if container == "compressed_tensors"])
def test_compressed_tensors_own_decompressor_agrees(scheme: str) -> None:
    """On the tensors and the config that we write. Its arithmetic is that of the scale's dtype: float32 throughout, so
    FP8 scales are given as float32 and the packed formats' tables, which it keeps in bfloat16, are exact anyway."""
    q, checkpoint = written("compressed_tensors", scheme)
    config = QuantizationConfig.model_validate(checkpoint.config["quantization_config"])
    group = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(group.format)
    local = {name.rpartition(".")[2]: tensor for name, tensor in checkpoint.tensors.items()}
    if q.fmt.scale.dtype is not None:
        local["weight_scale"] = local["weight_scale"].float()
    theirs = compressor.decompress(local, group)["weight"]
    assert torch.equal(theirs.float(), q.dequantize().to(theirs.dtype).float())


def test_compressed_tensors_and_modelopt_are_one_payload() -> None:
    for scheme in ("nvfp4", "nvfp4_w4a4"):
        _, ours = written("compressed_tensors", scheme)
        _, theirs = written("modelopt", scheme)
        module = W.removesuffix(".weight")
        assert torch.equal(ours.tensors[f"{module}.weight_packed"], theirs.tensors[f"{module}.weight"])
        scales = [c.tensors[f"{module}.weight_scale"].view(torch.uint8) for c in (ours, theirs)]
        assert torch.equal(*scales)
        divisor = ours.tensors[f"{module}.weight_global_scale"]
        assert torch.equal(1 / divisor, theirs.tensors[f"{module}.weight_scale_2"].reshape(1))
        if scheme == "nvfp4_w4a4":
            divisor = ours.tensors[f"{module}.input_global_scale"]
            assert torch.equal(1 / divisor, theirs.tensors[f"{module}.input_scale"].reshape(1))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "fp8_dynamic", "fp8_block"])
def test_another_layout_and_back_is_the_same_bytes(scheme: str) -> None:
    """Relayout: decode, spell, decode, spell. Only float scales change their dtype on the way."""
    _, first = written("compressed_tensors", scheme)
    stored = first.stored("compressed_tensors")[W]
    other = get_container("modelopt")
    middle_scheme = stored.scheme
    configs = other.configs(ConfigRequest(first.config, [Target(W, middle_scheme)], [], {}))
    middle = Checkpoint(configs, stored_parts(other, W, decode(stored, first.load), middle_scheme))
    back = decode(middle.stored("modelopt")[W], middle.load)
    for part in stored.parts:
        again = encode_part(part, back)
        assert again.dtype == first.tensors[part.name].dtype
        assert torch.equal(again.view(torch.uint8), first.tensors[part.name].view(torch.uint8)), part.name


def test_scales_that_a_dtype_cannot_hold_are_refused() -> None:
    fmt = replace(FORMATS["fp8_channel"], scale=CODECS["fp32"])
    w = weight()
    q = absmax(w, fmt)
    odd = replace(q, scales=torch.full_like(q.scales, 1.0 + 2.0**-20))
    part = Part("x.weight_scale", "BF16", (256, 1), PartKind.SCALES)
    with pytest.raises(NumericsError, match=r"x\.weight_scale: some torch.float32 scales are not BF16"):
        encode_part(part, odd)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_global_scale_is_finite_and_positive(value: float) -> None:
    q, _ = written("compressed_tensors", "nvfp4_w4a4")
    parts = get_container("compressed_tensors").parts(W, SHAPE, get_scheme("nvfp4_w4a4"))
    bad = replace(q, global_scale=torch.tensor(value))
    with pytest.raises(NumericsError, match=r"weight_global_scale would be .*; a scale must be finite and positive"):
        encode_part(parts[2], bad)
    with pytest.raises(NumericsError, match="input_global_scale would be"):
        encode_part(parts[3], q, input_global_scale=torch.tensor(value))
    with pytest.raises(NumericsError, match="input_global_scale needs a scale"):
        encode_part(parts[3], q)


def test_rows_inside_a_block_are_refused() -> None:
    _, checkpoint = written("deepseek_fp8", "fp8_block")
    stored = checkpoint.stored("deepseek_fp8")[W]
    with pytest.raises(FormatError, match="multiples of 128"):
        decode(stored, checkpoint.load, rows=(0, 64))
    with pytest.raises(FormatError, match="does not begin a block"):
        part_offset(stored.parts[1], stored.scheme.fmt, SHAPE, 64)


def test_experts_are_named_where_there_are_stacks_and_only_there() -> None:
    _, checkpoint = written("compressed_tensors", "nvfp4")
    stored = checkpoint.stored("compressed_tensors")[W]
    with pytest.raises(ValueError, match="experts"):
        decode(stored, checkpoint.load, expert=0)
    with pytest.raises(ValueError, match="not a stack"):
        part_offset(stored.parts[0], stored.scheme.fmt, SHAPE, 0, expert=1)
    stack = StoredWeight("x", SHAPE, stored.scheme, stored.parts, experts=2)
    with pytest.raises(ValueError, match="2 experts"):
        decode(stack, checkpoint.load)
