"""What bench_serve.py asks for and what the answers' times say; and the processes that have no server: the engine and
llama.cpp, which are given one load at a time over their pipes."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TORCH_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@dataclass(frozen=True, slots=True)
class Load:
    """``batch`` prompts of ``prompt`` tokens, ``new`` tokens each."""

    batch: int
    prompt: int
    new: int


@dataclass(slots=True)
class Timing:
    """When each stream began and got its tokens, seconds."""

    began: float
    tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """One repeat."""

    prefill_tokens_s: float
    decode_tokens_s: float
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]


def prompts_of(load: Load, vocabulary: int, repeat: int) -> list[list[int]]:
    """Random tokens, others for every load and repeat."""
    rng = random.Random(f"{load.batch} {load.prompt} {repeat}")
    return [[rng.randrange(16, vocabulary - 16) for _ in range(load.prompt)] for _ in range(load.batch)]


def quantile(values: list[float], q: float) -> float:
    """The nearest rank."""
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]


def result_of(timings: list[Timing], load: Load) -> Result:
    """What the streams' times say."""
    began, ready = min(t.began for t in timings), max(t.tokens[0] for t in timings)
    last = max(t.tokens[-1] for t in timings)
    # A server may put several tokens in one event: events count as many tokens as each stream had.
    after = sum(sum(at > ready for at in t.tokens) * load.new / len(t.tokens) for t in timings)
    first = [1e3 * (t.tokens[0] - t.began) for t in timings]
    gaps = [1e3 * (b - a) for t in timings for a, b in zip(t.tokens, t.tokens[1:], strict=False)] or [0.0]
    return Result(
        load.batch * load.prompt / (ready - began),
        after / (last - ready) if last > ready else 0.0,
        (quantile(first, 0.5), quantile(first, 0.99)),
        (quantile(gaps, 0.5), quantile(gaps, 0.99)),
    )


class Child:
    """A system in a process of its own.

    sizes         threads, tokens of a sequence, sequences at once
    llama_python  interpreter of llama.cpp's environment
    cpu_clock     whether seconds are those of its CPU time
    facts         what it says of itself in its first line
    """

    def __init__(
        self,
        system: str,
        model: Path,
        sizes: tuple[int, int, int],
        *,
        llama_python: str | None,
        cpu_clock: bool,
    ) -> None:
        self.system, here = system, Path(__file__).parent
        ours = [sys.executable, str(here / "engine_child.py")]
        theirs = [llama_python or sys.executable, str(here / "llama_child.py"), "run"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(sizes[0]), "HF_HUB_OFFLINE": "1"}
        command = [*(theirs if system == "llama" else ours), str(model), *map(str, sizes)]
        command += ["--cpu-clock"] if cpu_clock else []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.facts = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.system} ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[float]]]:
        """When it began, and when each prompt got its tokens; seconds of one clock."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self._line()
        tokens = answer["tokens"]
        return answer["began"], tokens if isinstance(tokens[0], list) else [tokens] * len(prompts)

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def pss_mb(root: int) -> float:
    """Proportional set size of a process and all below it."""
    total, found = 0, [root]
    while found:
        pid = found.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        except OSError:
            continue
    return total / 1024
