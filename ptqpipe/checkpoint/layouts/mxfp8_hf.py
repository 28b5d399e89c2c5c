"""The mxfp8 method of transformers and SGLang: ``quant_method: mxfp8``, U8 ``weight_scale_inv`` [N, K/32].

The layout of MXFP8 that transformers reads for experts too; vLLM wants the scale called ``weight_scale`` and
refuses it. Reading takes both names.
"""

from collections.abc import Mapping
from typing import Any

from ptqpipe.checkpoint.layouts._config import quantization_config
from ptqpipe.checkpoint.layouts._scale_inv import ScaleInv, stored_weights_of
from ptqpipe.checkpoint.layouts._types import Names, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.schemes import Capabilities, get_scheme

QUANT_METHOD = "mxfp8"
CAPABILITIES = Capabilities(transformers="kernels")
_LAYOUT = ScaleInv(
    "mxfp8_hf",
    QUANT_METHOD,
    get_scheme("mxfp8"),
    scale_dtype="U8",
    described={"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]},
    ignore_keys=("modules_to_not_convert", "ignored_layers"),  # two readers, two names for what is kept
)
supports, parts, configs = _LAYOUT.supports, _LAYOUT.parts, _LAYOUT.configs
detect, lists, config_faults = _LAYOUT.detect, _LAYOUT.lists, _LAYOUT.config_faults


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    block = quantization_config(config).get("weight_block_size", [1, 32])
    if block != [1, 32]:
        raise CheckpointError(f"weight_block_size of an mxfp8 checkpoint is {block!r}, expected [1, 32]")
    return stored_weights_of(names, _LAYOUT.scheme.fmt, _LAYOUT.scheme.activation, excluded=lists(config))
