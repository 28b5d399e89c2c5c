"""When, where and by which command a result was made."""

import os
import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path

from ptqpipe.numerics.kernels.cpu_library import processor


def run_facts(command: str = "") -> dict[str, str]:
    """When (UTC) and on which machine a result is made, and by which command, its folders left out: it is published."""
    words = [_without_folders(word) for word in shlex.split(command)]
    cores = f"{os.cpu_count()} processors, {platform.system()}"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": now, "machine": f"{processor()[0]}, {cores}", "command": shlex.join(words)}


def _without_folders(word: str) -> str:
    """An argument with its path's last part alone; names on the hub stay whole."""
    option, equals, value = word.rpartition("=")
    path = Path(value)
    hidden = path.is_absolute() or value.startswith((".", "~")) or os.path.exists(path.parent)
    return f"{option}{equals}{path.name}" if hidden and path.name else word
