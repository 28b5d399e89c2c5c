"""Claims about spelling: names, dtypes and shapes of every scheme in every layout, and what no layout may spell."""

from dataclasses import replace

import pytest

from ptqpipe.checkpoint.layouts import ConfigRequest, PartKind, container_names, get_container
from ptqpipe.errors import FormatError, UsageError
from ptqpipe.numerics.formats import CODECS, FORMATS
from ptqpipe.numerics.schemes import SCHEMES, Activation, Scheme, get_scheme

W = "model.layers.0.mlp.up_proj.weight"
M = "model.layers.0.mlp.up_proj"

# (container, scheme) -> every stored tensor of a 256 x 384 weight: name without the module, dtype, shape.
# Written down from compressed-tensors 0.20, modelopt 0.47 and the DeepSeek-V3 and gpt-oss checkpoints.
SPELLINGS: dict[tuple[str, str], list[tuple[str, str, tuple[int, ...]]]] = {
    ("compressed_tensors", "nvfp4"): [
        ("weight_packed", "U8", (256, 192)),
        ("weight_scale", "F8_E4M3", (256, 24)),
        ("weight_global_scale", "F32", (1,)),
    ],
    ("compressed_tensors", "nvfp4_w4a4"): [
        ("weight_packed", "U8", (256, 192)),
        ("weight_scale", "F8_E4M3", (256, 24)),
        ("weight_global_scale", "F32", (1,)),
        ("input_global_scale", "F32", (1,)),
    ],
    ("compressed_tensors", "mxfp4"): [("weight_packed", "U8", (256, 192)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "mxfp4a16"): [("weight_packed", "U8", (256, 192)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "mxfp6"): [("weight_packed", "U8", (256, 288)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "mxfp8"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "mxfp4_w4a8"): [("weight_packed", "U8", (256, 192)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "mxfp8a16"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "U8", (256, 12))],
    ("compressed_tensors", "int4_g32"): [
        ("weight_packed", "I32", (256, 48)),
        ("weight_scale", "BF16", (256, 12)),
        ("weight_shape", "I64", (2,)),
    ],
    ("compressed_tensors", "int4_g128"): [
        ("weight_packed", "I32", (256, 48)),
        ("weight_scale", "BF16", (256, 3)),
        ("weight_shape", "I64", (2,)),
    ],
    ("compressed_tensors", "int8"): [
        ("weight_packed", "I32", (256, 96)),
        ("weight_scale", "BF16", (256, 1)),
        ("weight_shape", "I64", (2,)),
    ],
    ("compressed_tensors", "int8_w8a8"): [("weight", "I8", (256, 384)), ("weight_scale", "BF16", (256, 1))],
    ("compressed_tensors", "fp8_dynamic"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "BF16", (256, 1))],
    ("compressed_tensors", "fp8_tensor"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "BF16", (1,))],
    ("compressed_tensors", "fp8_block"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "BF16", (2, 3))],
    ("modelopt", "nvfp4"): [
        ("weight", "U8", (256, 192)),
        ("weight_scale", "F8_E4M3", (256, 24)),
        ("weight_scale_2", "F32", ()),
    ],
    ("modelopt", "nvfp4_w4a4"): [
        ("weight", "U8", (256, 192)),
        ("weight_scale", "F8_E4M3", (256, 24)),
        ("weight_scale_2", "F32", ()),
        ("input_scale", "F32", ()),
    ],
    ("modelopt", "mxfp8"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "U8", (256, 12))],
    ("modelopt", "fp8_dynamic"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "F32", (256,))],
    ("modelopt", "fp8_block"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale", "F32", (2, 1, 3, 1))],
    ("deepseek_fp8", "fp8_block"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale_inv", "F32", (2, 3))],
    ("deepseek_fp8", "fp8_block_ue8m0"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale_inv", "F32", (2, 3))],
    ("mxfp8_hf", "mxfp8"): [("weight", "F8_E4M3", (256, 384)), ("weight_scale_inv", "U8", (256, 12))],
    ("ptqpipe", "nvfp4"): [
        ("weight_packed", "U8", (256, 192)),
        ("weight_scale", "F8_E4M3", (256, 24)),
        ("weight_global_scale", "F32", (1,)),
    ],
    ("ptqpipe", "mxfp6_e3m2"): [("weight_packed", "U8", (256, 288)), ("weight_scale", "U8", (256, 12))],
    ("ptqpipe", "fp8_dynamic"): [("weight_packed", "U8", (256, 384)), ("weight_scale", "BF16", (256, 1))],
    ("compressed_tensors", "fp8_static"): [
        ("weight", "F8_E4M3", (256, 384)),
        ("weight_scale", "BF16", (1,)),
        ("input_scale", "BF16", (1,)),
    ],
    ("modelopt", "fp8_static"): [
        ("weight", "F8_E4M3", (256, 384)),
        ("weight_scale", "F32", ()),
        ("input_scale", "F32", ()),
    ],
    ("ptqpipe", "e2m1/8/ue5m3"): [("weight_packed", "U8", (256, 192)), ("weight_scale", "U8", (256, 48))],
    ("ptqpipe", "e1m1/4/fp16"): [("weight_packed", "U8", (256, 144)), ("weight_scale", "F16", (256, 96))],
    ("ptqpipe", "e2m2/16/fp32/global"): [
        ("weight_packed", "U8", (256, 240)),
        ("weight_scale", "F32", (256, 24)),
        ("weight_global_scale", "F32", (1,)),
    ],
}


@pytest.mark.parametrize(("container", "scheme"), SPELLINGS)
def test_every_stored_tensor_has_its_literal_name_dtype_and_shape(container: str, scheme: str) -> None:
    parts = get_container(container).parts(W, (256, 384), get_scheme(scheme))
    assert [(part.name, part.dtype, part.shape) for part in parts] == [
        (f"{M}.{suffix}", dtype, shape) for suffix, dtype, shape in SPELLINGS[(container, scheme)]
    ]
    assert not any(part.stacked for part in parts)


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt", "deepseek_fp8", "mxfp8_hf"])
def test_the_schemes_of_the_table_are_spelled_exactly_where_listed(container: str) -> None:
    supported = {name for name, scheme in SCHEMES.items() if get_container(container).supports(scheme) is None}
    assert supported == {scheme for layout, scheme in SPELLINGS if layout == container}


def test_every_default_container_spells_its_scheme() -> None:
    for scheme in SCHEMES.values():
        assert get_container(scheme.container).supports(scheme) is None, scheme.name


def test_our_own_layout_spells_everything() -> None:
    for name in (*SCHEMES, "e3m4/256/e8m0", "e4m3/32/bf16", "e2m1/16/e4m3/global", "e1m2/8/ue4m4/global"):
        assert get_container("ptqpipe").supports(get_scheme(name)) is None, name


@pytest.mark.parametrize("name", ["awq", "gptq", "quark"])
def test_layouts_of_other_tools_are_read_only(name: str) -> None:
    scheme = get_scheme("mxfp4")
    assert (
        get_container(name).supports(scheme)
        == f"{name} is read only; write mxfp4 with the compressed_tensors container"
    )
    with pytest.raises(FormatError, match="read only"):
        get_container(name).parts(W, (64, 64), scheme)
    with pytest.raises(FormatError, match="read only"):
        get_container(name).configs(ConfigRequest({}, [], [], {}))


@pytest.mark.parametrize("container", container_names())
def test_a_refusal_is_one_line_with_a_remedy(container: str) -> None:
    for name in (*SCHEMES, "e2m1/8/ue5m3"):
        reason = get_container(container).supports(get_scheme(name))
        if reason is not None:
            assert "\n" not in reason
            assert any(word in reason for word in ("use ", "write ", "choose ")), reason


def test_a_research_spelling_of_a_known_format_is_that_format() -> None:
    known, research = get_scheme("nvfp4"), get_scheme("e2m1/16/e4m3/global")
    layout = get_container("compressed_tensors")
    assert layout.parts(W, (64, 64), research) == layout.parts(W, (64, 64), known)


def test_float32_scales_of_another_tool_stay_float32() -> None:
    fmt = replace(FORMATS["fp8_channel"], scale=CODECS["fp32"])
    scheme = replace(get_scheme("fp8_dynamic"), fmt=fmt)
    parts = get_container("compressed_tensors").parts(W, (64, 64), scheme)
    assert (parts[1].dtype, parts[1].shape) == ("F32", (64, 1))


def test_static_fp8_has_its_input_scale() -> None:
    scheme = Scheme("static", FORMATS["fp8_tensor"], Activation.FP8_TENSOR_STATIC, "S")
    ct = get_container("compressed_tensors").parts(W, (64, 64), scheme)
    mo = get_container("modelopt").parts(W, (64, 64), scheme)
    assert [(p.name.rpartition(".")[2], p.dtype, p.shape) for p in ct[1:]] == [
        ("weight_scale", "BF16", (1,)),
        ("input_scale", "BF16", (1,)),
    ]
    assert [(p.name.rpartition(".")[2], p.dtype, p.shape) for p in mo[1:]] == [
        ("weight_scale", "F32", ()),
        ("input_scale", "F32", ()),
    ]


def test_gpt_oss_stacks_are_blocks_and_scales() -> None:
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    parts = get_container("gptoss_mxfp4").parts(stack, (256, 64), get_scheme("mxfp4a16"), experts=4, transposed=True)
    assert [(p.name, p.dtype, p.shape, p.role, p.stacked) for p in parts] == [
        (f"{stack}_blocks", "U8", (4, 256, 2, 16), PartKind.DATA, True),
        (f"{stack}_scales", "U8", (4, 256, 2), PartKind.SCALES, True),
    ]


def test_our_own_layout_has_stacks() -> None:
    stack = "model.layers.0.mlp.experts.down_proj"
    parts = get_container("ptqpipe").parts(stack, (64, 32), get_scheme("nvfp4_w4a4"), experts=3)
    assert [(p.name.removeprefix(stack), p.dtype, p.shape, p.stacked) for p in parts] == [
        ("_packed", "U8", (3, 64, 16), True),
        ("_scale", "F8_E4M3", (3, 64, 2), True),
        ("_global_scale", "F32", (3, 1), True),
        ("_input_global_scale", "F32", (3, 1), True),
    ]


@pytest.mark.parametrize(
    ("container", "scheme", "weight", "shape", "options", "message"),
    [
        ("compressed_tensors", "mxfp6_e3m2", W, (64, 64), {}, "no layout for mxfp6_e3m2"),
        ("compressed_tensors", "nvfp4", "h.experts.down_proj", (64, 64), {}, "<module>.weight only"),
        ("compressed_tensors", "nvfp4", W, (64, 64), {"experts": 4}, "no stacks of experts"),
        ("compressed_tensors", "nvfp4", W, (64, 64), {"transposed": True}, "Conv1D"),
        ("compressed_tensors", "nvfp4", W, (64, 40), {}, "multiples of 1x16"),
        ("compressed_tensors", "fp8_block", W, (128, 192), {}, "K in multiples of 128"),
        ("modelopt", "mxfp4", W, (64, 64), {}, "no reader takes mxfp4"),
        ("modelopt", "nvfp4", W, (64, 64), {"experts": 4}, "no stacks of experts"),
        ("deepseek_fp8", "fp8_dynamic", W, (64, 64), {}, "stores fp8_block only"),
        ("deepseek_fp8", "fp8_block", W, (128, 192), {}, "K in multiples of 128"),
        ("deepseek_fp8", "fp8_block", W, (192, 128), {}, "transformers misreads 192 rows"),
        ("gptoss_mxfp4", "nvfp4", W, (64, 64), {"experts": 4}, "stores mxfp4 only"),
        ("gptoss_mxfp4", "mxfp4", W, (64, 64), {}, "stacks of experts only"),
        ("ptqpipe", "mxfp6_e3m2", W, (64, 48), {}, "multiples of 1x32"),
    ],
)
def test_what_a_layout_cannot_spell_is_refused(
    container: str, scheme: str, weight: str, shape: tuple[int, int], options: dict[str, int], message: str
) -> None:
    layout, wanted = get_container(container), get_scheme(scheme)
    with pytest.raises(FormatError, match=message):
        layout.parts(weight, shape, wanted, experts=options.get("experts"), transposed=bool(options.get("transposed")))


def test_a_short_last_block_of_rows_is_stored_as_deepseek_does() -> None:
    parts = get_container("deepseek_fp8").parts(W, (576, 256), get_scheme("fp8_block"))
    assert parts[1].shape == (5, 2)


def test_containers_are_files() -> None:
    assert container_names() == [
        "awq",
        "compressed_tensors",
        "deepseek_fp8",
        "gptoss_mxfp4",
        "gptq",
        "modelopt",
        "mxfp8_hf",
        "ptqpipe",
        "quark",
    ]
    assert get_container("Compressed-Tensors").QUANT_METHOD == "compressed-tensors"
    with pytest.raises(UsageError, match="unknown container '_codec'"):
        get_container("_codec")
