"""`Config`: transformers quantizes a model while it loads it, to the converter's bytes.

    AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=ptqpipe.Config("nvfp4"))

When transformers comes to load the files, they are converted to a temporary folder (``TMPDIR``; the size of the packed
checkpoint), tensor by tensor within the converter's limit of memory, and the model is filled from there, its weights
packed. So the float weights are never in memory together, and the folder goes when the model is filled.
"""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ptqpipe.api.models import DEFAULT_FORMAT, quantize_model
from ptqpipe.errors import UsageError, one_line
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.run.options import check_names
from ptqpipe.runtime.hf import PackedConfig, PackedQuantizer, add_quantizer

METHOD = "ptqpipe_on_load"


class Config(PackedConfig):
    """Quantizes a float model while ``from_pretrained`` loads it.

    format       as `ptqpipe.convert` takes it
    packed, activations, all_reduce  as `ptqpipe.runtime.hf.PackedConfig` has them
    options      those of `ptqpipe.quantize_model`; with ``data`` the model is calibrated first

    UsageError for an unknown format, and when the model that is loaded is quantized already.

    >>> AutoModelForCausalLM.from_pretrained("MODEL", quantization_config=ptqpipe.Config("fp8")).dtype
    torch.bfloat16
    """

    def __init__(self, format: str = DEFAULT_FORMAT, **options: Any) -> None:
        loading = {name: options.pop(name) for name in ("packed", "activations", "all_reduce") if name in options}
        super().__init__(**loading)
        if not isinstance(format, str):
            raise UsageError(f"format is {one_line(repr(format), limit=80)}, expected a text")
        get_scheme(format)
        check_names(options, signature(quantize_model).parameters, what="quantize_model")
        self.quant_method = METHOD
        self.format, self.options = format, options

    def describing(self, described: Mapping[str, Any]) -> PackedConfig:
        """UsageError: the checkpoint has a ``quantization_config``."""
        raise UsageError(
            f"the model is quantized already ({described.get('quant_method')}); leave quantization_config out"
        )

    def __repr__(self) -> str:
        return f"<Config {self.format}: quantizes while loading>"


class OnLoadQuantizer(PackedQuantizer):
    """Converts the files that transformers is about to load, and fills the model with the result."""

    requires_calibration = False
    quantization_config: Any

    def open(self, folder: Path) -> Source:
        """The packed checkpoint that ``folder`` is converted to."""
        config = self.quantization_config
        self._folder = TemporaryDirectory(prefix="ptqpipe-load-")
        out = Path(self._folder.name, "packed")
        quantize_model(folder, config.format, out=out, **config.options)
        source = Source.open(out)
        self.quantization_config = PackedConfig(
            source.reader.config["quantization_config"],
            packed=config.packed,
            activations=config.activations,
            all_reduce=config.all_reduce,
        )
        return source

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        filled = super()._process_model_after_weight_loading(model, **options)
        self._folder.cleanup()
        return filled


add_quantizer(METHOD, OnLoadQuantizer)
