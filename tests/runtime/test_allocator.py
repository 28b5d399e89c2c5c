"""What a step frees stays in the process: the next one causes no page faults. What loading has freed does not."""

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


LOADED = """
import psutil, torch
from ptqpipe.runtime.memory import keep_freed_memory

def size():
    return psutil.Process().memory_info().rss

torch.ones(1 << 22)  # freed: blocks below 16 MiB come from the heap from now on
began = size()
loaded, kept = [], []
for _ in range(40):  # as codes are read and arranged, and other tensors stay between them
    loaded.append(torch.ones(1 << 20))
    kept.append(torch.ones(1 << 16))  # 10 MiB in all
loaded.clear()
before = size() - began
keep_freed_memory()
print(before, size() - began)
"""


def numbers_of(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return [int(number) for number in done.stdout.split()]


def faults(*, kept: bool) -> int:
    (found,) = numbers_of(STEPS.format(kept=kept))
    return found


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_loading_has_freed_goes_back_to_the_system() -> None:
    before, after = numbers_of(LOADED)
    assert after < 24 << 20 < 128 << 20 < before


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_steps_reuse_the_memory_of_the_steps_before() -> None:
    assert faults(kept=True) < 1000 < faults(kept=False)
