"""How much of a quantized model's KL divergence its inputs cause, and how much its weights.

    python -m labs.input_share MODEL OUT TEXT [TEXT ...] [--tokens 24576 8192] [--floats FOLDER]
        [--results FILE]

OUT is a checkpoint that quantizes inputs; FOLDER the float model that its codes were made from, where that is not MODEL
(behind a transform). Measured on each TEXT, its first --tokens: OUT ("both"), OUT with inputs left as they are
("weights"), and the float weights with inputs quantized as in OUT ("inputs"). Prints and appends a line of JSON for
each; KL to MODEL in nats a token, windows of 256. Needs the hf extra.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quality_measure import Remembered

from ptqpipe.check.evaluate.scores import model_logits, score
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.numerics.kernels.cpu_library import processor
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.loading import load_model, load_tokenizer

WINDOW = 256


def quantizers_of(model: Any) -> dict[str, InputQuantizer]:
    """Module -> what `load_model` has put before it."""
    hooks = ((name, hook) for name, m in model.named_modules() for hook in m._forward_pre_hooks.values())
    found = ((name, getattr(hook, "__self__", None)) for name, hook in hooks)
    return {name: quantizer for name, quantizer in found if isinstance(quantizer, InputQuantizer)}


def main() -> None:
    """Measures and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--floats", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24_576, 8192])
    parser.add_argument("--of", nargs="+", default=["both", "weights", "inputs"], choices=["both", "weights", "inputs"])
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = load_model(args.model).float()
    texts = {
        path.name: read_text(path, lambda: load_tokenizer(args.model)).tokens[:count]
        for path, count in zip(args.texts, args.tokens, strict=False)
    }
    references = {name: Remembered(partial(model_logits, teacher)) for name in texts}
    config = json.loads((args.out / "ptqpipe.json").read_text(encoding="utf-8"))
    formats = sorted({entry["scheme"] for entry in config["weights"].values()})

    def measure(what: str, model: Any) -> None:
        for name, tokens in texts.items():
            found = score(model, tokens, window=WINDOW, reference=references[name])
            assert found.kl is not None
            line = {"model": args.model.parent.name, "format": ",".join(formats), "of": what, "text": name}
            line |= {"checkpoint": args.out.name, "kl": float(found.kl.double().mean())}
            line |= {"tokens": len(found.kl), "cpu": processor()[0]}
            print(json.dumps(line), flush=True)
            if args.results is not None:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    quantized = load_model(args.out).float()
    known = quantizers_of(quantized)
    student = load_model(args.floats or args.model).float()
    for name, quantizer in known.items():
        student.get_submodule(name).register_forward_pre_hook(quantizer.pre_hook)
    if "both" in args.of:
        measure("both", quantized)
    if "weights" in args.of:
        measure("weights", load_model(args.out, activations="none").float())
    if "inputs" in args.of:
        measure("inputs", student)


if __name__ == "__main__":
    main()
