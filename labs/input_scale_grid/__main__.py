"""What it does to a model that the static scales of its inputs are all multiplied by one number: KL divergence.

    python -m labs.input_scale_grid MODEL CHECKPOINT --text FILE [--name NAME] [--tokens 8192] [--times 1 1.0905 ...]
        [--only .layers.0.]

In NVFP4 a block's scale is its largest input / 6 / the static scale, rounded to E4M3. A power of two on the static
scale moves the range of what can be stored, and rounds the same as long as nothing leaves it; factors between one and
two move the grid that is rounded to. CHECKPOINT is one of MODEL, of any tool; a copy of it with the scales changed is
measured as bench_quality.py measures. One JSON line for each factor. Needs the hf extra.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from quality_measure import Baseline, read_texts
from safetensors.torch import load_file, save_file

EIGHTHS = [2 ** (k / 8) for k in range(8)]


def scaled(checkpoint: Path, out: Path, times: float, only: str) -> None:
    """A copy of the checkpoint, its static input scales with ``only`` in their names multiplied (divisors divided)."""
    shutil.copytree(checkpoint, out)
    changed = 0
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            factor = {"input_scale": times, "input_global_scale": 1 / times}.get(name.rpartition(".")[2])
            if factor is not None and only in name:
                tensors[name], changed = tensor * factor, changed + 1
        save_file(tensors, file, metadata={"format": "pt"})
    if not changed:
        where = f" with {only!r} in its name" if only else ""
        raise SystemExit(f"{checkpoint} has no static input scale{where}; give one of nvfp4_w4a4 or fp8_static")


def main() -> None:
    """Runs what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--name", help="of the model and the tool in the lines [the folder]")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--times", nargs="+", type=float, default=EIGHTHS, help="the factors [eighths of an octave]")
    parser.add_argument("--only", default="", metavar="PART", help="of the names of scales that are changed [all]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = read_texts(args.model, args.text, args.text, tokens=args.tokens, shared=True)
    baseline = Baseline.of(args.model, texts)
    for times in args.times:
        with tempfile.TemporaryDirectory() as folder:
            scaled(args.checkpoint, Path(folder) / "out", times, args.only)
            found = baseline.measure(Path(folder) / "out", "nvfp4_w4a4")
        line = {"checkpoint": args.name or args.checkpoint.name, "tokens": found["tokens"]}
        line |= {"only": args.only} if args.only else {}
        line |= {"times": round(times, 4), "kl_x1000": round(found["kl"] * 1000, 3)}
        line["standard_error_x1000"] = round(found["standard_error"] * 1000, 3)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
