"""How much more a model loses on a text than it expects: what `calibrate` warns by, for texts of several kinds.

    python -m labs.likeness_table MODEL FILE ... [--results FILE]

By transformers' own model in float32, on the first 8 windows of 128 tokens of each file, and of two texts made of the
first one: its words shuffled, and random characters. Prints a line of JSON for each text. Needs the hf extra.
"""

import argparse
import json
import random
from pathlib import Path

import torch

import ptqpipe
from ptqpipe.calibration.likeness import UNLIKE, WINDOWS
from ptqpipe.runtime.loading import load_tokenizer

TOKENS = 128
CHARACTERS = 40_000  # of each text that are looked at


def texts_of(files: list[Path]) -> dict[str, str]:
    """The texts by name."""
    texts = {file.name: file.read_text(errors="replace")[:CHARACTERS] for file in files}
    chosen = random.Random(0)
    words = next(iter(texts.values())).split()
    chosen.shuffle(words)
    noise = "".join(chr(chosen.randrange(33, 127)) for _ in range(CHARACTERS))
    return texts | {"shuffled words": " ".join(words), "random characters": noise}


def measure(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """Mean loss and mean entropy in nats a token, of windows [windows, tokens] int64."""
    with torch.no_grad():
        logs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    loss = -logs.gather(2, ids[:, 1:, None]).mean(dtype=torch.float64)
    entropy = -(logs.exp() * logs).sum(-1).mean(dtype=torch.float64)
    return float(loss), float(entropy)


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    model, tokenizer = ptqpipe.load_model(args.model, dtype="fp32"), load_tokenizer(args.model)
    for name, text in texts_of(args.files).items():
        ids = torch.tensor(tokenizer(text)["input_ids"][: WINDOWS * TOKENS])
        loss, entropy = measure(model, ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS))
        called = args.model.resolve().parent.name if args.model.name == "hf" else args.model.name
        over = loss - entropy
        line = {"model": called, "text": name, "loss": round(loss, 4), "entropy": round(entropy, 4)}
        line |= {"over": round(over, 4), "warned": over > UNLIKE}
        print(json.dumps(line), flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
