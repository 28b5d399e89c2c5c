"""Which files and data sets an option like ``data`` names, and by which weights they are mixed."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ptqpipe.calibration.rows.stored_rows import DATA_SUFFIXES, suffix_of
from ptqpipe.checkpoint import nearest_path
from ptqpipe.errors import UsageError, arg

_WEIGHT = re.compile(r"(.+)=([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf|infinity))", re.I | re.S)
_LARGEST = 1e9  # of weights: their sums must be finite
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+){0,2}")
_PLAIN = (".txt", ".md", ".raw")  # suffixes of text
_DESCRIPTIONS = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)  # of the rows beside them


def is_data_file(name: str) -> bool:
    """Whether a name ends like that of a file with data."""
    return suffix_of(Path(name)) in (*DATA_SUFFIXES, *_PLAIN)


def files_of(names: Iterable[str], *, option: str = "data") -> list[str]:
    """The files and data sets that an ``option`` names: of a folder all files in it with a suffix of data, by name.

    A name may end in ``=WEIGHT`` (`weighted`) and keeps that; the files of a folder share its weight by their sizes.
    UsageError for a folder without any, for a file that does not exist, and for one that is there twice.
    """
    chosen: list[str] = []
    for name in names:
        if not name:
            raise UsageError(f"a name in {arg(option)} is empty; give a .txt, .jsonl or .parquet file")
        plain, weight = weighted(name)
        folder = Path(plain).expanduser()
        if not folder.is_dir():
            check_there(plain, folder, option)
            chosen.append(name)
            continue
        files = _in_folder(plain, folder)
        if weight is not None:
            sizes = [max(1, Path(file).stat().st_size) for file in files]  # one without text is refused when it is read
            files = [f"{file}={weight * size / sum(sizes)!r}" for file, size in zip(files, sizes, strict=True)]
        chosen += files
    check_once(chosen, option, weights=option == "data")
    return chosen


def _in_folder(name: str, folder: Path) -> list[str]:
    files = sorted(file for file in folder.iterdir() if suffix_of(file) in DATA_SUFFIXES and file.is_file())
    files = [file for file in files if file.name not in _DESCRIPTIONS]
    if files:
        return [str(file) for file in files]
    inner = sorted(
        one.name for one in folder.iterdir() if one.is_dir() and any(is_data_file(f.name) for f in one.iterdir())
    )
    remedy = f"name one of its folders: {', '.join(inner[:6])}" if inner else "name a folder or file with text"
    raise UsageError(f"{name} is a folder without {', '.join(DATA_SUFFIXES)} files; {remedy}")


def check_once(names: Iterable[str], option: str, *, weights: bool = False) -> None:
    """UsageError for text that is given twice: what is held out of it would be what a model is calibrated on, and what
    is measured on it would count twice. ``weights``: whether a name may end in one."""
    seen = set[str]()
    for name in names:
        plain, _ = weighted(name)
        path = Path(plain).expanduser()
        identity = str(path.resolve()) if path.exists() else plain
        if identity in seen:
            more = f", {plain}=2 for twice its share of the windows" if weights else ""
            raise UsageError(f"{arg(option)} has {plain} twice; give it once{more}")
        seen.add(identity)


def weighted(name: str) -> tuple[str, float | None]:
    """A name of ``data`` and its weight, ``text.txt=2``; None where it has none. UsageError for one out of range."""
    match = _WEIGHT.fullmatch(name)
    if match is None or os.path.exists(os.path.expanduser(name)):
        return name, None
    weight = float(match[2])
    if not 0 < weight <= _LARGEST:
        raise UsageError(
            f"{arg('data', name)} has the weight {match[2]}, expected a number above 0, at most {_LARGEST:.0f}"
        )
    return match[1], weight


def check_there(name: str, path: Path, option: str = "data") -> None:
    """UsageError for a name that is no file, and none of a data set either."""
    if not path.exists() and (is_data_file(name) or not _HUB_NAME.fullmatch(name)):
        remedy = nearest_path(Path(name)) or f"give {arg(option)} a .txt, .jsonl or .parquet file"
        raise UsageError(f"{name} does not exist; {remedy}")
