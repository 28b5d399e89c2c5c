"""Quantizes the linear weights of a model's layers with fouroversix's own PyTorch code and writes their decode.

Run by bench_quality.py under an interpreter that has fouroversix; must not import ptqpipe. fouroversix has no export
for other readers, so the output is plain float32 safetensors. It quantizes inputs with a global scale of each call;
here inputs/scales.safetensors holds static scales ``<module>.input_scale`` from the calibration tokens instead (the
largest magnitude over 6 x 448), as checkpoints have them.

    python scripts/peers_fouroversix.py MODEL OUT --dtype nvfp4 --rule mse [--calibration FILE]
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch


def input_scales(model: Any, names: list[str], file: Path) -> dict[str, torch.Tensor]:
    """The largest magnitude of every layer's input over the calibration tokens, as a factor of the decode."""
    amax: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def see(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            amax[name] = torch.maximum(amax.get(name, torch.zeros(1)), args[0].abs().amax())

        return see

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    rows = [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]
    for start in range(0, len(rows), 8):
        model(torch.tensor(rows[start : start + 8]))
    for handle in handles:
        handle.remove()
    return {f"{name}.input_scale": value / (6 * 448) for name, value in amax.items()}


@torch.no_grad()
def main() -> None:
    """Loads, quantizes, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", required=True, choices=["nvfp4", "mxfp4"])
    parser.add_argument("--rule", required=True)
    parser.add_argument("--calibration", type=Path)
    args = parser.parse_args()
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    config = QuantizationConfig(backend="pytorch", dtype=args.dtype, scale_rule=args.rule)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.endswith("lm_head")]
    scales = input_scales(model, names, args.calibration) if args.calibration else {}
    for name in names:
        weight = model.get_submodule(name).weight
        decoded = dequantize(quantize_to_fp4(weight, config), dtype=torch.float32, intermediate_dtype=torch.float32)
        weight.copy_(decoded[: len(weight), : weight.shape[1]])
    model.save_pretrained(args.out)
    if scales:
        (args.out / "inputs").mkdir()
        save_file(scales, str(args.out / "inputs" / "scales.safetensors"))
    shutil.copy(Path(args.model) / "config.json", args.out / "config.json")


if __name__ == "__main__":
    main()
