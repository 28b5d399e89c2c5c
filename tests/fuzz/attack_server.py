"""Attacks a running service of the embedded demo model over HTTP; after each one a good request must be answered right.

Usage: python -m tests.fuzz.attack_server [--rounds 2] [--ckpt FOLDER] [--tp N]

Long prompts, four at once (4 MB of text, of tokens, of chat, of lists of a wrong type), names of other hosts, bodies
over the limit with and without their length, a million lists or texts in a body, headers that contradict each other,
requests that stop halfway, more senders that never finish than the service may open files, clients that leave, chats
whose template does not end or takes all memory. The service runs in a folder full of Python files, none of which may be
run, and each of its sockets, and of its ranks', must listen on loopback; at last SIGTERM must end it while a template
is stuck. Prints a JSON line for each attack (status codes, seconds, memory of the service in MB) and a verdict; the
exit code is 1 where a good request was not answered right, a status was not the expected one, or memory grew by more
than 200 MB over that of the start, which four bodies of 4 MB need at once as objects and the heap keeps, or by more
than 60 MB from one round to the next.
"""

import argparse
import ipaddress
import json
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

# The template does what the first message says.
TEMPLATE = """{% set what = messages[0].content %}{% set one = messages|length %}
{% if what == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% elif what == 'step' %}{{ (3 ** (10 ** 9 + one)) % 7 }}
{% elif what == 'text' %}{{ ('a' * (10 ** 11 + one))|length }}
{% elif what == 'list' %}{{ (range(99999)|list * (99998 + one))|length }}
{% else %}{{ what }}{% endif %}"""
DEMO = Path(__file__).resolve().parents[2] / "ptqpipe" / "demo_model"
BYTES = 4_190_000  # just under the default limit of a body
GROWTH_MB, ROUND_MB = 200, 60
FILES = 512  # that the service may open
GOOD = {"prompt": "Return the current value of", "max_tokens": 8, "temperature": 0}


class Service:
    """``ptqpipe serve`` on a free port."""

    def __init__(self, ckpt: Path, tp: int, folder: Path) -> None:
        self.mark, template, traps = folder / "mark", folder / "template.jinja", folder / "traps"
        template.write_text(TEMPLATE)
        traps.mkdir()
        for name in (*sys.stdlib_module_names, "torch", "transformers", "ptqpipe", "sitecustomize"):
            (traps / f"{name}.py").write_text(f"open({str(self.mark)!r}, 'a').write(__name__ + ' ')\n")
        command = [sys.executable, "-P", "-m", "ptqpipe", "serve", str(ckpt.resolve()), "--port", "0", "--workers", "1"]
        command += ["--kv-cache-size", "4MiB", "--chat-template", str(template), "--tp", str(tp), "--drain", "2"]
        self.held: list[socket.socket] = []
        few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=traps, preexec_fn=few)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ready: http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found[1])
                return
        raise SystemExit("the service did not start")

    def listening(self) -> list[str]:
        """The addresses, without ports, at which it and its children listen."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        sockets = [one for process in processes for one in process.net_connections("tcp")]
        return sorted({one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN})

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
        try:
            answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=GOOD, timeout=120)
        except httpx.HTTPError as error:
            return f"<{type(error).__name__}>"
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

    def hold(self, sent: bytes) -> int:
        """Begins the headers of as many requests as the service may have files; 0 once the oldest are late."""
        self.held = [socket.create_connection(("127.0.0.1", self.port), timeout=15) for _ in range(FILES)]
        for one in self.held:
            with suppress(OSError):  # closed already: what came later made room
                one.sendall(sent)
        time.sleep(2)
        return 0


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
    yield "prompt of lists of text", post("/v1/completions", {"prompt": [["a"]] * (BYTES // 8)}), {400}, 4
    yield "prompt of lists", post("/v1/completions", {"prompt": [[1]] * (BYTES // 5)}), {400}, 4
    yield "prompts of nothing", post("/v1/completions", {"prompt": [""] * (BYTES // 4)}), {400}, 4
    yield "messages of nothing", post("/v1/chat/completions", {"messages": [{}] * (BYTES // 4)}), {400}, 4
    yield (
        "lists in fields that nobody reads",
        post("/v1/completions", {"prompt": "a", "x": [[]] * (BYTES // 4)}),
        {400},
        4,
    )
    yield "stop of numbers", post("/v1/completions", {"prompt": "a", "stop": [1] * (BYTES // 4)}), {422}, 4
    biases = {f"x{at}": 1 for at in range(BYTES // 16)}
    yield "biases", post("/v1/completions", {"prompt": "a", "logit_bias": biases}), {400}, 4
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
    yield "senders that never finish", lambda: service.hold(half[:45]), {0}, 1
    stream = json.dumps({**GOOD, "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    leaving = head % (b"localhost", b"Content-Type: application/json\r\nContent-Length: %d" % len(stream)) + stream
    yield "clients that leave", lambda: service.raw(leaving), {200}, 8
    for what in ("loop", "step", "text", "list"):
        body = {"messages": [{"role": "user", "content": what}], "max_tokens": 1}
        yield f"a template's {what}", post("/v1/chat/completions", body), {400}, 1


def ends_while_a_template_is_stuck(service: Service) -> bool:
    """Whether SIGTERM ends the service within its time to drain, and some seconds for the answers' last words."""
    body = {"messages": [{"role": "user", "content": "loop"}]}
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(service.post, "/v1/chat/completions", body)
        time.sleep(1)
        service.process.terminate()
        try:
            service.process.wait(2 + 15)
        except subprocess.TimeoutExpired:
            return False
        chat.exception()  # an error, or a broken connection
    return True


def main() -> int:
    """Runs the attacks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ckpt", type=Path, default=DEMO)
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return attack(Service(given.ckpt, given.tp, Path(folder)), given.rounds)


def attack(service: Service, rounds: int) -> int:
    """Runs the attacks on a service, and ends it. Returns the exit code."""
    failures = 0
    try:
        right, start = service.good(), service.memory_mb()
        limit = start + GROWTH_MB
        for _ in range(rounds):
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
        memory = {"end_mb": service.memory_mb(), "peak_mb": service.peak_mb()}
        addresses, run = service.listening(), service.mark.read_text() if service.mark.exists() else ""
        ended = ends_while_a_template_is_stuck(service)
        failures += any(not ipaddress.ip_address(one).is_loopback for one in addresses) + bool(run) + (not ended)
        print(json.dumps({"listens": addresses, "files_run": run, "ends_while_stuck": ended}), flush=True)
        verdict = {"start_mb": start, **memory, "failed": failures}
        print(json.dumps(verdict), flush=True)
    finally:
        service.process.kill()
        service.process.wait(60)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
