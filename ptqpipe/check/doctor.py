"""doctor: what this machine has for ptqpipe, and what to do about what it has not. Changes nothing, and never fails."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib import error, request

from ptqpipe._version import __version__
from ptqpipe.errors import arg, first_line
from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.run.quantities import counted, disk_size, memory_size
from ptqpipe.runtime.memory import available_bytes

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512vbmi", "amx_tile", "asimd", "asimddp")
"""What the kernels ask of a CPU, as /proc/cpuinfo names it; AMX they leave to torch."""

_REQUIRED = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?[^;]*; extra == ['\"](\w+)['\"]")
_WORDS = {"ok": "ok", "missing": "--", "note": "note"}


class Check(NamedTuple):
    """One line of the answer.

    state   "ok"; "missing": something that ptqpipe could use is not here; "note": to be known
    text    what was found
    remedy  what changes it; empty: nothing has to
    facts   the same for programs
    """

    name: str
    state: str
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = MappingProxyType({})


def examine(*, network: bool = True) -> list[Check]:
    """Every check, in the order of the answer. ``network``: whether the hub may be asked."""
    return [_python(), *_cpu(), *_torch(), *_extras(), _memory(), _disk(), _hub(network=network)]


def _python() -> Check:
    facts = {"ptqpipe": __version__, "python": platform.python_version(), "executable": sys.executable}
    return Check("ptqpipe", "ok", f"{__version__}, Python {facts['python']} ({sys.executable})", facts=facts)


def _cpu() -> Iterator[Check]:
    model, flags = cpu_library.processor()
    cores = len(os.sched_getaffinity(0))
    known_flags = [flag for flag in FLAGS if flag in flags]
    facts = {"model": model, "processors": cores, "flags": known_flags}
    yield Check(
        "CPU",
        "ok",
        f"{model}, {counted(cores, 'processor')}; {', '.join(known_flags) or 'no vector units'}",
        facts=facts,
    )
    reason, isa = cpu_library.why_missing(), cpu_library.current_isa()
    isas = list(cpu_library.known_isas())
    facts = {"isa": isa, "known": isas, "library": str(cpu_library.LIBRARY)}
    if not reason:
        yield Check("kernels", "ok", f"{isa} in use, of {', '.join(isas)}", facts=facts)
        return
    what, _, remedy = reason.partition("; ")
    yield Check("kernels", "missing", f"{what}: the same bytes come from torch, many times slower", remedy, facts)


def _torch() -> Iterator[Check]:
    import torch

    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    yield Check(
        "torch", "ok", f"{torch.__version__}, {build}, {counted(torch.get_num_threads(), 'thread')}", facts=facts
    )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {"found": names, "triton": _installed("triton")}
    if names and facts["triton"]:
        text = f"{', '.join(names)}; not used unless asked for: commands compute on the CPU by default"
        yield Check("GPU", "ok", text, f"give commands {arg('device', 'cuda')}", facts)
    elif names:
        text = f"{', '.join(names)}; triton, which the kernels for it need, is not installed"
        yield Check("GPU", "missing", text, "pip install 'ptqpipe[cuda]'", facts)
    else:
        seen = Path("/proc/driver/nvidia").exists() and not torch.version.cuda
        remedy = "install a torch that is built for CUDA" if seen else ""
        yield Check("GPU", "note", "an NVIDIA driver, but torch has no CUDA" if seen else "none found", remedy, facts)


def _extras() -> Iterator[Check]:
    needed = required()
    for extra in sorted(needed.keys() - {"all", "dev", "cuda"}):
        missing = [name for name in needed[extra] if not _installed(name)]
        facts = {"needs": needed[extra], "missing": missing}
        if missing:
            remedy = f"pip install 'ptqpipe[{extra}]'"
            yield Check(f"extra {extra}", "missing", f"lacks {', '.join(missing)}", remedy, facts)
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(needed[extra]), facts=facts)


def required() -> dict[str, list[str]]:
    """Extra -> the packages that it needs, of the package as it was installed; empty where it was not."""
    try:
        lines = metadata.requires("ptqpipe") or []
    except metadata.PackageNotFoundError:
        return {}
    packages: dict[str, list[str]] = {}
    for name, _, extra in (match.groups() for line in lines if (match := _REQUIRED.match(line))):
        if name != "ptqpipe":  # an extra that another one includes is reported by itself
            packages.setdefault(extra, []).append(name)
    return packages


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _memory() -> Check:
    free = available_bytes()
    facts = {"available_bytes": free}
    return Check("memory", "ok", f"{memory_size(free)} free; commands stay below {arg('max_memory')}", facts=facts)


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    return Check("disk", "ok", f"{disk_size(free)} free in {Path.cwd()}", facts={"free_bytes": free})


def _hub(*, network: bool) -> Check:
    setting = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)), None)
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    facts = {"offline": setting, "endpoint": url, "reachable": None}
    if setting is not None:
        return Check("hub", "note", f"not checked, {setting} is set: only models in the cache can be used", facts=facts)
    if not network:
        return Check("hub", "note", "not asked", facts=facts)
    try:
        with request.urlopen(request.Request(url, method="HEAD"), timeout=5):
            return Check("hub", "ok", f"{url} answers", facts=facts | {"reachable": True})
    except error.HTTPError:  # an answer, too
        return Check("hub", "ok", f"{url} answers", facts=facts | {"reachable": True})
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        text = f"{url} does not answer ({first_line(reason) if isinstance(reason, Exception) else reason})"
        remedy = "give models as folders, or set HF_ENDPOINT to a mirror"
        return Check("hub", "missing", text, remedy, facts | {"reachable": False})


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def to_json(checks: list[Check]) -> dict[str, Any]:
    return {one.name: {"state": one.state, "text": one.text, "remedy": one.remedy, **one.facts} for one in checks}


def render(checks: list[Check], columns: int | None = None) -> str:
    """A line for each check, and below it what to do; long ones go on in the next line of ``columns``."""
    width = max(len(one.name) for one in checks)
    lines = []
    for one in checks:
        paragraphs = [one.text, *([f"to fix it: {one.remedy}"] if one.remedy else [])]
        room = max(20, (columns or sys.maxsize) - width - 8)
        parts = [
            part for text in paragraphs for part in wrap(text, room, break_long_words=False, break_on_hyphens=False)
        ]
        heads = [f"{_WORDS[one.state]:<4}  {one.name:<{width}}  ", *[" " * (width + 8)] * (len(parts) - 1)]
        lines += [head + part for head, part in zip(heads, parts, strict=True)]
    return "\n".join(lines)
