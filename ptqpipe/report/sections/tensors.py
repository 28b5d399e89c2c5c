"""Every tensor, for the searchable table."""

from ptqpipe.report.content import Report
from ptqpipe.report.sections.words import how, shown


def table_data(report: Report) -> dict[str, object]:
    """Every tensor for the searchable table: columns of indices into lists of words, and numbers."""
    words: dict[str, int] = {}

    def word(value: str) -> int:
        return words.setdefault(shown(value), len(words))

    rows: list[list[object]] = []
    for w in report.weights:
        rows.append(
            [
                shown(w.name),
                word(w.format),
                word("x".join(map(str, w.shape))),
                w.nbytes,
                round(8 * w.nbytes / max(1, w.elements), 3),
                _round(w.sqnr_db, 2),
                _round(w.choices[-1].versus_absmax if w.choices else None, 3),
                round(100 * w.codes.largest / max(1, w.codes.elements), 2),
                word(how(w)),
                _round(w.versus_rtn, 3),
            ]
        )
    for k in report.kept:
        shape = "x".join(map(str, k.shape)) or "scalar"
        row = [shown(k.name), word(f"kept {k.dtype}"), word(shape), k.nbytes, None, None, None, None]
        rows.append([*row, word(k.reason), None])
    return {"words": list(words), "rows": rows}


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
