"""What a step frees stays in the process: the next one causes no page faults."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, threading, torch
from ptqpipe.runtime.memory import keep_freed_memory, use_one_arena
if {kept}:
    use_one_arena()
    keep_freed_memory()

def step():
    return [torch.ones(1 << 20) for _ in range(40)]  # 160 MiB in blocks of 4

def steps():
    step(), step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=steps)  # as the engine has one of its own
thread.start()
thread.join()
"""


def faults(*, kept: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(kept=kept)], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_steps_reuse_the_memory_of_the_steps_before() -> None:
    assert faults(kept=True) < 1000 < faults(kept=False)
