"""Quantizes a model with AutoRound's own code and writes its weights.

Run by bench_quality.py under an interpreter that has auto-round; must not import ptqpipe. Weights are loaded in
float32. The output is the quantize-dequantized model as AutoRound saves it (format "fake"): plain float32 safetensors;
where inputs have static scales (NVFP4), inputs/scales.safetensors has them as ``<module>.input_scale``, which
multiplies on decode.

    python scripts/peers_autoround.py MODEL OUT --scheme NVFP4 --iters 0 [--weights-only] --calibration FILE [--seed N]

``--scheme`` takes a preset's name or its fields as JSON. ``--iters 0`` is AutoRound's optimized rounding to nearest,
200 its tuning. FILE: one {"input_ids": [...]} a line.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch


def samples_of(file: Path) -> list[torch.Tensor]:
    """The calibration tokens, [1, T] each."""
    return [torch.tensor([json.loads(line)["input_ids"]]) for line in file.read_text().splitlines()]


def input_scales(model: Any) -> dict[str, torch.Tensor]:
    """Static global scales of NVFP4 inputs as factors of the decode."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        name = name.removesuffix(".orig_layer")
        scale = getattr(module, "input_global_scale", None)
        amax = getattr(module, "act_max", None)
        if scale is not None:
            found[f"{name}.input_scale"] = 1 / torch.as_tensor(scale).float().flatten().max().reshape(1)
        elif amax is not None:
            found[f"{name}.input_scale"] = torch.as_tensor(amax).float().max().reshape(1) / (6 * 448)
    return found


def main() -> None:
    """Loads, quantizes, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    from auto_round import AutoRound
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    samples = samples_of(args.calibration)
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
    scales = {} if args.weights_only else input_scales(done)
    if scales:
        (args.out / "inputs").mkdir()
        save_file(scales, str(args.out / "inputs" / "scales.safetensors"))
    shutil.copy(Path(args.model) / "config.json", args.out / "config.json")


if __name__ == "__main__":
    main()
