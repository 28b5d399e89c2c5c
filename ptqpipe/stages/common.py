"""What several commands say: when, where and how a result was made, and decibels."""

import math
import os
import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path

from ptqpipe.kernels.cpu_library import processor
from ptqpipe.report import content


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


def sqnr_db(relative_mse: float) -> float:
    """Signal to quantization noise ratio; inf for an exact weight, -inf for one without any signal."""
    found = content.decibels(relative_mse)
    return found if found is not None else math.inf if relative_mse <= 0 else -math.inf
