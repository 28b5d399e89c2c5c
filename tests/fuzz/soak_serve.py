"""A service under mixed load for half an hour: good clients, bad ones, floods. Nothing may leak, hang or be wrong.

Usage: python -m tests.fuzz.soak_serve [--minutes 30] [--tp N] [--clients N] [--packed CKPT]

Starts ``ptqpipe serve`` with few places and a short queue: of the embedded demo model in float32, whose right answers
are those of transformers' generate; or of a packed checkpoint with ``--batch-invariant``, whose right answers are those
that it gives alone, before the load. Good clients compare every greedy answer; others leave in the middle of streams,
send broken JSON, prompts that are too long, bodies that are too large, and floods. Prints a JSON line every 30 seconds
and one verdict; the exit code is 1 where an answer was wrong, a request stuck, a page of the cache lost, or memory
grew: the median of the last fifth of the samples more than 3 % and 8 MiB above that of the second fifth (the first one
warms up).
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

DEMO = Path(__file__).resolve().parents[2] / "ptqpipe" / "demo_model"
PROMPTS = ("Return the current value of", "def", "A list of " * 20, "Raises an error when the file", "The module " * 30)
COUNT = 32  # tokens of an answer
LONGEST_S = 120  # a request that takes longer is stuck
LIMITS = ("--max-num-seqs", "8", "--max-queue", "24", "--max-body", "64KiB", "--kv-cache-size", "4MiB")


def answers_alone(url: str, model: str, count: int) -> dict[str, str]:
    """What the service says to one request at a time."""
    found = {}
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        found[prompt] = httpx.post(f"{url}/v1/completions", json=body, timeout=LONGEST_S).json()["choices"][0]["text"]
    return found


def right_answers(count: int) -> dict[str, str]:
    """What transformers generates in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :]
        found[prompt] = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return found


class Soak:
    """The clients and what they saw."""

    def __init__(self, url: str, model: str, answers: dict[str, str], count: int) -> None:
        self.url, self.model, self.answers, self.count = url, model, answers, count
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.pause = threading.Event()
        self.lock = threading.Lock()

    def note(self, what: str, *, wrong: str | None = None) -> None:
        """Counts something."""
        with self.lock:
            self.seen[what] += 1
            if wrong is not None and len(self.wrong) < 20:
                self.wrong.append(wrong)

    def client(self, seed: int) -> None:
        """One client that does one thing after the other until the end."""
        rng = random.Random(seed)
        kinds: list[tuple[Callable[[httpx.Client, random.Random], None], int]] = [
            (self.good, 8), (self.good_stream, 6), (self.choices, 2), (self.leave, 4), (self.broken, 2),
            (self.too_long, 1), (self.flood, 1),
        ]  # fmt: skip
        actions = [action for action, weight in kinds for _ in range(weight)]
        while not self.stop.is_set():
            if self.pause.is_set():
                time.sleep(0.1)
                continue
            try:
                with httpx.Client(base_url=self.url, timeout=LONGEST_S) as http:
                    for _ in range(8):
                        if not self.stop.is_set() and not self.pause.is_set():
                            rng.choice(actions)(http, rng)
            except httpx.ReadTimeout:
                self.note("stuck", wrong=f"no answer in {LONGEST_S} s")
            except httpx.HTTPError as error:
                self.note("transport", wrong=None if self.stop.is_set() else f"{type(error).__name__}: {error}")

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        """A greedy completion."""
        return {"model": self.model, "prompt": prompt, "max_tokens": self.count, "temperature": 0, **more}

    def judge(self, prompt: str, text: str, kind: str) -> None:
        """Right or wrong."""
        right = self.answers[prompt]
        self.note(kind, wrong=None if text == right else f"{prompt[:20]!r}: {text[:60]!r}, expected {right[:60]!r}")
        if text != right:
            self.note("wrong")

    def good(self, http: httpx.Client, rng: random.Random) -> None:
        """A completion; 429 is an answer, too."""
        prompt = rng.choice(PROMPTS)
        answer = http.post("/v1/completions", json=self.body(prompt))
        if answer.status_code == 429:
            self.note("refused")
            time.sleep(rng.random())
        elif answer.status_code == 200:
            self.judge(prompt, answer.json()["choices"][0]["text"], "good")
        else:
            self.note("odd", wrong=f"{answer.status_code}: {answer.text[:200]}")

    def good_stream(self, http: httpx.Client, rng: random.Random) -> None:
        """A stream, read to its end."""
        prompt = rng.choice(PROMPTS)
        text, done = "", False
        with http.stream("POST", "/v1/completions", json=self.body(prompt, stream=True)) as response:
            if response.status_code != 200:
                self.note("refused" if response.status_code == 429 else "odd")
                return
            for line in response.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        self.judge(prompt, text if done else text + " (no end)", "good stream")

    def choices(self, http: httpx.Client, rng: random.Random) -> None:
        """Sampled choices with log probabilities: as many as asked, the same for the same seed."""
        body = self.body(rng.choice(PROMPTS), n=3, temperature=0.8, top_p=0.9, seed=5, logprobs=2, stop=["."])
        answer = http.post("/v1/completions", json=body)
        if answer.status_code == 200:
            found = len(answer.json()["choices"])
            self.note("choices", wrong=None if found == 3 else f"{found} choices of 3")
        else:
            self.note("refused" if answer.status_code == 429 else "odd")

    def leave(self, http: httpx.Client, rng: random.Random) -> None:
        """Goes away: after some tokens of a stream, or while it waits."""
        prompt = rng.choice(PROMPTS)
        self.note("left")
        if rng.random() < 0.5:
            with (
                suppress(httpx.HTTPError),
                http.stream("POST", "/v1/completions", json=self.body(prompt, stream=True)) as response,
            ):
                for at, _ in enumerate(response.iter_lines()):
                    if at > rng.randrange(1, 8):
                        break
        else:
            with suppress(httpx.HTTPError), httpx.Client(base_url=self.url, timeout=0.05) as impatient:
                impatient.post("/v1/completions", json=self.body(prompt))

    def broken(self, http: httpx.Client, rng: random.Random) -> None:
        """What is no request."""
        content, status = rng.choice(
            [
                (b"{", 400),
                (b"[1]", 422),
                (b'{"prompt": 5}', 422),
                (b'{"prompt": "a", "n": 0}', 400),
                (b"x" * 100_000, 413),
            ]
        )
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        fits = answer.status_code == status and "error" in answer.json()
        self.note("broken", wrong=None if fits else f"{answer.status_code} for {content[:30]!r}")

    def too_long(self, http: httpx.Client, rng: random.Random) -> None:
        """A prompt beyond the context."""
        answer = http.post("/v1/completions", json=self.body("word " * 2000))
        self.note("too long", wrong=None if answer.status_code == 400 else f"{answer.status_code} for a long prompt")

    def flood(self, http: httpx.Client, rng: random.Random) -> None:
        """Many prompts at once: all or none."""
        answer = http.post("/v1/completions", json=self.body("def") | {"prompt": ["def"] * 20})
        self.note("flood refused" if answer.status_code == 429 else "flood")
        if answer.status_code not in (200, 429):
            self.note("odd", wrong=f"{answer.status_code} for a flood")


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its children, MiB."""
    total = 0
    children = [int(c) for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]
    for each in (pid, *children):
        with suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**20


def gauge(url: str, name: str) -> float:
    """One of the server's numbers."""
    match = re.search(rf"^ptqpipe_{name} (\S+)$", httpx.get(f"{url}/metrics", timeout=30).text, re.MULTILINE)
    return float(match[1]) if match else float("nan")


def idle(url: str) -> bool:
    """Whether nothing is left under way, and every page is free, within half a minute."""
    for _ in range(60):
        if all(gauge(url, name) == 0 for name in ("sequences_running", "sequences_waiting", "kv_cache_usage_ratio")):
            return True
        time.sleep(0.5)
    return False


def grown(samples: list[float]) -> float:
    """How many MiB the last fifth is above the second."""
    fifth = len(samples) // 5
    if fifth == 0:
        return 0.0
    return statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth])


def start(log: Path, tp: int, packed: Path | None) -> tuple["subprocess.Popen[bytes]", str]:
    """The service and where it listens."""
    kind = [str(DEMO), "--dtype", "float32"] if packed is None else [str(packed), "--batch-invariant"]
    command = [sys.executable, "-P", "-m", "ptqpipe", "serve", *kind, "--port", "0", *LIMITS]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--tp", str(tp)], stdout=out, stderr=out)
    while (match := re.search(r"ready: (http://\S+)/v1", log.read_text())) is None:
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return process, match[1]


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description="A service under mixed load; JSON lines, exit code 1 for a failure.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--packed", type=Path, metavar="CKPT")
    arguments = parser.parse_args()
    model = (arguments.packed or DEMO).resolve().name
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process, url = start(log, arguments.tp, arguments.packed)
        answers = answers_alone(url, model, COUNT) if arguments.packed else right_answers(COUNT)
        soak = Soak(url, model, answers, COUNT)
        threads = [threading.Thread(target=soak.client, args=(seed,), daemon=True) for seed in range(arguments.clients)]
        for thread in threads:
            thread.start()
        samples, began, told = [], time.monotonic(), 0.0
        while time.monotonic() - began < 60 * arguments.minutes and process.poll() is None:
            time.sleep(1)
            samples.append(rss_mb(process.pid))
            if time.monotonic() - told > 30:
                told = time.monotonic()
                line = {"minutes": round((told - began) / 60, 1), "rss_mb": round(samples[-1], 1), **soak.seen}
                print(json.dumps(line), flush=True)
        soak.stop.set()
        for thread in threads:
            thread.join(LONGEST_S + 30)
        alive = process.poll() is None
        verdict = {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "clients": arguments.clients,
            "seen": dict(soak.seen),
            "problems": soak.wrong,
            "threads_stuck": sum(thread.is_alive() for thread in threads),
            "idle_after": alive and idle(url),
            "rss_mb": [round(statistics.median(samples[:5]), 1), round(statistics.median(samples[-5:]), 1)],
            "grown_mb": round(grown(samples), 1),
        }
        process.send_signal(signal.SIGTERM)
        verdict["exit_code"] = process.wait(60)
        verdict["tracebacks"] = log.read_text().count("Traceback")
        level = statistics.median(samples[-5:])
        passed = not soak.wrong and not verdict["threads_stuck"] and verdict["idle_after"] and not verdict["exit_code"]
        passed = passed and verdict["grown_mb"] < 8 + 0.03 * level and not verdict["tracebacks"]
        print(json.dumps({**verdict, "passed": bool(passed)}), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
