"""Writes docs/models.md from the table of families: what stays unquantized, what readers fuse, who fails on what.

    python scripts/models_docs.py

A test compares the page with what this script makes of the table.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ptqpipe.models.families import COMMON, FAMILIES, ReaderIssue
from ptqpipe.models.layout_issues import LAYOUT_ISSUES
from ptqpipe.models.reader_facts import READERS, VERSIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
HEAD = """# Model families

What ptqpipe knows about model families beyond tensor names and shapes. `python scripts/models_docs.py` writes this
page from `ptqpipe/models/families/table.py` and `ptqpipe/models/layout_issues.py`, which `convert`, `verify`, `plan`,
`calibrate` and `transform` also use. A family without a row here is converted by the rules for every model.

Every row is tested with a tiny model in its vendor's layout: `convert`, `verify --source` and, if transformers supports
the family, both loaders (`tests/models/test_family_rows.py`). A rule of a recipe that names a part quantizes it even if
it usually stays unquantized; `--reader READER` refuses that if the reader is known to fail.

Patterns in the tables are regular expressions for module names. *Below, or in*: the part stays unquantized only in
formats of fewer bits, or in this format (empty: in all). *Transforms*: whether `transform` supports the
family (empty: not known).
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## In every model", "", *_facts(COMMON), "", "## By family", ""]
    lines += [
        "| model_type | stays unquantized | fused, besides q/k/v and gate/up | gate and up rows | transforms |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        kept = _patterns(issue for issue in family.issues if issue.by_default)
        parts = [f"{len(part.rows)} outputs of `{part.pattern.replace('|', chr(92) + '|')}`" for part in family.outputs]
        fused = ", ".join([*(" + ".join(group) for group in family.fuse), *parts])
        rows = "interleaved" if family.interleaved else ""
        folds = "yes" if family.norms is not None else f"no: {family.fixed}" if family.fixed else ""
        lines.append(f"| {', '.join(family.types)} | {kept} | {fused} | {rows} | {folds} |")
    lines += [
        "",
        "## What readers get wrong, by family",
        "",
        *_facts(f for family in FAMILIES for f in family.issues if f.symptom),
        "",
        *(
            f"{reader} has no such models and stops: {', '.join(kind for family in missing for kind in family.types)}."
            for reader in READERS
            if (missing := [family for family in FAMILIES if reader in family.missing])
        ),
    ]
    return "\n".join([*lines, "", *_layouts(), "", *_loaded(), "", *_commands()]).rstrip() + "\n"


def _layouts() -> list[str]:
    """What readers get wrong about layouts, where weights or config are such that it matters."""
    names = VERSIONS | {"kind": "MODEL_TYPE", "name": "CLASS"}
    lines = ["## What readers get wrong, by container", "", "| container | warning |", "|---|---|"]
    return lines + [
        f"| {container} | {text.format_map(names).replace('|', chr(92) + '|')} |"
        for container, issues in LAYOUT_ISSUES.items()
        for _, text in issues
    ]


def _loaded() -> list[str]:
    """What the readers' own loaders did with the tiny models, from the files that the scripts wrote."""
    lines = [
        "## What the readers' own loaders did",
        "",
        "vLLM 0.33 and SGLang 0.5.23 built these tiny models as for a GPU of compute capability 10.0 and filled them",
        "from what `convert` wrote (`labs/readers`: `vllm_fills.py` and `.jsonl`, `sglang_loads.py`,",
        "`sglang_families.jsonl`). No kernel was run. Not found are tensors whose bytes lie in none of the",
        "reader's parameters of that layer, and scales whose rows do not lie in the order of their codes. Pairs that",
        "are not listed were not tried, or stopped at what only a machine without a GPU lacks; widths of 64 to 128,",
        "which some of the refusals are about, are those of the tiny models. *Said before*: `convert --reader` refuses",
        "the pair, with the reason, before any work. `sglang_kept.jsonl` has SGLang's with a layer kept",
        "(`--ignore`), and those of families that are not below, `sglang_drafts.jsonl` the models that it",
        "drafts with, of kept and FP8 multi-token prediction layers: all that is not refused lands.",
        "",
        "| model | reader | outcome: format, container |",
        "|---|---|---|",
    ]
    for reader, file in (("vLLM", "vllm_fills"), ("SGLang", "sglang_families")):
        found: dict[str, dict[str, list[str]]] = {}
        for line in (PAGE.parent.parent / "labs" / "readers" / f"{file}.jsonl").read_text().splitlines():
            row = json.loads(line)
            outcome = _outcome(row)
            if outcome:
                by_outcome = found.setdefault(row["model"], {})
                ignored = "".join(f" without {pattern}" for pattern in row.get("ignore", ()))
                by_outcome.setdefault(outcome, []).append(f"{row['output']} {row['container']}{ignored}")
        for model, outcomes in found.items():
            total, most = sum(map(len, outcomes.values())), max(outcomes, key=lambda outcome: len(outcomes[outcome]))
            others = [f"{outcome}: {', '.join(outputs)}" for outcome, outputs in outcomes.items() if outcome != most]
            count = f"all {total}" if not others else f"{len(outcomes[most])} of {total}"
            lines.append(f"| {model} | {reader} | {'; '.join([f'**{count}: {most}**', *others])} |")
    return lines


def _outcome(row: dict[str, Any]) -> str:
    """What a reader did with a checkpoint, in words; empty where only the machine was in the way. A fused weight has
    one ``weight_shape``, which readers do not use, so the others are not missed."""
    if "not_written" in row:
        return f"not written, `{row['not_written'].partition(':')[0]}` at these widths"
    said = row.get("problem", "").split(". ")[0][:120].replace("|", "\\|")
    if "accelerator device" in said:
        return ""
    before = ", said before" if row.get("refused") else ""
    if said:
        return f"refused{before}, `{said}`"
    lacks = [name for name in row.get("missing", ()) if not name.endswith(".weight_shape")]
    return f"{len(lacks)} not found{before}" if lacks else "all land"


def _commands() -> list[str]:
    """What every command did with the tiny models of images and text."""
    rows = [json.loads(line) for line in (PAGE.parent.parent / "labs/image_text_commands/results.jsonl").open()]
    names = list(dict.fromkeys(row["command"] for row in rows))
    lines = [
        "## Models of images and text, through every command",
        "",
        "Tiny models with random weights, given text (`labs/image_text_commands`). `serve`: yes where its tokens are",
        "those of transformers' `generate`.",
        "",
        f"| model | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    reasons: dict[str, int] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        own = {row["command"]: row["result"] for row in rows if row["family"] == family}
        cells = ["yes" if own[name] == "ok" else f"no ({_number(own[name], reasons)})" for name in names]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())]


def _number(result: str, reasons: dict[str, int]) -> int:
    """The number of a reason, one for all families whose place of factors is not known."""
    told = result.removeprefix("Error: ").replace("|", "\\|")
    if "where factors may move" in told:
        told = "where factors may move is not known for its language model: as little as for that model alone"
    return reasons.setdefault(told, len(reasons) + 1)


def _facts(issues: Iterable[ReaderIssue]) -> list[str]:
    """A table of parts with their reasons and what readers do with them."""
    lines = ["| modules | why | below, or in | readers that fail where it is quantized, or kept |", "|---|---|---|---|"]
    for issue in issues:
        below = ", ".join(issue.formats) or (f"{issue.keep.bits} bits" if issue.keep.bits else "")
        why = issue.keep.reason + ", kept" * bool(issue.unless_quantized)
        lines.append(f"| {_patterns([issue])} | {why} | {below} | {issue.symptom} |")
    return list(dict.fromkeys(lines))


def _patterns(issues: Iterable[ReaderIssue]) -> str:
    """The patterns of modules, as they stand in the table."""
    return ", ".join("`" + issue.keep.pattern.removeprefix("re:").replace("|", "\\|") + "`" for issue in issues)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
