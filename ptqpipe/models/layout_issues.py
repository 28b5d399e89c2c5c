"""What readers get wrong about the layouts that are written: one table, for warnings and for docs/models.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ptqpipe.checkpoint.layouts import Target
from ptqpipe.checkpoint.tensor_names import experts_of
from ptqpipe.models.reader_facts import VERSIONS


class Output(NamedTuple):
    """What decides over the warnings about a checkpoint.

    schemes, experts  names of the schemes of all weights, and of those of single experts
    float_scales      whether block scales are float numbers
    kind, classes, dtype  of config.json: model_type, architectures, and the dtype without "torch."
    """

    schemes: frozenset[str]
    experts: frozenset[str]
    float_scales: bool
    rotated: bool
    kind: str
    classes: frozenset[str]
    dtype: str


# Model types whose experts are one tensor on disk, and for which transformers has no converter from per-expert names.
_NO_PER_EXPERT_NAMES = frozenset(
    (
        *("aria", "aria_text", "dbrx", "diffusion_gemma", "gemma4", "gemma4_text", "gpt_oss", "granitemoe"),
        *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v4", "inkling_mm_model", "inkling_text"),
        *("minimax_m3_vl_text", "mistral4", "qwen3_vl_moe", "qwen3_vl_moe_text", "step3p5", "step3p7", "zaya"),
    )
)
_LLAMA4 = frozenset({"llama4", "llama4_text"})  # compressed-tensors alone gives it one module per expert
# What SGLang fills by its loader of Llama, which renames ``weight_scale_inv`` to a name that it then drops.
_SGLANG_LLAMAS = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Ministral3", "Phi3", "InternLM3", "IQuestCoder", "TeleFLM")
)
_PER_EXPERT = "{transformers} has no per-expert names for {kind} here and leaves its experts random; "
_KEEP = "import ptqpipe before loading, serve with vLLM, or keep the experts (ignore 're:.*experts.*')"
_SCALE_INV = "{sglang} loads a {name} with these names without its scales and serves it all the same; use "


def _has(*schemes: str) -> Callable[[Output], object]:
    return lambda out: out.schemes.intersection(schemes)


def _experts(*schemes: str) -> Callable[[Output], object]:
    """In compressed-tensors, where the experts of Llama 4 become linear layers."""
    return lambda out: out.kind not in _LLAMA4 and out.experts.intersection(schemes)


def _llama_of_sglang(out: Output) -> object:
    return out.classes & _SGLANG_LLAMAS


def _single_experts(*kinds: str) -> Callable[[Output], object]:
    return lambda out: out.experts and out.kind in kinds


def _always(_: Output) -> object:
    return True


_UNNAMED = (_single_experts(*_NO_PER_EXPERT_NAMES - {"gpt_oss"}), _PER_EXPERT + _KEEP)
_UNNAMED_GPT_OSS = (_single_experts("gpt_oss"), _PER_EXPERT + "use the container gptoss_mxfp4")
_UNNAMED_LLAMA4 = (_single_experts(*_LLAMA4), _PER_EXPERT + "use the container compressed_tensors")

# Container -> (where, symptom; remedy). Names in braces are those of `VERSIONS`, ``kind`` the model type, ``name`` the
# class that SGLang loads.
# fmt: off
LAYOUT_ISSUES: dict[str, tuple[tuple[Callable[[Output], object], str], ...]] = {
    "compressed_tensors": (
        (_experts("nvfp4", "nvfp4_w4a4"), "{transformers_up_to} loads NVFP4 experts wrong by their global scale, "
         "silently (its issue 48371); serve with vLLM or SGLang, or give the experts fp8_dynamic or mxfp4"),
        (_experts("fp8_block"), "{transformers_up_to} refuses fp8_block experts in this layout; use the container "
         "deepseek_fp8 for it"),
        (_experts("mxfp8", "mxfp8a16"), "{transformers_up_to} refuses mxfp8 experts in this layout; use the container "
         "mxfp8_hf for it"),
        (_experts("fp8_tensor"), "{vllm} and {sglang} refuse experts with fp8_tensor; use fp8 or fp8_block for them"),
        (_experts("int8_w8a8"), "{sglang} refuses experts with int8_w8a8; use int8 or fp8_dynamic for it"),
        (lambda out: out.kind not in _LLAMA4 and len(out.experts) > 1,
         "transformers gives all routed experts the scheme of one group; use one scheme for all experts, or vLLM"),
        (lambda out: out.dtype == "float32",
         "transformers decodes packed weights to bfloat16: load this float32 model with dtype=bfloat16"),
        (_has("mxfp6"), "{vllm_run} and {sglang} have no mxfp6; transformers with compressed-tensors 0.20 reads it"),
        (_has("mxfp4", "mxfp4a16", "mxfp4_w4a8", "mxfp8", "mxfp8a16"),
         "{sglang} reads no mxfp4 and mxfp8 linear layers in this layout; use nvfp4 or fp8 for it"),
        (_has("mxfp4a16", "mxfp8a16"), "{vllm_run} quantizes the activations of mxfp4a16 and mxfp8a16 where it can; "
         "use nvfp4 if it must not"),
        (lambda out: out.rotated, "only vLLM, on one GPU, rotates inputs; {transformers} without ptqpipe, {sglang} "
         "and TensorRT-LLM do not, and compute garbage"),
        _UNNAMED,
        _UNNAMED_GPT_OSS,
        (lambda out: out.float_scales and out.dtype in ("float16", "half"),
         "transformers rounds FP8 scales to the model's float16; load with dtype=bfloat16 for the exact weights"),
    ),
    "modelopt": (
        (_always, "transformers does not read ModelOpt's layout: FP8 weights load as garbage without an error; use the "
         "container compressed-tensors for transformers"),
        (lambda out: "fp8_dynamic" in out.experts or ("fp8_block" in out.experts and len(out.schemes) == 1),
         "{vllm_run} reads no experts with FP8 per channel (or, as the only scheme, per block) in ModelOpt's layout; "
         "use the container compressed-tensors or deepseek_fp8 for it"),
        (lambda out: "fp8_dynamic" in out.schemes or out.schemes == {"fp8_block"},
         "{sglang} reads no FP8 per channel (or, as the only scheme, per block) in ModelOpt's layout; use the "
         "container compressed-tensors for it"),
        (lambda out: "nvfp4" in out.experts, "{sglang} may quantize the inputs of these experts, with a scale of 1, "
         "where its kernels can; use the container compressed-tensors for SGLang"),
        (lambda out: "mxfp8" in out.schemes and _llama_of_sglang(out), _SCALE_INV + "fp8 or nvfp4 for SGLang"),
    ),
    "deepseek_fp8": (
        _UNNAMED,
        _UNNAMED_GPT_OSS,
        _UNNAMED_LLAMA4,
        (_llama_of_sglang, _SCALE_INV + "the container compressed_tensors for SGLang"),
    ),
    "mxfp8_hf": (
        (_always, "{vllm_run} refuses this layout of mxfp8; use the container compressed-tensors for vLLM"),
        _UNNAMED,
        _UNNAMED_GPT_OSS,
        _UNNAMED_LLAMA4,
        (_llama_of_sglang, _SCALE_INV + "fp8 or nvfp4 for SGLang"),
    ),
    "gptoss_mxfp4": (
        (lambda out: out.kind != "gpt_oss",
         "readers know this layout for gpt_oss, not {kind!r}; use compressed_tensors"),
    ),
    "ptqpipe": (
        (_always, "only ptqpipe reads this layout; ptqpipe.load_tensors gives the weights, other containers serve"),
    ),
}
# fmt: on


def layout_warnings(container: str, targets: Sequence[Target], config: Mapping[str, Any]) -> list[str]:
    """What readers get wrong about an output: one line each, with the remedy. ``config``: the source's config.json."""
    schemes = {id(target.scheme): target.scheme for target in targets}.values()
    singles = {t.scheme.name for t in targets if t.experts is None and experts_of(t.module)}
    classes = config.get("architectures")
    out = Output(
        frozenset(scheme.name for scheme in schemes),
        frozenset(singles),
        any(scheme.fmt.scale.dtype is not None for scheme in schemes),
        any(scheme.rotation for scheme in schemes),
        str(config.get("model_type")),
        frozenset(map(str, classes)) if isinstance(classes, list) else frozenset(),
        str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."),
    )
    names = {"kind": out.kind, "name": min(out.classes & _SGLANG_LLAMAS, default=""), **VERSIONS}
    return [text.format_map(names) for where, text in LAYOUT_ISSUES.get(container, ()) if where(out)]
