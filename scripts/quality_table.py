"""The tables of bench_quality.py's results: mean KL by entry and format, and who is lowest by how much.

Knows result lines alone. A later line replaces an earlier one of the same entry, model, format and seed.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from quality_entries import FORMATS

from ptqpipe.check.evaluate.bootstrap import interval

OWN = "ptqpipe"
REASON = 160  # characters of a failure's reason
# (bits a weight, relative squared error of exact scales on normal numbers) of formats that leave inputs as they are
NORMAL = {"nvfp4": (4.5, 6.64e-3), "mxfp4a16": (4.25, 1.24e-2)}
ROTATED = ("convert --quality best", "learned rotations")  # begin the names of entries that rotate the hidden states
DEFAULT = {False: ("enlarged", "exact"), True: ("gptq",)}  # what ptqpipe stands for without data and with: the first


class Cell:
    """The seeds of one entry on one model and format."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.tool, self.entry, self.calibrated = (lines[0][name] for name in ("tool", "entry", "calibrated"))
        self.weights: int = lines[0].get("weights", -1)  # -1: not known
        self.bits: float = lines[0].get("bits", 0.0)  # of a weight of another format; 0: those of the format
        self.larger = self.bits > NORMAL.get(lines[0]["format"], (self.bits, 0.0))[0]
        more = any(word in self.entry for word in ("trained", "untie"))  # beside what the others change or store
        self.rotated = self.tool == OWN and self.entry.startswith(ROTATED) and not more
        self.kls = [line["kl"] for line in lines]
        self.others, self.chats = ([line[name] for line in lines if name in line] for name in ("other_kl", "chat_kl"))
        self.perplexity, self.agreement = (
            float(np.mean([line[name] for line in lines])) for name in ("perplexity", "top1_agreement")
        )
        self.sums = np.mean([line["kl_windows"] for line in lines], axis=0)
        self.counts = np.full(len(self.sums), lines[0]["window"] - 1.0)
        # Of one thread on a CPU; what a run beside a GPU took is no such cost.
        self.cpu_s = "" if "device" in lines[0] else f"{float(np.median([line['cpu_s'] for line in lines])):.0f}"
        self.peak_mib = max(line["peak_rss_mib"] for line in lines)

    @property
    def kl(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.kls))

    @property
    def name(self) -> str:
        """Tool and entry."""
        return f"{self.tool} {self.entry}"

    def minus(self, other: "Cell") -> tuple[float, tuple[float, float] | None]:
        """Difference of the mean KL to another entry, and its 95 % interval, paired over windows."""
        return self.kl - other.kl, interval((self.sums, other.sums), self.counts, of=np.subtract)


def cells_of(lines: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Cell]]:
    """(model, format) -> name -> cell."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if "kl" in line:
            last[key_of(line)] = line
    grouped: dict[tuple[str, str], dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for (model, fmt, tool, entry, _), line in last.items():
        grouped.setdefault((model, fmt), {}).setdefault((tool, entry), []).append(line)
    return {
        key: {cell.name: cell for cell in (Cell(group) for group in groups.values())} for key, groups in grouped.items()
    }


def render(lines: list[dict[str, Any]], models: Collection[str] = ()) -> str:
    """Markdown: entries by formats for each model, where ptqpipe stands, what failed. ``models``: of these alone."""
    lines = [line for line in lines if not models or line["model"].partition(",")[0] in models]
    cells = cells_of(lines)
    perplexities = {line["model"]: line["perplexity"] for line in lines if line["tool"] == "float"}
    parts = []
    for model in dict.fromkeys(model for model, _ in cells):
        formats = [fmt for fmt in FORMATS if (model, fmt) in cells]
        parts.append(entry_table(model, perplexities.get(model), {fmt: cells[model, fmt] for fmt in formats}))
    parts.append(other_text(cells))
    parts.append(standing(cells))
    parts.append(failures(lines))
    return "\n\n".join(part for part in parts if part)


def other_text(cells: dict[tuple[str, str], dict[str, Cell]]) -> str:
    """KL x 1000 on all texts, for the entries that were measured on one of another kind, and on chats where any was."""
    every = [(key, cell) for key, found in cells.items() for cell in found.values() if cell.others]
    chats = any(cell.chats for _, cell in every)
    rows = []
    for (model, fmt), cell in every:
        on_chats = [f"{1000 * float(np.mean(cell.chats)):.2f}" if cell.chats else ""] if chats else []
        kls = [f"{1000 * cell.kl:.2f}", f"{1000 * float(np.mean(cell.others)):.2f}", *on_chats]
        first = [model, fmt, cell.name, *kls, str(len(cell.others)), f"{cell.perplexity:.2f}"]
        row = [*first, f"{100 * cell.agreement:.1f} %", cell.cpu_s, f"{cell.peak_mib:.0f}"]
        rows.append(f"| {' | '.join(row)} |")
    titles = ["model", "format", "entry", "KL x 1000", "on text of another kind", *["on chats"] * chats]
    titles += ["seeds of it", "perplexity", "same top token", "CPU-s", "MiB"]
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*head, *rows]) if rows else ""


def failures(lines: list[dict[str, Any]]) -> str:
    """A line for each tool, model and reason: formats and entries of which there is no number."""
    done = {key_of(line) for line in lines if "kl" in line}
    found: dict[tuple[str, str, str], dict[str, set[str]]] = {}
    for line in lines:
        if "failed" in line and key_of(line) not in done:
            reason = line["failed"].strip().splitlines()[-1].strip()[:REASON]
            by_format = found.setdefault((line["tool"], line["model"], reason), {})
            by_format.setdefault(line["format"], set()).add(line["entry"])
    rows = []
    for (tool, model, reason), by_format in found.items():
        those = "; ".join(f"{fmt} {', '.join(sorted(by_format[fmt]))}" for fmt in FORMATS if fmt in by_format)
        rows.append(f"- {tool}, {model}: {those}: `{reason}`")
    return "\n".join(["No number, since the tool failed:", "", *rows]) if rows else ""


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a line one of a kind."""
    return tuple(line.get(name) for name in ("model", "format", "tool", "entry", "seed"))


def entry_table(model: str, perplexity: float | None, by_format: dict[str, dict[str, Cell]]) -> str:
    """Rows are entries, data-free ones first; the lowest of a column is bold, the lowest data-free one in italics."""
    every = {cell.name: cell for found in by_format.values() for cell in found.values()}
    names = sorted(every, key=lambda name: (every[name].calibrated, every[name].tool != OWN, list(every).index(name)))
    head = f"{model}, mean KL x 1000" + (f" (float perplexity {perplexity:.3f})" if perplexity else "")
    rows = [f"| {head} | data | {' | '.join(by_format)} |", "|---" * (len(by_format) + 2) + "|"]
    for name in names:
        columns = [column(found, name) for found in by_format.values()]
        rows.append(f"| {name} | {'yes' if every[name].calibrated else 'no'} | {' | '.join(columns)} |")
    limits = [shown(limit(fmt, found)) if fmt in NORMAL else "" for fmt, found in by_format.items()]
    if any(limits):
        rows.append(f"| limit of as many bits, estimated | | {' | '.join(limits)} |")
    return "\n".join(rows)


def standing_for(found: dict[str, Cell], *, calibrated: bool) -> Cell | None:
    """What ptqpipe does by default, as far as it is there."""
    return next((found[name] for entry in DEFAULT[calibrated] if (name := f"{OWN} {entry}") in found), None)


def comparable(found: dict[str, Cell]) -> dict[str, Cell]:
    """Those that quantize as many weights as ptqpipe without data does, to no more bits than the format has. Rotations
    change the head and the embedding, too, which count, but quantize no more."""
    own = standing_for(found, calibrated=False)
    return {
        name: cell
        for name, cell in found.items()
        if (own is None or cell.weights == own.weights or (cell.rotated and cell.weights > own.weights))
        and not cell.larger
    }


def limit(fmt: str, found: dict[str, Cell]) -> float:
    """What the lowest entry would have with a code at the rate-distortion bound of normal numbers, 2^-2R of R bits a
    number, instead of the format's: KL goes with the squared error where errors are spread alike."""
    bits, error = NORMAL[fmt]
    return float(min(cell.kl for cell in comparable(found).values()) * 2.0 ** (-2 * bits) / error)


def shown(kl: float) -> str:
    """A KL as tables have it, times 1000."""
    return f"{1000 * kl:.{2 if kl >= 1e-4 else 3}f}"


def column(found: dict[str, Cell], name: str) -> str:
    """One cell: mean over seeds, and their range where there are several."""
    if name not in found:
        return ""
    cell = found[name]
    text = shown(cell.kl)
    if len(cell.kls) > 1:
        text += f" ±{500 * (max(cell.kls) - min(cell.kls)):.2f}"
    same = comparable(found)
    if cell.weights == 0:
        return text
    if name not in same:
        return f"({text}: {f'{cell.bits:g} bits' if cell.larger else f'{cell.weights} weights'})"
    if cell.kl == min(other.kl for other in same.values()):
        return f"**{text}**"
    free = [other.kl for other in same.values() if not other.calibrated]
    return f"_{text}_" if free and not cell.calibrated and cell.kl == min(free) else text


def standing(cells: dict[tuple[str, str], dict[str, Cell]]) -> str:
    """ptqpipe's default beside the best peer of its kind, for every model and format."""
    rows = [
        "| model, format | data | ptqpipe | its best | best peer | difference x 1000 [95 %] | lower by |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, fmt), found in cells.items():
        for calibrated in (False, True):
            own = standing_for(found, calibrated=calibrated)
            kind = [cell for cell in comparable(found).values() if calibrated or not cell.calibrated]
            peers = [cell for cell in kind if cell.tool != OWN]
            if own is None or not peers:
                continue
            best = min((cell for cell in kind if cell.tool == OWN), key=lambda cell: cell.kl)
            peer = min(peers, key=lambda cell: cell.kl)
            difference, spread = best.minus(peer)
            limits = "" if spread is None else f" [{1000 * spread[0]:.3f}, {1000 * spread[1]:.3f}]"
            rows.append(
                f"| {model} {fmt} | {'any' if calibrated else 'no'} | {1000 * own.kl:.3f} | {best.entry} "
                f"{1000 * best.kl:.3f} | {peer.name} {1000 * peer.kl:.3f} | {1000 * difference:+.3f}{limits} | "
                f"{1 - best.kl / peer.kl:.1%} |"
            )
    return "\n".join(rows)
