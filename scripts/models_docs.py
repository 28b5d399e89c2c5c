"""Writes docs/models.md from the table of families: what stays unquantized, what readers fuse, who fails on what.

    python scripts/models_docs.py

A test compares the page with what this script makes of the table.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from ptqpipe.families import COMMON, FAMILIES, Fact

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
HEAD = """# Model families

What ptqpipe knows of families beyond names and shapes: `ptqpipe/families/table.py`, from which `python
scripts/models_docs.py` writes this page. The defaults of `convert`, the checks of `verify`, `plan`, `calibrate` and
`transform` read the same rows. A family that has no row here is converted by what holds for every model.

Every row has a tiny model in the tests, in the layout in which its vendor publishes it, taken through `convert`,
`verify --source` and, where transformers makes the family, both loaders (`tests/test_family_rows.py`). A part that
stays unquantized is quantized where a rule of a recipe names it; `--for READER` refuses that where this reader fails.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## In every model", "", *_facts(COMMON), "", "## By family", ""]
    lines += [
        "| model_type | stays unquantized | fused beside the usual | gate and up rows | transforms |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        kept = _patterns(fact for fact in family.facts if fact.by_default)
        fused = ", ".join(" + ".join(group) for group in family.fuse)
        rows = "take turns" if family.interleaved else ""
        folds = "yes" if family.norms is not None else ""
        lines.append(f"| {', '.join(family.types)} | {kept} | {fused} | {rows} | {folds} |")
    lines += [
        "",
        "## What readers get wrong, by family",
        "",
        *_facts(f for family in FAMILIES for f in family.facts if f.fails),
    ]
    return "\n".join([*lines, "", *_loaded()]).rstrip() + "\n"


def _loaded() -> list[str]:
    """What the readers' own loaders did with the tiny models, from the files that the scripts wrote."""
    lines = [
        "## What the readers' own loaders did",
        "",
        "vLLM 0.33 and SGLang 0.5.23 built these tiny models as for a GPU of compute capability 10.0 and filled them",
        "from what `convert` wrote (`scripts/vllm_fills.py`, `scripts/sglang_loads.py`, `benchmarks/vllm_fills.jsonl`,",
        "`benchmarks/sglang_families.jsonl`). No kernel was run. Pairs not listed were not tried, or stopped at",
        "what only a machine without a GPU lacks.",
        "",
        "| model | format, container | reader | outcome |",
        "|---|---|---|---|",
    ]
    for reader, file in (("vLLM", "vllm_fills"), ("SGLang", "sglang_families")):
        for line in (PAGE.parent.parent / "benchmarks" / f"{file}.jsonl").read_text().splitlines():
            row = json.loads(line)
            said, lacks = row.get("problem", "").split(". ")[0][:120].replace("|", "\\|"), len(row.get("missing", ()))
            if said:
                outcome = f"refused: `{said}`"
            else:
                outcome = f"{lacks} tensors left out without a word" if lacks else f"all {row['landed']} tensors land"
            lines.append(f"| {row['model']} | {row['output']}, {row['container']} | {reader} | {outcome} |")
    return lines


def _facts(facts: Iterable[Fact]) -> list[str]:
    """A table of parts with their reasons and what readers do with them."""
    lines = ["| modules | why | below | readers that fail where it is quantized |", "|---|---|---|---|"]
    for fact in facts:
        below = f"{fact.keep.bits} bits" if fact.keep.bits else ""
        lines.append(f"| {_patterns([fact])} | {fact.keep.reason} | {below} | {fact.fails} |")
    return list(dict.fromkeys(lines))


def _patterns(facts: Iterable[Fact]) -> str:
    """The patterns of modules, as they stand in the table."""
    return ", ".join("`" + fact.keep.pattern.removeprefix("re:").replace("|", "\\|") + "`" for fact in facts)


if __name__ == "__main__":
    PAGE.write_text(page())
