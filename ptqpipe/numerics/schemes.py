"""Schemes: what a user asks for. A weight format, what the reader does with the activations, and the names of both.

One row a deployable scheme. ``nvfp4`` means weights only (W4A16), since that needs no data; what llm-compressor
calls NVFP4 (W4A4) is ``nvfp4_w4a4`` here. Every other name means what the same name means in vLLM's world. Any
research format (``e2m1/8/ue5m3``) is a weight-only scheme of its own.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from ptqpipe.errors import UnknownFormat, nearest
from ptqpipe.numerics.formats import Format, get_format


class Activation(StrEnum):
    """How the reader quantizes the input of a quantized linear layer."""

    NONE = "none"  # stays bf16/fp16
    NVFP4_STATIC_GLOBAL = "nvfp4"  # E2M1 per 16, block scales at run time, one static global scale per layer
    MXFP4 = "mxfp4"  # E2M1 per 32 with E8M0, all at run time
    MXFP8 = "mxfp8"  # E4M3 per 32 with E8M0, all at run time
    FP8_TOKEN = "fp8_token"  # E4M3, one scale per token at run time
    FP8_GROUP = "fp8_group"  # E4M3, one scale per token and 128 columns at run time
    FP8_TENSOR_STATIC = "fp8_static"  # E4M3, one static scale per layer
    INT8_TOKEN = "int8_token"  # integers of 8 bits, one scale per token at run time
    UNKNOWN = "unknown"  # a checkpoint's config says something that this table has no word for

    @property
    def four_bits(self) -> bool:
        """Whether inputs become numbers of 4 bits."""
        return self in (Activation.NVFP4_STATIC_GLOBAL, Activation.MXFP4)

    @property
    def static_max(self) -> float | None:
        """The largest input that a static scale of 1 represents; None where every scale is found at run time."""
        if self is Activation.NVFP4_STATIC_GLOBAL:
            return get_format("nvfp4").max_product
        return get_format("fp8_tensor").element.max if self is Activation.FP8_TENSOR_STATIC else None


ROTATION_BLOCKS = (16, 32, 64, 128)  # columns that a rotation may take together


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of the table. ``suffix`` names the output folder; ``aliases`` are further names, lower case.

    rotation  columns of the inputs, and of the weight, that are rotated together (``rotation.py``) before they are
              quantized; 0: none, and no row has any
    native   hardware that multiplies in these numbers; empty: the weights are decoded to 16 bits first, anywhere
    """

    name: str
    fmt: Format
    activation: Activation
    suffix: str
    aliases: tuple[str, ...] = ()
    container: str = "compressed_tensors"  # the default one
    native: str = ""
    rotation: int = 0

    @property
    def label(self) -> str:
        """The name, with the rotation of the inputs."""
        return self.name + (f", inputs rotated by {self.rotation}" if self.rotation else "")

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight [N, K], scales and all, for each of its numbers."""
        return self.fmt.bits_per_weight(shape)

    @property
    def needs_input_global_scale(self) -> bool:
        """Whether each layer stores a static global scale of its input."""
        return self.activation.static_max is not None

    def describe(self) -> str:
        """One line for the terminal: weights and activations."""
        fmt = self.fmt
        rows, columns = fmt.block
        block = f"{rows}x{columns}" if rows > 1 else "tensor" if not rows else str(columns) if columns else "row"
        weights = f"weights {fmt.element.name.upper()}, one {fmt.scale.name.upper()} scale per {block}"
        weights += ", one float32 scale per fused group" if fmt.has_global else ""
        return f"{self.suffix}: {weights}; activations {_ACTIVATION_WORDS[self.activation]}"


_ACTIVATION_WORDS = {
    Activation.NONE: "not quantized",
    Activation.NVFP4_STATIC_GLOBAL: "NVFP4 with a static global scale",
    Activation.MXFP4: "MXFP4 (dynamic)",
    Activation.MXFP8: "MXFP8 (dynamic)",
    Activation.FP8_TOKEN: "FP8 per token (dynamic)",
    Activation.FP8_GROUP: "FP8 per token and 128 columns (dynamic)",
    Activation.FP8_TENSOR_STATIC: "FP8 with a static scale",
    Activation.INT8_TOKEN: "INT8 per token (dynamic)",
    Activation.UNKNOWN: "as the config says",
}


def _rows() -> tuple[Scheme, ...]:
    f, a = get_format, Activation
    fp8, mx = "Ada or newer", "Blackwell, MI350"
    return (
        Scheme("nvfp4", f("nvfp4"), a.NONE, "NVFP4A16", ("nvfp4a16", "nvfp4_w4a16", "w4a16_nvfp4")),
        Scheme(
            "nvfp4_w4a4", f("nvfp4"), a.NVFP4_STATIC_GLOBAL, "NVFP4", ("w4a4_nvfp4", "nvfp4a4"),
            native="Blackwell",
        ),
        Scheme("mxfp4", f("mxfp4"), a.MXFP4, "MXFP4", native=mx),
        Scheme("mxfp4a16", f("mxfp4"), a.NONE, "MXFP4A16"),
        Scheme("mxfp4_w4a8", f("mxfp4"), a.FP8_TOKEN, "MXFP4XFP8", ("mxfp4xfp8", "w4a8_mxfp4_fp8", "mxfp4_fp8")),
        Scheme("mxfp6", f("mxfp6_e2m3"), a.NONE, "MXFP6A16", ("mxfp6a16", "mxfp6_e2m3")),
        Scheme("mxfp6_e3m2", f("mxfp6_e3m2"), a.NONE, "MXFP6-E3M2", container="ptqpipe"),
        Scheme("mxfp8", f("mxfp8"), a.MXFP8, "MXFP8", native=mx),
        Scheme("mxfp8a16", f("mxfp8"), a.NONE, "MXFP8A16"),
        Scheme("fp8_dynamic", f("fp8_channel"), a.FP8_TOKEN, "FP8-Dynamic", ("fp8", "fp8_channel"), native=fp8),
        Scheme("fp8_tensor", f("fp8_tensor"), a.FP8_TOKEN, "FP8-Tensor", ("fp8_per_tensor",), native=fp8),
        Scheme("fp8_static", f("fp8_tensor"), a.FP8_TENSOR_STATIC, "FP8", ("fp8_tensor_static",), native=fp8),
        Scheme(
            "fp8_block", f("fp8_block"), a.FP8_GROUP, "FP8-Block",
            container="deepseek_fp8", native="Hopper or newer",
        ),
        Scheme(
            "fp8_block_ue8m0", f("fp8_block_ue8m0"), a.FP8_GROUP, "FP8-Block-UE8M0", ("fp8_ue8m0",),
            container="deepseek_fp8", native="Hopper or newer",
        ),
        Scheme("int4_g128", f("int4_g128"), a.NONE, "W4A16-G128", ("int4", "w4a16", "w4a16_g128", "int4_group128")),
        Scheme("int4_g32", f("int4_g32"), a.NONE, "W4A16-G32", ("w4a16_g32", "int4_group32")),
        Scheme("int8", f("int8_channel"), a.NONE, "W8A16", ("w8a16", "int8_channel", "int8_w8a16")),
        Scheme(
            "int8_w8a8", f("int8_signed_channel"), a.INT8_TOKEN, "W8A8", ("w8a8", "w8a8_int8"), native="Turing or newer"
        ),
    )  # fmt: skip


MIXED = {"deepseek_fp8": "compressed_tensors"}
"""Default containers of one scheme alone -> the one that takes this scheme beside others."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """How a layout stores the scales of a quantized kv cache; its config announces them.

    name      the name of a scale as a template for ``re``: group 1 is the attention module, group 2 is k or v. None
              keeps the names that the source has
    shape     of one number
    written   whether convert may add scales that were measured
    per_head  whether a scale may have one number for each head
    """

    name: str | None = None
    shape: tuple[int, ...] = (1,)
    written: bool = False
    per_head: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a layout can store besides number formats, and what its readers need.

    matrices      weights of linear layers, one tensor each
    stacks        3-D stacks of experts as one tensor; without it each is ``...experts.<e>.<projection>.weight``
    transposed    weights that the model has as [in, out] (Conv1D), marked as such
    rotation      rotations of a layer's inputs while the model runs
    kv_cache      scales of a quantized kv cache; None where no config announces them
    float32_scales  float scales are stored as float32, whatever they are: a bfloat16 scale comes back from it as itself
    even_blocks  a reader divides the rows by the height of the scale grid, and misreads a short last block of rows
                 where that leaves no rest
    hf_quant_config  hf_quant_config.json describes the quantization, too
    own_reader    ptqpipe alone reads the layout, and takes every weight of every model
    methods       other values of ``quant_method`` than the container's own
    transformers  "reads" what the container stores; "never": has no quantizer of that method; "kernels": with kernels
                  of its own where there is an accelerator; otherwise the package that it needs for it, or
                  "transformers": it never leaves the layout to ptqpipe
    """

    matrices: bool = True
    stacks: bool = False
    transposed: bool = False
    rotation: bool = False
    kv_cache: KvCache | None = None
    float32_scales: bool = False
    even_blocks: bool = False
    hf_quant_config: bool = False
    own_reader: bool = False
    methods: tuple[str, ...] = ()
    transformers: str = "reads"


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _rows()}


def get_scheme(name: str) -> Scheme:
    """The scheme called ``name`` (any case, ``-`` and ``_`` alike), or a research format's weight-only scheme."""
    key = name.lower().replace("-", "_")
    for scheme in SCHEMES.values():
        if key == scheme.name or key in scheme.aliases:
            return scheme
    if "/" in name:
        fmt = get_format(name)
        return Scheme(fmt.name, fmt, Activation.NONE, fmt.name.upper().replace("/", "-"), container="ptqpipe")
    names = ", ".join(SCHEMES)
    raise UnknownFormat(
        f"unknown format {name!r}; {_nearest(key)}known are {names}, or element/block/scale[/global] such as "
        "e2m1/8/ue5m3"
    )


# Names of formats that users of other tools type (regular expressions, lower case), what they mean, the nearest here.
_ELSEWHERE = (
    (r"w4a4|fp4_w4a4|fp4a4", "", "nvfp4_w4a4"),
    (r"fp4|nf4|bnb_4bit|e2m1", "", "nvfp4"),
    (r"w4a8(_?fp8)?|w4afp8", "", "mxfp4_w4a8"),
    (r"w4a8_.*", "these 4-bit weights with 8-bit activations are", "mxfp4_w4a8"),
    (r"u?int4.*|w4a16.*|i?q4_.*|awq.*|gptq.*|4bit", "", "int4_g128"),
    (r"i?q5_.*|w[23]a16.*|i?q[123]_.*", "such integers are", "int4_g128"),
    (r"u?int8.*|w8a16.*|q[68]_.*|8bit", "", "int8"),
    (r"w8a8.*|smoothquant", "", "int8_w8a8"),
    (r"w8a8_fp8|fp8_w8a8|fp8_e4m3|e4m3|f8_e4m3|fp8_per_token|fp8_ptpc", "", "fp8_dynamic"),
    (r"fp6.*|w6a16", "", "mxfp6"),
)


def _nearest(key: str) -> str:
    """The beginning of a remedy: what stands here for a format's name in other tools, or the name that is alike."""
    for pattern, what, here in _ELSEWHERE:
        if re.fullmatch(pattern, key):
            return f"{what} not offered, the nearest is {here}; " if what else f"did you mean {here}? "
    meant = nearest(key, [name for scheme in SCHEMES.values() for name in (scheme.name, *scheme.aliases)])
    return f"did you mean {meant}? " if meant else ""
