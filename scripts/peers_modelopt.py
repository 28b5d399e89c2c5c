"""Quantizes a model with NVIDIA ModelOpt's own code and writes what it computes with.

Run by bench_quality.py under an interpreter that has nvidia-modelopt; must not import ptqpipe. Weights are loaded in
float32. ModelOpt quantizes and decodes FP4 blocks with CUDA and Triton kernels alone; on a machine without a GPU the
two functions `cpu_dynamic` and `cpu_static` below stand for them, with their rules (E4M3 scales: amax / 6 rounded to
nearest, E8M0: the ceiling of log2(amax / 6); halves to even); all calibration and search is ModelOpt's own.

With ``--export`` the output is ModelOpt's unified checkpoint, otherwise its fake-quantized weights as plain
safetensors, with the factors and static scales of the inputs in inputs/scales.safetensors: ``<module>.pre_quant_scale``
[K], by which an input is multiplied before it is quantized, and which the stored weight has folded in, and
``<module>.input_scale``, which multiplies on decode.

    python scripts/peers_modelopt.py MODEL OUT --config NVFP4_DEFAULT_CFG [--algorithm JSON] [--weights-only]
        [--calibration FILE] [--export]
"""

import argparse
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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
    rows = [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]

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
    if inputs:
        (out / "inputs").mkdir()
        save_file(inputs, str(out / "inputs" / "scales.safetensors"))
    shutil.copy(Path(source) / "config.json", out / "config.json")


def main() -> None:
    """Loads, quantizes, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--algorithm")
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--export", action="store_true")
    args = parser.parse_args()
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    without_gpu()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    with torch.no_grad():
        mtq.quantize(model, config_of(args), loop_of(args.calibration))
        if args.export:
            export_hf_checkpoint(model, export_dir=str(args.out))
        else:
            dump(model, args.model, args.out)


if __name__ == "__main__":
    main()
