"""Numbers as people read them: shares, decibels, counts. Text only."""

from ptqpipe.run.quantities import number, three_digits


def count(value: float) -> str:
    """How many numbers: 4.20 M, 8.03 B; small ones in full."""
    if value < 100_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "B"):
        value /= 1000
        if value < 1000:
            return f"{three_digits(value)} {unit}"
    return f"{three_digits(value / 1000)} T"


def share(part: float | None, whole: float) -> str:
    """A percentage; "none" for none, so that a rounded zero is not taken for one."""
    if part is None:
        return "–"
    if part == 0 or whole == 0:
        return "none"
    value = 100 * part / whole
    if value < 0.001:
        return "< 0.001 %"
    return f"{value:.3f} %" if value < 0.1 else f"{value:.2f} %" if value < 10 else f"{value:.1f} %"


def db(value: float | None) -> str:
    """Decibels, a dash where unknown."""
    return "–" if value is None else f"{value:.2f}"


def sci(value: float | None) -> str:
    """Relative errors, scales and divergences: three digits that count, 6.58e-3, 0.0154, 12.0."""
    if value is None:
        return "–"
    return f"{value:#.3g}".rstrip(".") if value == 0 or 0.01 <= abs(value) < 1000 else number(value, 3)


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def plain(value: float | None, digits: int = 3) -> str:
    """A fixed number of digits after the point."""
    return "–" if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:+.{digits}f}"
