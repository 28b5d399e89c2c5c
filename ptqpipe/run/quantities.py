"""Sizes, numbers and tables as text, the same everywhere: disk in GB, memory in GiB, 6.58e-3 for small numbers."""

import math
import re
from collections.abc import Iterable, Sequence

from ptqpipe.errors import printable

_DISK_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_MEMORY_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?", re.IGNORECASE)
_SMALLEST_PLAIN = 1e-2  # numbers below it are written with an exponent
_LARGEST_PLAIN = 1e6


def disk_size(nbytes: float) -> str:
    """Bytes on a disk in decimal units, three significant digits: 4.50 GB."""
    for unit, factor in _DISK_UNITS:
        if nbytes >= 0.9995 * factor:
            return f"{three_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def memory_size(nbytes: float) -> str:
    """Bytes in memory or of a message in binary units, three significant digits: 1.5 GiB, 245 MiB."""
    for unit, factor in _MEMORY_UNITS:
        if nbytes >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} B"


def bytes_of(text: str) -> int | None:
    """The bytes that a size as a user types it stands for: ``800MB`` (10^6), ``2GiB`` (2^30), ``1500000000``; None for
    what is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    power = " kmgt".index((match[2] or " ").lower())
    size = float(match[1]) * (1 << 10 * power if match[3] else 10 ** (3 * power))
    return int(min(size, 2.0**100))  # four hundred digits are an infinite float


def option_size(nbytes: int) -> str:
    """Bytes as a user types them for an option, exactly, in the shortest way: 2GiB, 100MB, 1.5GiB, else 1234567B."""
    texts = []
    for unit, factor in (*_MEMORY_UNITS, *_DISK_UNITS):
        for digits in (0, 1, 2):
            text = f"{nbytes / factor:.{digits}f}"
            if nbytes >= factor and round(float(text) * factor) == nbytes:
                texts.append(f"{text}{unit}")
                break
    return min(texts, key=len, default=f"{nbytes}B")


def option_size_above(nbytes: int) -> str:
    """The smallest size in MiB, as a user types it for an option, that is not less than ``nbytes``: 548MiB."""
    return f"{-(-nbytes >> 20)}MiB"


def counted(number: int, thing: str) -> str:
    """1 sample, 2 samples."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def three_digits(value: float) -> str:
    """About three significant digits, no exponent: 3.88, 38.8, 388."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def number(value: float, digits: int = 4) -> str:
    """``digits`` significant digits; with an exponent below 0.01 and from a million on: 0.7351, 12.04, 6.577e-3."""
    if value == 0 or _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return scientific(value, digits)


def scientific(value: float, digits: int = 3) -> str:
    """``digits`` significant digits and an exponent without zeros or plus sign: 6.58e-3, 1.2e9; inf and nan as such."""
    mantissa, e, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first ``left`` columns are text, the others numbers. Cells may hold names from files: what
    would steer a terminal is escaped."""
    body = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in body) for i in range(len(header))]
    lines = []
    for row in body:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def decibels(relative_mse: float | None) -> float | None:
    """-10 log10; None for None, zero and what is not finite."""
    if relative_mse is None or not 0 < relative_mse < math.inf:
        return None
    return -10.0 * math.log10(relative_mse)


def sqnr_db(relative_mse: float) -> float:
    """Signal to quantization noise ratio; inf for an exact weight, -inf for one without any signal."""
    sqnr = decibels(relative_mse)
    return sqnr if sqnr is not None else math.inf if relative_mse <= 0 else -math.inf
