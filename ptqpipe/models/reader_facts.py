"""What is known of the programs that load checkpoints, and of which versions: the formats and containers that each
runs, and what it gets wrong about a layout.

A row has the containers of a format in the order of preference. A format that a reader loads but computes otherwise
than it says (vLLM quantizes the inputs of mxfp4a16 and mxfp8a16) is none that it runs. What readers get wrong about a
family of models stands in the table of families.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from ptqpipe.errors import UsageError, arg
from ptqpipe.numerics.schemes import Scheme

if TYPE_CHECKING:  # the command line reads the table; importing layouts imports torch
    from ptqpipe.checkpoint.layouts import Target

_CT, _MODELOPT, _DEEPSEEK = "compressed_tensors", "modelopt", "deepseek_fp8"

READERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "nvfp4": (_CT, _MODELOPT),
        "nvfp4_w4a4": (_CT, _MODELOPT),
        "mxfp4": (_CT,),
        "mxfp4_w4a8": (_CT,),
        "mxfp8": (_CT, _MODELOPT),
        "fp8_dynamic": (_CT, _MODELOPT),
        "fp8_tensor": (_CT,),
        "fp8_static": (_CT, _MODELOPT),
        "fp8_block": (_DEEPSEEK, _CT, _MODELOPT),
        "fp8_block_ue8m0": (_DEEPSEEK,),
        "int4_g128": (_CT,),
        "int4_g32": (_CT,),
        "int8": (_CT,),
        "int8_w8a8": (_CT,),
    },
    "sglang": {
        "nvfp4": (_CT, _MODELOPT),
        "nvfp4_w4a4": (_CT, _MODELOPT),
        "fp8_dynamic": (_CT,),
        "fp8_tensor": (_CT,),
        "fp8_static": (_CT, _MODELOPT),
        "fp8_block": (_CT,),
        "int4_g128": (_CT,),
        "int4_g32": (_CT,),
        "int8": (_CT,),
        "int8_w8a8": (_CT,),
    },
    # TensorRT-LLM's QuantAlgo and its _torch/modules/linear.py; it reads MXFP8 as ``quant_method: mxfp8`` (its
    # _torch/model_config.py), with scales called ``weight_scale_inv``.
    "trtllm": {
        "nvfp4": (_MODELOPT,),
        "nvfp4_w4a4": (_MODELOPT,),
        "mxfp8": ("mxfp8_hf",),
        "fp8_dynamic": (_MODELOPT, _CT),
        "fp8_static": (_MODELOPT, _CT),
        "fp8_block": (_DEEPSEEK, _MODELOPT),
        "fp8_block_ue8m0": (_DEEPSEEK,),
    },
    "transformers": {
        "nvfp4": (_CT,),
        "nvfp4_w4a4": (_CT,),
        "mxfp4": (_CT,),
        "mxfp4a16": (_CT,),
        "mxfp4_w4a8": (_CT,),
        "mxfp6": (_CT,),
        "mxfp8": (_CT, "mxfp8_hf"),
        "mxfp8a16": (_CT,),
        "fp8_dynamic": (_CT,),
        "fp8_tensor": (_CT,),
        "fp8_static": (_CT,),
        "fp8_block": (_DEEPSEEK, _CT),
        "fp8_block_ue8m0": (_DEEPSEEK,),
        "int4_g128": (_CT,),
        "int4_g32": (_CT,),
        "int8": (_CT,),
        "int8_w8a8": (_CT,),
    },
}


class Evidence(NamedTuple):
    """Evidence that a reader takes a format: kind, version and date.

    mark  run: it computed with such a checkpoint. loads: its own loader put every number where its layers expect it,
          but its kernels were not run. read: its source code was read, nothing was run
    """

    mark: str
    version: str
    date: str


# The results are those of vllm_fills.py and sglang_loads.py in labs/readers, the source of TensorRT-LLM at 008e0af, and
# tests/checkpoint/layouts/test_transformers.py, which runs every format.
_EVIDENCE = {
    "vllm": Evidence("loads", "0.33", "2026-11-26"),
    "sglang": Evidence("loads", "0.5.23", "2026-11-26"),
    "trtllm": Evidence("read", "008e0af", "2026-11-23"),
    "transformers": Evidence("run", "5.23", "2026-11-28"),
}
# labs/readers/vllm_loads.py: on a CPU, FP8 per token by vLLM's own kernels, the others by those of ptqpipe's plugin.
_VLLM_RUN = Evidence("run", "0.32", "2026-11-21")
_VLLM_RUNS = ("nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8", "fp8_dynamic", "fp8_block")


def evidence(reader: str, scheme: str) -> Evidence:
    """The evidence for a format in a reader's row of `READERS`. KeyError for one that is not in it."""
    if scheme not in READERS[reader]:
        raise KeyError(scheme)
    return _VLLM_RUN if reader == "vllm" and scheme in _VLLM_RUNS else _EVIDENCE[reader]


# Formats that a reader runs in linear layers, and from these containers in no experts: vLLM 0.33's
# compressed_tensors_moe_w8a8_fp8.py and modelopt.py, SGLang 0.5.23's compressed_tensors_w8a8_fp8_moe.py and
# compressed_tensors.py.
NOT_EXPERTS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {"fp8_tensor": (_CT,), "fp8_dynamic": (_MODELOPT,)},
    "sglang": {"fp8_tensor": (_CT,), "int8_w8a8": (_CT,)},
}


def check_experts(reader: str, formats: Iterable[str], *, container: str) -> None:
    """UsageError for experts in a format, by name, that a reader does not run in experts from this container."""
    refused = NOT_EXPERTS.get(reader, {})
    for name in formats:
        if container in refused.get(name, ()):
            others = [other for other in READERS[reader][name] if other not in refused[name]]
            remedy = f"use {arg('container', others[0])}" if others else "give them fp8_dynamic, fp8_block or nvfp4"
            raise UsageError(f"{arg('reader', reader)}: {reader} runs no experts in {name} from {container}; {remedy}")


ROTATING = ("vllm",)
"""Readers that rotate inputs as compressed-tensors' transform_config says. Others compute with rotated weights and
inputs that are not, without a word."""


def check_rotation(reader: str, biased: str | None) -> None:
    """UsageError for a reader that does not rotate the inputs of linear layers, or not those of a layer with a bias;
    ``biased``: the first bias of one."""
    if reader not in ROTATING:
        raise UsageError(
            f"{arg('reader', reader)}: {reader} rotates no inputs and would compute garbage; leave "
            f"{arg('rotate')} out, or use {' or '.join(arg('reader', one) for one in ROTATING)}"
        )
    if biased is not None:
        raise UsageError(
            f"{arg('reader', reader)}: it rotates no inputs of layers with a bias, and there is {biased!r}; leave this "
            f"role out of {arg('rotate')}"
        )


def formats_of(reader: str) -> tuple[str, ...]:
    """The formats that a reader runs, by name. UsageError, with the nearest name, for an unknown reader."""
    if reader not in READERS:
        near = get_close_matches(reader, READERS, n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(READERS)}"
        raise UsageError(f"{arg('reader', reader)} is unknown; {remedy}")
    return tuple(READERS[reader])


def container_for(reader: str, schemes: Sequence[Scheme], *, container: str | None = None) -> str:
    """The container from which a reader runs all of these schemes together; ``container`` itself where one is given.

    UsageError for a scheme that the reader does not run, with those that it does, and for a container that it does not
    read this scheme from.
    """
    formats, common = formats_of(reader), None
    for scheme in schemes:
        if scheme.name not in formats:
            raise UsageError(f"{reader} does not run {scheme.name}; it runs {', '.join(formats)}")
        containers = READERS[reader][scheme.name]
        if container is not None and container not in containers:
            raise UsageError(
                f"{arg('container', container)} contradicts {arg('reader', reader)}, which runs {scheme.name} from "
                f"{' or '.join(containers)}; leave {arg('container')} out"
            )
        common = containers if common is None else tuple(name for name in common if name in containers)
    if container is not None or not common:
        if container is None:
            names = ", ".join(scheme.name for scheme in schemes)
            raise UsageError(f"{reader} runs no container that holds {names} together; use fewer formats")
        return container
    return common[0]


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


_VERSIONS = {
    "vllm": f"vLLM {_EVIDENCE['vllm'].version}",
    "vllm_run": f"vLLM {_VLLM_RUN.version}",
    "sglang": f"SGLang {_EVIDENCE['sglang'].version}",
    "transformers": f"transformers {_EVIDENCE['transformers'].version}",
    "transformers_up_to": f"transformers up to {_EVIDENCE['transformers'].version}",
}
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

# Container -> (where, symptom; remedy). Names in braces are those of `_VERSIONS`, ``kind`` the model type, ``name`` the
# class that SGLang loads.
# fmt: off
LAYOUT_ISSUES: dict[str, tuple[tuple[Callable[[Output], object], str], ...]] = {
    _CT: (
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
    _MODELOPT: (
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
    _DEEPSEEK: (
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


def layout_warnings(container: str, targets: "Sequence[Target]", config: Mapping[str, Any]) -> list[str]:
    """What readers get wrong about an output: one line each, with the remedy. ``config``: the source's config.json."""
    from ptqpipe.checkpoint.tensor_names import experts_of

    schemes = {id(target.scheme): target.scheme for target in targets}.values()
    singles = {t.scheme.name for t in targets if t.experts is None and experts_of(t.module)}
    classes = config.get("architectures")  # of a file: it may be anything
    out = Output(
        frozenset(scheme.name for scheme in schemes),
        frozenset(singles),
        any(scheme.fmt.scale.dtype is not None for scheme in schemes),
        any(scheme.rotation for scheme in schemes),
        str(config.get("model_type")),
        frozenset(map(str, classes)) if isinstance(classes, list) else frozenset(),
        str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."),
    )
    names = {"kind": out.kind, "name": min(out.classes & _SGLANG_LLAMAS, default=""), **_VERSIONS}
    return [text.format_map(names) for where, text in LAYOUT_ISSUES.get(container, ()) if where(out)]
