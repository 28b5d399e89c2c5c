"""transformers' ``from_pretrained`` for checkpoints that it cannot read, or reads wrong: a registered quantizer.

    import ptqpipe                                                    # registers (hook.py imports this file)
    model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
    model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint", quantization_config=PackedConfig(packed=False))
    model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint", distributed_config=DistributedConfig(tp_size=2))

Taken over are ModelOpt's layout and ptqpipe's own, of which transformers knows nothing; those compressed-tensors and
Quark checkpoints whose every scheme ptqpipe reads (transformers 5.23 loads NVFP4 experts wrong by their global scale,
refuses FP8-block and MXFP8 experts, and needs two further packages); and, where there is no accelerator, the FP8,
MXFP8 and MXFP4 methods, which transformers decodes there, some to bfloat16 alone, without quantized activations.
Everything else stays with transformers, and so does every call that passes another ``quantization_config``.

The model is that of ``ptqpipe.runtime.load``: weights stay packed in memory, inputs are quantized as the format says,
and of a tensor-parallel model each rank reads its part. It cannot be saved again; with ``packed=False`` it is a float
model of transformers like any other.

What transformers 5 offers a quantizer are operations on single tensors, found by patterns of names. Decoding needs the
parts of a weight together, whatever they are called. So the names are left alone: when transformers comes to load the
files, it is given another state instead (`fill.py`), by the names of the float checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ptqpipe.checkpoint.layouts import container_names, get_container, has_integers
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import no_place
from ptqpipe.runtime.fill import Filling, override_loading, prepare
from ptqpipe.runtime.linear import PackedLinear
from ptqpipe.runtime.parallel import AllReduce, TensorParallel

METHOD = "ptqpipe"
_CONTAINERS = {
    method: container
    for container in map(get_container, container_names())
    for method in (container.QUANT_METHOD, *container.CAPABILITIES.methods)
}
_OURS = [method for method, container in _CONTAINERS.items() if container.CAPABILITIES.transformers == "never"]


class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to load a checkpoint that ptqpipe reads: the ``quantization_config`` of ``from_pretrained``.

    described    the checkpoint's own ``quantization_config``, filled in by transformers
    packed       False decodes the weights to the model's dtype
    activations  "simulated" quantizes the inputs of linear layers as the checkpoint says, "none" leaves them
    all_reduce   of a tensor-parallel model, see ``ptqpipe.runtime.load``; None is torch's
    """

    def __init__(
        self,
        described: Mapping[str, Any] | None = None,
        *,
        packed: bool = True,
        activations: Literal["simulated", "none"] = "simulated",
        all_reduce: AllReduce | None = None,
    ) -> None:
        if activations not in ("simulated", "none"):
            raise UsageError(f"activations {activations!r} is unknown; use simulated or none")
        self.quant_method = METHOD
        self.described = dict(described or {})
        self.packed = packed
        self.activations = activations
        self.all_reduce = all_reduce
        self.dequantize = not packed  # a decoded model is a float model: transformers drops this config from it

    def describing(self, described: Mapping[str, Any]) -> "PackedConfig":
        """These options for the checkpoint with this ``quantization_config``."""
        return PackedConfig(described, packed=self.packed, activations=self.activations, all_reduce=self.all_reduce)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **unused: Any
    ) -> "PackedConfig | tuple[PackedConfig, dict[str, Any]]":
        """Called by transformers. Every key belongs to the description."""
        config = cls(config_dict)
        return (config, unused) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return dict(self.described)


class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Fills a model with the weights of a checkpoint, packed or decoded, and quantizes its activations."""

    requires_calibration = True  # only pre-quantized checkpoints
    quantization_config: PackedConfig

    def __init__(self, quantization_config: PackedConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._filling: Filling | None = None

    @property
    def is_trainable(self) -> bool:
        """No: the weights are codes."""
        return False

    def is_serializable(self) -> bool:
        """Whether the model can be saved: a decoded one, as the float model that it is."""
        return not self.quantization_config.packed

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        files = options.get("checkpoint_files") or []
        if not files:
            raise CheckpointError("a packed checkpoint is loaded from safetensors files; there are none")
        config = self.quantization_config
        ranks = _ranks(model, config.all_reduce)
        rules = model.tp_plan
        if ranks.size > 1:  # transformers is left a plan that does nothing, since it insists on one
            model._tp_plan = {_last_module(model): "replicate"}
        folder = Path(files[0]).parent

        def state(model: Any, conversions: Sequence[Any]) -> Filling:
            model._tp_plan = rules
            source = self.open(folder)
            simulated = config.activations == "simulated"
            self._filling = prepare(
                model, source, conversions, ranks=ranks, packed=config.packed, activations=simulated
            )
            _check_places(model, self._filling)
            return self._filling

        # Should this loading fail before it comes to the files, the next one of the class takes the override off.
        override_loading(type(model), lambda load_config: load_config.hf_quantizer is self, state)

    def open(self, folder: Path) -> Source:
        """The checkpoint that the model is filled from, where transformers was about to load ``folder``. Called when
        the model stands empty, outside of the defaults (dtype, device) under which transformers makes it."""
        return Source.open(folder)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if self._filling is not None:
            with self._filling.source:
                self._filling.finish(model)
            model.tensor_parallel = self._filling.plan.ranks
            self._filling = None
            _move_packed(model)
        return model


def _ranks(model: Any, all_reduce: AllReduce | None) -> TensorParallel:
    """The ranks that ``distributed_config`` asks for. UsageError for other parallelism, and for plans of one's own."""
    requested = getattr(model.config, "distributed_config", None)
    if requested is None or requested.tp_size * requested.pp_size * requested.dp_size * requested.ep_size == 1:
        return TensorParallel()
    if requested.tp_size == 1 or requested.pp_size * requested.dp_size * requested.ep_size > 1:
        raise UsageError("ptqpipe splits packed models by tensor parallelism alone; use DistributedConfig(tp_size=N)")
    if isinstance(requested.tp_plan, dict):
        raise UsageError(
            "ptqpipe follows the model's own tensor-parallel plan; to change its sums, pass "
            "quantization_config=PackedConfig(all_reduce=...)"
        )
    ranks = TensorParallel(requested.tp_size, dist.get_rank(), None, all_reduce)
    ranks.check()
    return ranks


def _check_places(model: Any, filling: Filling) -> None:
    """CheckpointError for a quantized weight that no parameter of the model takes.

    transformers would initialize that parameter anew and say so in a log. What a model's class leaves out on purpose
    (the layers of a multi-token-prediction head) is no such weight.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for name, homes in filling.homes.items():
        if name in filling.source.stored and not homes and not any(pattern.search(name) for pattern in ignored):
            raise no_place(filling.source.reader.path, name)


def _last_module(model: Any) -> str:
    name = [name for name, _ in model.named_modules()][-1]
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _move_packed(model: Any) -> None:
    """Packed weights to where the model is. UsageError for a model on several devices."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UsageError(f"a packed model is on one device, not on {', '.join(sorted(devices))}; use packed=False")
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.to(model.device)


def takes(described: Mapping[str, Any]) -> bool:
    """Whether ptqpipe reads a checkpoint with this ``quantization_config`` in transformers' place."""
    method = str(described.get("quant_method"))
    if method in _OURS:
        return True
    container = _CONTAINERS.get(method)
    config = {"quantization_config": described}
    if container is None or not container.detect(config, {}) or has_integers(described):
        return False  # integers: transformers has kernels for them, and ptqpipe reads them to convert them
    support = container.CAPABILITIES.transformers
    if support not in ("reads", "kernels"):  # transformers needs a package for it
        return find_spec(support) is None
    if support == "kernels" and torch.accelerator.is_available():
        return False
    try:
        container.stored_weights(config, {})
    except CheckpointError:  # a scheme that ptqpipe does not read
        return False
    return True


def packed_always(described: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of ``from_pretrained`` by which integers stay packed, too; they are left to transformers otherwise,
    which has no experts of them."""
    return {"quantization_config": PackedConfig()} if has_integers(described) else {}


def add_quantizer(method: str, kind: type[HfQuantizer]) -> None:
    """Enters another quantizer into transformers' registry, for configs whose ``quant_method`` is ``method``."""
    auto.AUTO_QUANTIZER_MAPPING[method] = kind


_originals: dict[str, Any] = {}


def register() -> None:
    """Enters the quantizer into transformers' registry. Doing it twice is doing it once.

    Methods that transformers does not know are registered as it offers. Those that it shares with ptqpipe are decided
    where it turns a dict into a config; lm-eval does that itself and passes the result on.
    """
    if _originals:
        return
    auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, PackedQuantizer)
    for method in _OURS:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, PackedConfig)
    _originals["merge"] = auto.AutoHfQuantizer.__dict__["merge_quantization_configs"]
    _originals["from_dict"] = auto.AutoQuantizationConfig.__dict__["from_dict"]
    read, merge = auto.AutoQuantizationConfig.from_dict, auto.AutoHfQuantizer.merge_quantization_configs

    def from_dict(quantization_config_dict: Any) -> Any:
        taken = isinstance(quantization_config_dict, Mapping) and takes(quantization_config_dict)
        return PackedConfig(quantization_config_dict) if taken else read(quantization_config_dict)

    def merge_configs(quantization_config: Any, quantization_config_from_args: Any = None) -> Any:
        ours = isinstance(quantization_config_from_args, PackedConfig)  # also for what is left to transformers
        if isinstance(quantization_config, Mapping) and (ours or takes(quantization_config)):
            options = quantization_config_from_args or PackedConfig()
            if isinstance(options, PackedConfig):
                return options.describing(quantization_config)
            quantization_config = read(quantization_config)  # a quantizer of transformers is asked for
        return merge(quantization_config, quantization_config_from_args)

    auto.AutoQuantizationConfig.from_dict = staticmethod(from_dict)
    auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_configs)


def unregister() -> None:
    """Takes the quantizer out again: transformers reads every checkpoint by itself."""
    if not _originals:
        return
    auto.AutoHfQuantizer.merge_quantization_configs = _originals.pop("merge")
    auto.AutoQuantizationConfig.from_dict = _originals.pop("from_dict")
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    for method in _OURS:
        if auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method) is PackedConfig:
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method)


register()
