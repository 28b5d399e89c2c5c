"""Takes a tiny model of every image-text family through every command, and says what each of them did.

Usage: python -m labs.image_text_commands [--families KIND ...] [--commands NAME ...] [--results FILE]

The models are those of ``tests/image_text.py``: transformers' own classes, random weights. Each command is called as a
user calls it, on text: token ids, which need no words. One JSON line a family and command:

    result  "ok", or the line with which the command refused
    note    of ``serve``: whether the tokens are those of transformers' ``generate``, given the same text
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

PROMPT, COUNT = (5, 6, 7, 8, 9, 10), 8
SHORT = ("--samples", "4", "--seqlen", "16")


def call(*words: object) -> str:
    """``ptqpipe WORDS``: "ok", or the last line of what it said."""
    from click.testing import CliRunner

    from ptqpipe.cli import main as ptqpipe

    done = CliRunner().invoke(ptqpipe, [str(word) for word in words])
    if done.exit_code == 0:
        return "ok"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.exit_code}"


def called(*words: object) -> tuple[str, str]:
    """(result, no note) of ``ptqpipe WORDS``."""
    return call(*words), ""


def served(model: Path) -> tuple[str, str]:
    """(result, note) of a text request to ``ptqpipe serve``."""
    import httpx
    from transformers import AutoModelForImageTextToText

    from ptqpipe.errors import PtqError
    from ptqpipe.serving.command import serving
    from ptqpipe.serving.options import ServeOptions

    options = ServeOptions(ckpt=str(model), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1)
    body = {"prompt": list(PROMPT), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    try:
        with serving(options, log=lambda line: None) as url:
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    except PtqError as error:
        return str(error), ""
    if found.status_code != 200:
        return found.text, ""
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    out = whole.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, min_new_tokens=COUNT,
        do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    words = _decoded(model, out[0, len(PROMPT) :].tolist())
    same = "".join(found.json()["choices"][0]["text"].split()) == "".join(words.split())  # special tokens leave spaces
    return "ok", "tokens of generate" if same else "other tokens than generate's"


def _decoded(model: Path, tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model).decode(tokens, skip_special_tokens=True))


def commands(model: Path, scratch: Path, data: Path) -> Iterator[tuple[str, Callable[[], tuple[str, str]]]]:
    """Every command with what calls it, in an order in which later ones have what they need of earlier ones."""
    stats, out = scratch / "stats", scratch / "out"
    calls: dict[str, tuple[object, ...]] = {
        "calibrate": ("calibrate", model, "--data", data, *SHORT, "--holdout", "1", "-o", stats),
        "generate": ("generate", model, *SHORT, "-o", scratch / "own.jsonl"),
        "tune": ("tune", model, "--data", data, *SHORT, "-o", scratch / "codes"),
        "plan": ("plan", model, "--budget", "6.5bits", "-o", scratch / "recipe.yaml"),
        "transform": (
            "transform",
            model,
            "--transforms",
            "rotate_values",
            "--rotation-size",
            "16",
            "-o",
            scratch / "turned",
        ),
        "convert": ("convert", model, "-o", out, "-q"),
        "convert with statistics": ("convert", model, "--stats", stats, "-o", scratch / "better", "-q"),
        "verify": ("verify", out, "--source", model),
        "eval": ("eval", out, "--source", model, "--data", data, "--seqlen", "16", "-o", scratch / "eval.json"),
    }
    for name, words in calls.items():
        yield name, partial(called, *words)
    yield "serve", lambda: served(model)


def rows(kinds: list[str], wanted: list[str]) -> Iterator[dict[str, Any]]:
    """A line for each family and command."""
    from tests import families, processors

    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            model = families.make_model(scratch / kind, kind)
            processors.add_tokenizer(model)
            data = families.write_windows(scratch / "data.jsonl")
            for command, run in commands(model, scratch, data):
                if not wanted or command in wanted:
                    result, note = run()
                    line = {"family": kind, "command": command, "result": result.replace(name, "").replace("/", "")}
                    yield line | ({"note": note} if note else {})


def main() -> int:
    """Parses the options and runs."""
    from tests import image_text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(image_text.RUN), metavar="KIND")
    parser.add_argument("--commands", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    for row in rows(options.families, options.commands):
        line = json.dumps(row)
        print(line, flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
