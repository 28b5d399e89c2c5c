"""The process of bench_quality.py that holds the float model and measures checkpoints against it.

These functions run in it, one after another; importing this file imports neither torch nor ptqpipe.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quality_measure import Baseline

_current: list["Baseline"] = []


OTHER_TOKENS = 8192  # of a text of another kind


def begin(
    source: Path,
    held_out: Path,
    calibration: Path,
    tokens: int,
    shared: bool,
    other: Path | None,
    device: str = "cpu",
    threads: int = 1,
) -> dict[str, Any]:
    """Loads a float model in the place of the one before; its perplexity, and that on the text of another kind."""
    import torch
    from quality_measure import Baseline, read_texts

    torch.set_num_threads(threads)
    _current.clear()
    texts = read_texts(source, held_out, calibration, tokens=tokens, shared=shared)
    _current.append(Baseline.of(source, texts, device))
    if other is not None:
        of_other = read_texts(source, other, other, tokens=min(tokens, OTHER_TOKENS), shared=True)
        _current.append(Baseline.of(source, of_other, device))
    more = {"other_perplexity": _current[1].perplexity} if other is not None else {}
    return {"perplexity": _current[0].perplexity, "tokens": len(texts.held_out), **more}


def write_rows(seed: int, file: Path) -> tuple[int, int]:
    """Writes the calibration rows of a seed as {"input_ids": [...]} lines; how many there are, and tokens in each."""
    rows = _current[0].texts.rows(seed)
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    return rows.shape[0], rows.shape[1]


def measure(out: Path, fmt: str, floats: bool = False) -> dict[str, Any]:
    """What a checkpoint measures, or with ``floats`` the float model behind its inputs; ``other_kl`` on the text of
    another kind."""
    found = _current[0].measure(out, fmt, floats=floats)
    for other in _current[1:]:
        its = other.measure(out, fmt, floats=floats)
        found |= {"other_kl": its["kl"], "other_perplexity": its["perplexity"]}
    return found
