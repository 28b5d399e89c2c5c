"""demo: the main job end to end on the embedded model. Convert, verify, perplexity before and after, a sentence.

The model is a real one, trained by scripts/make_tiny_model.py on the documentation of Python's standard library;
``heldout.txt`` beside it is text that it has not seen.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.rows import begin_token
from ptqpipe.check.evaluate.measures import perplexity
from ptqpipe.check.evaluate.scores import score
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import RECORD_FILE, Paths, check_place, locked, output_errors, read_json_object
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.convert_summary import by_role
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import CheckpointError, OutputExists, arg
from ptqpipe.models.source import Source
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine, one_thread_each
from ptqpipe.run.quantities import disk_size, sqnr_db
from ptqpipe.runtime.loading import load_model, load_tokenizer

MODEL = Path(__file__).resolve().parent.parent / "demo_model"
SCHEMES = ("nvfp4", "mxfp4a16", "fp8")
PROMPT = "Return the"
WINDOW, STRIDE = 256, 128  # tokens
NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One format of the demo: what it costs in bytes and in perplexity (weights quantized, activations as they are)."""

    name: str
    bytes: int
    sqnr_db: float | None
    perplexity: float
    sentence: str
    verified: str


@one_thread_each()  # so small a model is slower on several
def run_demo(out: Path, *, machine: Machine, show: Callable[[str], None]) -> list[DemoRow]:
    """Converts the embedded model to each format below ``out``, verifies each, and measures it.

    The float model's row first, then each format's; ``show`` gets the lines of the table, each when it is known.

    Raises UsageError without transformers, CheckpointError if a conversion does not hold what it claims.
    """
    check_place(out)
    with ExitStack() as held:
        with output_errors(out):
            held.enter_context(locked(Paths.of(out).partial))  # no other demo replaces what this one measures
        return _run(out, machine, show)


def _run(out: Path, machine: Machine, show: Callable[[str], None]) -> list[DemoRow]:
    _check_place(out)
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    ids = tokenizer((MODEL / "heldout.txt").read_text(encoding="utf-8"), return_tensors="pt").input_ids
    begin = begin_token(tokenizer)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    size = (MODEL / "model.safetensors").stat().st_size

    def measured(name: str, nbytes: int, sqnr: float | None, verified: str) -> DemoRow:
        scores = score(model, ids[0], window=WINDOW, stride=STRIDE, begin=begin)
        sentence = _sentence(model, tokenizer, prompt)
        return DemoRow(name, nbytes, sqnr, perplexity(scores).value, sentence, verified)

    show(header_text(int(ids.shape[1])))
    rows = [measured("bf16", size, None, "the source")]
    show(row_text(rows[0], rows[0]))
    for scheme in SCHEMES:
        with prepare(MODEL, options=RecipeOptions(format=scheme), out=out / scheme) as prepared:
            done = convert(prepared, mode="overwrite", machine=machine)
        assert done is not None  # rank 0 always has a result
        (chosen,) = prepared.outputs.recipe.schemes()
        proof = chosen.fmt.scale.enumerable  # brute force over bfloat16 scales would take a minute
        report = verify(done.out, source=MODEL, optimal=proof)
        if report.faults:
            raise CheckpointError(f"{done.out} does not verify: {report.faults[0].message}")
        verified = "verified and proven" if proof else "verified"
        roles = by_role(done.record["weights"])
        noise = sum(r["relative_mse"] * r["elements"] for r in roles) / sum(r["elements"] for r in roles)
        load_decoded(model, done.out)
        rows.append(measured(scheme, done.written_bytes, sqnr_db(noise), verified))
        show(row_text(rows[-1], rows[0]))
    show(closing_text(rows, out))
    return rows


def _check_place(out: Path) -> None:
    """OutputExists for a folder that contains anything but the output of an earlier demo, which is replaced;
    OutputError where no folder can be made."""
    check_place(out / SCHEMES[0])
    if not out.is_dir():
        return
    for path in sorted(out.iterdir()):
        if path.name in {f".{scheme}.{ending}" for scheme in SCHEMES for ending in ("partial", "gone")}:
            continue
        try:
            source = read_json_object(path / RECORD_FILE)["source"]["name"]
        except (CheckpointError, LookupError, TypeError):
            source = None
        if path.name not in SCHEMES or source != MODEL.name:
            raise OutputExists(f"{out} holds {path.name!r}, which no demo has written; give another {arg('out')}")


def load_decoded(model: Any, ckpt: Path) -> None:
    """Puts the decoded weights of a checkpoint into a model of the same architecture."""
    state = model.state_dict()
    with Source.open(ckpt) as source:
        for name in source.stored:
            state[name].copy_(source.quantized(name).dequantize())


@torch.no_grad()
def _sentence(model: Any, tokenizer: Any, prompt: torch.Tensor) -> str:
    """The prompt continued to the end of a sentence. Seeded sampling: greedy, so small a model loops."""
    torch.manual_seed(2)
    ids = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0)
    text = " ".join(str(tokenizer.decode(ids[0], skip_special_tokens=True)).split())
    return text[: text.rfind(".") + 1] or text


# The columns of the table: heading, width, and whether it is text. A row is printed as soon as it is measured.
_COLUMNS = (
    ("weights", 8, True), ("size", 7, False), ("ratio", 5, False), ("SQNR dB", 7, False), ("perplexity", 10, False),
    ("change", 8, False), ("state", 19, True),
)  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(width) if text else cell.rjust(width) for cell, (_, width, text) in zip(cells, _COLUMNS, strict=True)
    ]
    return "  ".join(padded).rstrip()


def header_text(tokens: int) -> str:
    """What stands above the rows: what they show, and the headings."""
    what = f"Perplexity on {tokens:,} held-out tokens; head, embeddings, norms stay in bfloat16"
    return "\n".join([what, "", _line([one[0] for one in _COLUMNS]), _line(["-" * one[1] for one in _COLUMNS])])


def row_text(row: DemoRow, first: DemoRow) -> str:
    return _line(
        [
            row.name,
            disk_size(row.bytes),
            f"{row.bytes / first.bytes:.3f}",
            "-" if row.sqnr_db is None else f"{row.sqnr_db:.2f}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / first.perplexity - 1):+.2f} %",
            row.verified,
        ]
    )


def closing_text(rows: Sequence[DemoRow], out: Path) -> str:
    """What stands below the rows: how each model continues the same words, and where the checkpoints are."""
    lines = ["", f"How each continues {PROMPT!r}:", *(f"  {row.name}: {row.sentence}" for row in rows)]
    return "\n".join([*lines, "", f"The checkpoints are in {out}/"])
