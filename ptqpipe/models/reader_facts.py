"""What is known of the programs that load checkpoints, and of which versions: the formats and containers that each
runs. What they get wrong about a layout stands in `layout_issues.py`.

A row has the containers of a format in the order of preference. A format that a reader loads but computes otherwise
than it says (vLLM quantizes the inputs of mxfp4a16 and mxfp8a16) is none that it runs. What readers get wrong about a
family of models stands in the table of families.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from ptqpipe.errors import UsageError, arg
from ptqpipe.numerics.schemes import Scheme

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

VERSIONS = {
    "vllm": f"vLLM {_EVIDENCE['vllm'].version}",
    "vllm_run": f"vLLM {_VLLM_RUN.version}",
    "sglang": f"SGLang {_EVIDENCE['sglang'].version}",
    "transformers": f"transformers {_EVIDENCE['transformers'].version}",
    "transformers_up_to": f"transformers up to {_EVIDENCE['transformers'].version}",
}


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
