"""Quantizes a model with another tool's own code, and writes what that tool computes with.

Run by bench_quality.py under an interpreter that has the tool; must not import ptqpipe. Weights are loaded in float32,
so that only codes and scales differ between tools. The head is kept, as everywhere in that benchmark.

    python scripts/peers.py llm-compressor MODEL OUT --scheme NVFP4A16 --method rtn|gptq [--observer NAME]
        [--transform awq|smoothquant]
    python scripts/peers.py modelopt MODEL OUT --config NVFP4_DEFAULT_CFG [--algorithm JSON] [--weights-only] [--export]
    python scripts/peers.py auto-round MODEL OUT --scheme NVFP4 --iters 0 [--weights-only] [--seed N]
    python scripts/peers.py fouroversix MODEL OUT --dtype nvfp4 --rule mse
    python scripts/peers.py torchao MODEL OUT --format nvfp4

All take ``--calibration FILE``, one {"input_ids": [...]} a line. OUT is a compressed-tensors checkpoint of
llm-compressor, ModelOpt's unified checkpoint with ``--export``, and otherwise the decoded weights as plain safetensors.
Beside these, inputs/scales.safetensors has static scales of inputs, ``<module>.input_scale``, which multiply on decode,
and ModelOpt's ``<module>.pre_quant_scale`` [K], by which an input is multiplied before it is quantized, and which the
stored weight has folded in.

- llm-compressor: rtn is its QuantizationModifier, gptq its GPTQModifier with its defaults; AWQModifier or
  SmoothQuantModifier come before, with their defaults, too.
- ModelOpt quantizes and decodes FP4 blocks with CUDA and Triton kernels alone; on a machine without a GPU the two
  functions `cpu_dynamic` and `cpu_static` below stand for them, with their rules (E4M3 scales: amax / 6 rounded to
  nearest, E8M0: the ceiling of log2(amax / 6); halves to even); all calibration and search is ModelOpt's own.
- AutoRound: ``--scheme`` takes a preset's name or its fields as JSON. ``--iters 0`` is its optimized rounding to
  nearest, 200 its tuning. Its output is the quantize-dequantized model (format "fake").
- fouroversix: its PyTorch code on the linear weights of the layers. It has no export for other readers, and quantizes
  inputs with a global scale of each call; here the static scales are those of the calibration tokens (the largest
  magnitude over 6 x 448), as checkpoints have them.
- torchao: its prototype's NVFP4 and MXFP4, and its FP8, a scale a row; static scales of NVFP4 inputs are those of its
  observers. Its MXFP4 takes bfloat16 weights alone, to which those of a source in another dtype are rounded.
"""

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def token_rows(file: Path) -> list[list[int]]:
    """The calibration tokens."""
    return [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]


def float_model(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model, in float32 where nothing else is asked."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def linear_names(model: Any) -> list[str]:
    """The linear layers but the head."""
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.endswith("lm_head")]


def save_dump(out: Path, source: str, scales: dict[str, torch.Tensor]) -> None:
    """What stands beside decoded weights: static scales and factors of inputs, and the source's config.json."""
    from safetensors.torch import save_file

    if scales:
        (out / "inputs").mkdir()
        save_file(scales, str(out / "inputs" / "scales.safetensors"))
    shutil.copy(Path(source) / "config.json", out / "config.json")


# ---- llm-compressor ----


def scheme_of(name: str, observer: str | None) -> dict[str, Any]:
    """The preset as a config group, with another observer of the weights where one is named."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    if observer:
        scheme.weights.observer = observer
    return {"group_0": scheme}


def modifiers_of(args: argparse.Namespace) -> list[Any]:
    """What llm-compressor's oneshot applies, in order."""
    if args.transform == "awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from llmcompressor.pipelines.cache import IntermediatesCache

        if not torch.accelerator.is_available():  # pages are pinned for copies to one; without one that is an error
            IntermediatesCache.pin_memory = lambda *_: None
        return [AWQModifier(), modifier_of(args)]
    if args.transform == "smoothquant":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        return [SmoothQuantModifier(), modifier_of(args)]
    return [modifier_of(args)]


def modifier_of(args: argparse.Namespace) -> Any:
    """What llm-compressor quantizes with."""
    groups = scheme_of(args.scheme, args.observer)
    if args.method == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


def llm_compressor(args: argparse.Namespace) -> None:
    """Quantizes and saves."""
    from datasets import Dataset
    from llmcompressor import oneshot

    model = float_model(args.model)
    options: dict[str, Any] = {}
    if args.calibration is not None:
        rows = token_rows(args.calibration)
        options = {
            "dataset": Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}),
            "num_calibration_samples": len(rows),
            "max_seq_length": max(map(len, rows)),
            "shuffle_calibration_samples": False,
        }
    oneshot(model=model, recipe=modifiers_of(args), **options)
    model.save_pretrained(args.out, save_compressed=True)


# ---- ModelOpt ----


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The preset, changed as the options say."""
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, args.config))
    if args.algorithm:
        config["algorithm"] = json.loads(args.algorithm)
    if args.weights_only:
        config["quant_cfg"] = [c for c in config["quant_cfg"] if c["quantizer_name"] != "*input_quantizer"]
    return config


def loop_of(file: Path | None) -> Callable[[Any], None] | None:
    """The forward loop over the calibration tokens, one {"input_ids": [...]} a line."""
    if file is None:
        return None
    rows = token_rows(file)

    def run(model: Any) -> None:
        for start in range(0, len(rows), 8):
            model(torch.tensor(rows[start : start + 8]))

    return run


def e2m1(y: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the nearest E2M1 value, halves to the even code, saturating."""
    sign, size = y.sign(), y.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return sign * (torch.round(size / step) * step).clamp(max=6.0)


def cpu_static(
    x: torch.Tensor,
    amax: torch.Tensor,
    global_amax: torch.Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Blocks of FP4 with given largest magnitudes, quantized and decoded."""
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl

    scale = amax.float() / 6.0
    if quantize_block_scales:
        top = amax.float().amax() if global_amax is None else global_amax.float()
        scale = scaled_e4m3_impl(scale, top * (448.0 / fp8_max_for_normalization) / 6.0)
    scale = scale.reshape(-1, 1)
    safe = torch.where((scale == 0) | ~scale.isfinite(), 1.0, scale)
    blocks = x.float().reshape(scale.shape[0], -1)
    return torch.where(scale == 0, 0.0, e2m1(blocks / safe) * safe).reshape(x.shape).to(out_dtype or x.dtype)


def cpu_dynamic(
    inputs: torch.Tensor,
    block_size: int,
    amax: torch.Tensor | None,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> torch.Tensor:
    """Blocks of FP4 that choose their scales themselves, quantized and decoded."""
    if (num_bits, exponent_bits) != (4, 2):
        raise NotImplementedError(f"{num_bits} bits with {exponent_bits} of exponent")
    blocks = inputs.float().reshape(-1, block_size)
    wanted = blocks.abs().amax(1, keepdim=True) / 6.0
    if scale_exponent_bits == 8:
        scale = torch.where(wanted > 0, torch.exp2(torch.ceil(torch.log2(wanted)).clamp(-127, 127)), 1.0)
    else:
        assert amax is not None
        unit = amax.float().amax() / (6.0 * 448.0)
        scale = (wanted / unit).clamp(max=448.0).to(torch.float8_e4m3fn).float() * unit
        scale = torch.where(scale == 0, 1.0, scale)
    return (e2m1(blocks / scale) * scale).reshape(inputs.shape).to(inputs.dtype)


def without_gpu() -> None:
    """Puts the functions above in the places of ModelOpt's kernels."""
    import modelopt.torch.kernels.quantization.gemm as kernels
    from modelopt.torch.quantization import tensor_quant

    if torch.cuda.is_available():
        return
    kernels.IS_AVAILABLE = True
    kernels.static_blockwise_fp4_fake_quant = cpu_static
    tensor_quant.dynamic_block_quantize_op = cpu_dynamic


def dump(model: Any, source: str, out: Path) -> None:
    """The weights as the model multiplies with them, and what its inputs are multiplied by and quantized with."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        tensors |= {name: value.float() for name, value in load_file(file).items()}
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled:
            continue
        weight = quantizer(module.weight).float()
        factor = getattr(module.input_quantizer, "_pre_quant_scale", None)
        if factor is not None:
            factor = factor.float().flatten()
            inputs[f"{name}.pre_quant_scale"] = factor.contiguous()
            weight = weight * factor
        if module.input_quantizer.is_enabled and getattr(module.input_quantizer, "amax", None) is not None:
            inputs[f"{name}.input_scale"] = module.input_quantizer.amax.float().flatten() / (6 * 448)
        tensors[f"{name}.weight"] = weight.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    save_dump(out, source, inputs)


def modelopt(args: argparse.Namespace) -> None:
    """Quantizes and saves."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    without_gpu()
    model = float_model(args.model)
    with torch.no_grad():
        mtq.quantize(model, config_of(args), loop_of(args.calibration))
        if args.export:
            export_hf_checkpoint(model, export_dir=str(args.out))
        else:
            dump(model, args.model, args.out)


# ---- AutoRound ----


def autoround_scales(model: Any) -> dict[str, torch.Tensor]:
    """Static global scales of NVFP4 inputs as factors of the decode."""
    scales: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        name = name.removesuffix(".orig_layer")
        scale = getattr(module, "input_global_scale", None)
        amax = getattr(module, "act_max", None)
        if scale is not None:
            scales[f"{name}.input_scale"] = 1 / torch.as_tensor(scale).float().flatten().max().reshape(1)
        elif amax is not None:
            scales[f"{name}.input_scale"] = torch.as_tensor(amax).float().max().reshape(1) / (6 * 448)
    return scales


def auto_round(args: argparse.Namespace) -> None:
    """Quantizes and saves."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    if args.calibration is None:
        raise SystemExit("auto-round needs --calibration FILE")
    torch.set_num_threads(1)
    model = float_model(args.model)
    samples = [torch.tensor([row]) for row in token_rows(args.calibration)]
    extra: dict[str, Any] = {"act_bits": 16} if args.weights_only else {}
    tool = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(args.model),
        scheme=json.loads(args.scheme) if args.scheme.startswith("{") else args.scheme,
        iters=args.iters,
        dataset=samples,
        nsamples=len(samples),
        seqlen=samples[0].shape[1],
        batch_size=8,
        seed=args.seed,
        device_map="cpu",
        amp=False,
        enable_torch_compile=False,
        **extra,
    )
    with tempfile.TemporaryDirectory() as folder:
        done, _ = tool.quantize_and_save(folder, format="fake")
        (saved,) = Path(folder).rglob("model.safetensors")
        args.out.mkdir(parents=True)
        shutil.copy(saved, args.out / "model.safetensors")
    save_dump(args.out, args.model, {} if args.weights_only else autoround_scales(done))


# ---- fouroversix ----


def fouroversix_scales(model: Any, names: list[str], file: Path) -> dict[str, torch.Tensor]:
    """The largest magnitude of every layer's input over the calibration tokens, as a factor of the decode."""
    amax: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def see(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            amax[name] = torch.maximum(amax.get(name, torch.zeros(1)), args[0].abs().amax())

        return see

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    rows = token_rows(file)
    for start in range(0, len(rows), 8):
        model(torch.tensor(rows[start : start + 8]))
    for handle in handles:
        handle.remove()
    return {f"{name}.input_scale": value / (6 * 448) for name, value in amax.items()}


@torch.no_grad()
def fouroversix(args: argparse.Namespace) -> None:
    """Quantizes and saves."""
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

    torch.set_num_threads(1)
    model = float_model(args.model)
    config = QuantizationConfig(backend="pytorch", dtype=args.dtype, scale_rule=args.rule)
    names = linear_names(model)
    scales = fouroversix_scales(model, names, args.calibration) if args.calibration else {}
    for name in names:
        weight = model.get_submodule(name).weight
        decoded = dequantize(quantize_to_fp4(weight, config), dtype=torch.float32, intermediate_dtype=torch.float32)
        weight.copy_(decoded[: len(weight), : weight.shape[1]])
    model.save_pretrained(args.out)
    save_dump(args.out, args.model, scales)


# ---- torchao ----


@torch.no_grad()
def torchao(args: argparse.Namespace) -> None:
    """Quantizes, decodes and saves."""
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
    from torchao.prototype.mx_formats.inference_workflow import NVFP4DynamicActivationNVFP4WeightConfig
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    torch.set_num_threads(1)
    mx = args.format in ("mxfp4a16", "mxfp4")
    model = float_model(args.model, torch.bfloat16 if mx else torch.float32)
    names = linear_names(model)
    scales: dict[str, torch.Tensor] = {}

    def apply(config: Any) -> None:
        quantize_(model, config, filter_fn=lambda _, name: name in names)

    if args.format == "nvfp4_w4a4":
        apply(NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
        rows = token_rows(args.calibration)
        for start in range(0, len(rows), 8):
            model(torch.tensor(rows[start : start + 8]))
        apply(NVFP4DynamicActivationNVFP4WeightConfig(step="convert"))
        for name in names:
            scale = model.get_submodule(name).weight.act_per_tensor_scale
            scales[f"{name}.input_scale"] = scale.float().reshape(1).clone()
    elif args.format == "nvfp4":
        apply(NVFP4WeightOnlyConfig())
    elif mx:
        fp4 = torch.float4_e2m1fn_x2
        apply(MXDynamicActivationMXWeightConfig(activation_dtype=fp4, weight_dtype=fp4))
    else:
        apply(Float8WeightOnlyConfig())
    for name in names:
        module = model.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.dequantize(torch.float32), requires_grad=False)
    model.float().save_pretrained(args.out)
    save_dump(args.out, args.model, scales)


def parser_of() -> argparse.ArgumentParser:
    """The options of every tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tools = parser.add_subparsers(required=True, metavar="TOOL")

    def tool(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        part = tools.add_parser(name)
        part.set_defaults(run=run)
        part.add_argument("model")
        part.add_argument("out", type=Path)
        part.add_argument("--calibration", type=Path)
        return part

    part = tool("llm-compressor", llm_compressor)
    part.add_argument("--scheme", required=True)
    part.add_argument("--method", required=True, choices=["rtn", "gptq"])
    part.add_argument("--observer")
    part.add_argument("--transform", choices=["awq", "smoothquant"])
    part = tool("modelopt", modelopt)
    part.add_argument("--config", required=True)
    part.add_argument("--algorithm")
    part.add_argument("--weights-only", action="store_true")
    part.add_argument("--export", action="store_true")
    part = tool("auto-round", auto_round)
    part.add_argument("--scheme", required=True)
    part.add_argument("--iters", type=int, required=True)
    part.add_argument("--weights-only", action="store_true")
    part.add_argument("--seed", type=int, default=42)
    part = tool("fouroversix", fouroversix)
    part.add_argument("--dtype", required=True, choices=["nvfp4", "mxfp4"])
    part.add_argument("--rule", required=True)
    part = tool("torchao", torchao)
    part.add_argument("--format", required=True)
    return parser


def main() -> None:
    """Loads, quantizes, saves."""
    args = parser_of().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
