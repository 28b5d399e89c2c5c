"""How much the KL divergence of quantizations differs that have one error: the luck of rounding.

    python -m labs.rounding_spread MODEL TEXT [--format nvfp4_w4a4] [--scale-search exact]
        [--objective none] [--times 8] [--tokens 24576] [--results FILE]

MODEL is quantized without data several times. Each time the candidates for global scales begin a little higher (by
2^(1/128)), which moves every scale and code, and the error of the weights by some thousandths of a percent: nothing
that an error-minimizing search could tell apart. Where a format has no global scales, whose scales are powers of two,
the weights are multiplied by 2^(k / times) before and divided by it afterwards instead. One JSON line: of every
quantization the squared error of all weights and the mean KL divergence to MODEL in nats a token on the first --tokens
of TEXT (windows of 256), as the format says ("kl") and with inputs left as they are ("weights"); with mean, standard
deviation and range. A difference between two methods that is smaller says nothing about the methods.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from quality_measure import Remembered
from safetensors.torch import load_file, save_file

from ptqpipe.check.evaluate.scores import model_logits, score
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.cli import main as ptqpipe
from ptqpipe.numerics import global_scale
from ptqpipe.numerics.kernels.cpu_library import processor
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.runtime.loading import ActivationMode, load_model, load_tokenizer

WINDOW, STEP = 256, 2 ** (1 / 128)


def quantized(model: Path, out: Path, fmt: str, options: list[str]) -> dict[str, float]:
    """Writes OUT; returns the squared errors of its weights."""
    words = map(str, ("convert", model, "-o", out, "--format", fmt, "--workers", 1, "--overwrite", "-q"))
    done = CliRunner().invoke(ptqpipe, [*words, *options])
    if done.exit_code:
        raise SystemExit(done.stderr)
    weights = json.loads((out / "ptqpipe.json").read_text(encoding="utf-8"))["weights"]
    return {name: float(weight["squared_error"]) for name, weight in weights.items()}


def enlarged(model: Path, out: Path, names: Iterable[str], by: float) -> None:
    """Writes a model in float32 whose weights ``names`` are multiplied."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))
    tensors = {name: t.float() for file in sorted(model.glob("*.safetensors")) for name, t in load_file(file).items()}
    save_file(tensors | {name: tensors[name] * by for name in names}, out / "model.safetensors", {"format": "pt"})


def summary(numbers: list[float]) -> dict[str, Any]:
    """The numbers, and how far they lie apart."""
    spread = {"mean": statistics.mean(numbers), "deviation": statistics.stdev(numbers)}
    return spread | {"least": min(numbers), "most": max(numbers), "each": numbers}


def main() -> None:
    """Measures, and appends the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--name", help="of the model in the line [its folder's]")
    parser.add_argument("--format", default="nvfp4_w4a4")
    parser.add_argument("--scale-search", help="of the block scales [the format's]")
    parser.add_argument("--objective", help="of the block scales [the format's]")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = read_text(args.text, lambda: load_tokenizer(args.model)).tokens[: args.tokens]
    reference = Remembered(partial(model_logits, load_model(args.model).float()))
    found: dict[str, list[float]] = {"squared_error": [], "kl": [], "weights": []}
    first = global_scale.OCTAVE_START
    kinds: tuple[tuple[str, ActivationMode], ...] = (("kl", "simulated"), ("weights", "none"))
    named = {"--scale-search": args.scale_search, "--objective": args.objective}
    options = [word for name, value in named.items() if value is not None for word in (name, value)]
    has_global = get_scheme(args.format).fmt.has_global
    with tempfile.TemporaryDirectory() as folder:
        out, source = Path(folder) / "out", args.model
        names = list(quantized(args.model, out, args.format, options))
        for at in range(args.times):
            by = 1.0 if has_global else 2 ** (at / args.times)
            if has_global:
                global_scale.OCTAVE_START = first * STEP**at
            elif at:
                source = Path(folder) / str(at)
                enlarged(args.model, source, names, by)
            errors = quantized(source, out, args.format, options)
            found["squared_error"].append(sum(errors.values()) / by**2)
            for name, activations in kinds:
                student = load_model(out, activations=activations).float()
                with torch.no_grad():
                    for weight in names if by > 1 else ():
                        student.get_parameter(weight).div_(by)
                kl = score(student, tokens, window=WINDOW, reference=reference).kl
                assert kl is not None
                found[name].append(float(kl.double().mean()))
    line = {"model": args.name or args.model.name, "format": args.format, "text": args.text.name}
    if args.scale_search is not None:
        line["search"] = args.scale_search
    if args.objective is not None:
        line["objective"] = args.objective
    line |= {"tokens": len(tokens), "cpu": processor()[0]}
    line |= {name: summary(numbers) for name, numbers in found.items()}
    print(json.dumps(line))
    if args.results is not None:
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
