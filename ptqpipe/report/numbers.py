"""Numbers as people read them: sizes, shares, decibels, counts. Text only."""


def size(count: float) -> str:
    """Bytes: 4.50 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{three(count)} {unit}"
        count /= 1000
    return f"{three(count)} TB"


def three(value: float) -> str:
    """About three significant digits: 3.88, 38.8, 388."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def count(value: float) -> str:
    """How many numbers: 4.20 M, 8.03 B; small ones in full."""
    if value < 100_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "B"):
        value /= 1000
        if value < 1000:
            return f"{three(value)} {unit}"
    return f"{three(value / 1000)} T"


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
    """Relative errors and scales: 6.58e-03."""
    return "–" if value is None else f"{value:.2e}"


def ratio(value: float | None) -> str:
    """Errors beside others: 0.735."""
    return "–" if value is None else f"{value:.3f}"


def plain(value: float | None, digits: int = 3) -> str:
    """A fixed number of digits after the point."""
    return "–" if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    """With its sign."""
    return "–" if value is None else f"{value:+.{digits}f}"


def nats(value: float | None) -> str:
    """A divergence: three digits that count."""
    if value is None:
        return "–"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
