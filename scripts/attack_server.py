"""Attacks a running service of the embedded demo model over HTTP; after each one a good request must be answered right.

Usage: python scripts/attack_server.py [--rounds 2] [--ckpt FOLDER]

Long prompts, four at once (4 MB of text, of tokens, of chat, of lists of a wrong type), names of other hosts, bodies
over the limit with and without their length, headers that contradict each other, requests that stop halfway, clients
that leave. Prints a JSON line for each attack (status codes, seconds, memory of the service in MB) and a verdict; the
exit code is 1 where a good request was not answered right, a status was not the expected one, or memory grew by more
than 200 MB over that of the start, which four bodies of 4 MB need at once as objects and the heap keeps, or by more
than 60 MB from one round to the next.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

DEMO = Path(__file__).resolve().parents[1] / "ptqpipe" / "demo_model"
BYTES = 4_190_000  # just under the default limit of a body
GROWTH_MB, ROUND_MB = 200, 60
GOOD = {"prompt": "Return the current value of", "max_tokens": 8, "temperature": 0}


class Service:
    """``ptqpipe serve`` on a free port."""

    def __init__(self, ckpt: Path) -> None:
        command = [sys.executable, "-P", "-m", "ptqpipe", "serve", str(ckpt), "--port", "0", "--workers", "1"]
        self.process = subprocess.Popen([*command, "--kv-cache-size", "4MiB"], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ready: http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found[1])
                return
        raise SystemExit("the service did not start")

    def memory_mb(self) -> int:
        """What it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1000  # type: ignore[index]

    def peak_mb(self) -> int:
        """The most that it has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1000  # type: ignore[index]

    def post(self, path: str, body: Any, **headers: str) -> int:
        """The status of a request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, content=content, headers=headers, timeout=120).status_code

    def good(self) -> str:
        """The text of the good request."""
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=GOOD, timeout=120)
        return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else f"<{answer.status_code}>"

    def raw(self, sent: bytes, *, answer: bool = True) -> int:
        """The status that bytes of HTTP get; 0 for none."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=15) as found:
            try:
                found.sendall(sent)
                said = found.recv(1 << 16) if answer else b""
            except OSError:
                return 0
        words = said.split(b" ")
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def attacks(service: Service) -> Iterator[tuple[str, Callable[[], int], set[int], int]]:
    """(name, a call that returns a status, statuses that are right, how many at once)."""
    tokens, text = [7] * (BYTES // 3), "a" * (BYTES - 100)

    def post(path: str, body: Any, **headers: str) -> Callable[[], int]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return lambda: service.post(path, content, **headers)

    for name, long in (("letters", text), ("words", "word " * (BYTES // 5 - 20)), ("lines", "\n" * (BYTES // 2 - 50))):
        yield f"prompt of {name}", post("/v1/completions", {"prompt": long, "max_tokens": 2}), {400}, 4
        yield f"tokenize {name}", post("/tokenize", {"prompt": long}), {400}, 4
    message = [{"role": "user", "content": text}]
    yield "chat", post("/v1/chat/completions", {"messages": message}), {400}, 4
    yield "prompt of tokens", post("/v1/completions", {"prompt": tokens}), {400}, 4
    yield "detokenize", post("/detokenize", {"tokens": tokens}), {400}, 4
    wrong = {"prompt": [1.5] * (BYTES // 5)}
    yield "prompt of fractions", post("/v1/completions", wrong), {422}, 4
    yield "prompt of lists of text", post("/v1/completions", {"prompt": [["a"]] * (BYTES // 8)}), {422}, 4
    yield "stop of numbers", post("/v1/completions", {"prompt": "a", "stop": [1] * (BYTES // 4)}), {422}, 4
    biases = {f"x{at}": 1 for at in range(BYTES // 16)}
    yield "biases", post("/v1/completions", {"prompt": "a", "logit_bias": biases}), {422}, 4
    yield "messages of numbers", post("/v1/chat/completions", {"messages": [1] * (BYTES // 4)}), {422}, 4
    yield "deep JSON", post("/v1/completions", b"[" * BYTES), {400}, 4
    yield "no JSON", post("/v1/completions", b"a" * BYTES), {400}, 4
    yield "a body over the limit", post("/v1/completions", b"a" * (64 << 20)), {413}, 4

    head = b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\n%b\r\n\r\n"
    for host in (b"evil.com", b"localhost.evil.com", b"127.0.0.1.evil.com:8000", b"evil.com\r\nHost: localhost"):
        yield (
            f"Host {host.decode()!r}",
            partial(service.raw, head % (host, b"Content-Length: 0")),
            {400, 403},
            1,
        )
    for name, lines in {
        "two lengths": b"Content-Length: 2\r\nContent-Length: 3",
        "length and chunks": b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        "negative length": b"Content-Length: -1",
        "huge length": b"Content-Length: 99999999999999999999",
        "odd encoding": b"Transfer-Encoding: gzip, chunked",
        "long header": b"X: " + b"a" * 100_000,
    }.items():
        yield (
            name,
            partial(service.raw, head % (b"localhost", lines) + b"{}"),
            {0, 400, 408, 413, 422, 431, 501},
            1,
        )
    half = head % (b"localhost", b"Content-Length: 100") + b"{"
    yield "halves of requests", lambda: service.raw(half, answer=False), {0}, 64
    stream = json.dumps({**GOOD, "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    leaving = head % (b"localhost", b"Content-Type: application/json\r\nContent-Length: %d" % len(stream)) + stream
    yield "clients that leave", lambda: service.raw(leaving), {200}, 8


def main() -> int:
    """Runs the attacks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ckpt", type=Path, default=DEMO)
    given = parser.parse_args()
    service, failures = Service(given.ckpt), 0
    try:
        right, start = service.good(), service.memory_mb()
        limit = start + GROWTH_MB
        for _ in range(given.rounds):
            for name, call, expected, many in attacks(service):
                began = time.monotonic()
                with ThreadPoolExecutor(many) as pool:
                    codes = Counter(pool.map(lambda _, call=call: call(), range(many)))
                seconds, same = time.monotonic() - began, service.good() == right
                good = same and set(codes) <= expected and service.memory_mb() <= limit
                failures += not good
                line = {"attack": name, "statuses": {str(key): n for key, n in codes.items()}, "held": good}
                memory = {"memory_mb": service.memory_mb(), "peak_mb": service.peak_mb()}
                print(json.dumps(line | {"good_answer": same, "seconds": round(seconds, 2)} | memory), flush=True)
            limit = min(limit, service.memory_mb() + ROUND_MB)
        verdict = {"start_mb": start, "end_mb": service.memory_mb(), "peak_mb": service.peak_mb(), "failed": failures}
        print(json.dumps(verdict), flush=True)
    finally:
        service.process.terminate()
        service.process.wait(60)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
