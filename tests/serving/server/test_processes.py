"""``ptqpipe serve`` as a process: ranks, signals, deaths."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.cli import main
from tests.serving.engine.models import DEMO, PROMPTS, greedy, has_one_order, tokenizer
from tests.serving.server.test_api import text

BODY = {"prompt": PROMPTS[2], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
START_S = 240
pytestmark = pytest.mark.usefixtures("forks")


@dataclass(frozen=True, slots=True)
class Process:
    """A running service and the file of its messages."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def ask(self, **more: object) -> httpx.Response:
        """One completion."""
        return httpx.post(f"{self.url}/v1/completions", json={**BODY, **more}, timeout=60)

    def metrics(self) -> str:
        """What /metrics answers."""
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def ranks(self) -> list[int]:
        """Process ids of the other ranks."""
        children = psutil.Process(self.process.pid).children()  # one renders chat templates
        return [child.pid for child in children if "--rank-of" in child.cmdline()]

    def ended(self, seconds: float = 120) -> int:
        """The exit code."""
        return self.process.wait(seconds)


@contextmanager
def started(
    folder: Path,
    *options: str,
    model: Path = DEMO,
    command: tuple[str, ...] = ("-m", "ptqpipe"),
    path: tuple[Path, ...] = (),
) -> Iterator[Process]:
    """``ptqpipe serve`` of a model in float32, ready. ``path``: where Python looks for modules first."""
    log = folder / "log"
    arguments = ["serve", str(model), "--port", "0", "--dtype", "float32", *options]
    python_path = os.pathsep.join(map(str, (*path, DEMO.parents[1])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *command, *arguments], stderr=out, stdout=out, env=environment)
    try:
        until = time.monotonic() + START_S
        while (match := re.search(r"ready: (http://\S+)/v1", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Process(process, match[1], log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wanted(count: int = 24) -> str:
    return text(greedy(tokenizer()(PROMPTS[2]).input_ids, count))


def gone(pids: list[int], seconds: float = 60) -> bool:
    """Whether they end soon. One that has ended stays in sight until its new parent asks for its exit code."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(map(runs, pids)):
            return True
        time.sleep(0.05)
    return False


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["off", "int8"])
def test_sums_may_have_a_group_of_their_own(tmp_path: Path, sums: str) -> None:
    """As on GPUs, with gloo in NCCL's place, in both processes."""
    code = "import torch.distributed as dist\nfrom ptqpipe.serving.rank_processes import Place\n"
    code += "Place.group_of_sums = lambda self, device: dist.new_group(backend='gloo')\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    options = ("--tp", "2", "--allreduce", sums, "--no-overlap")
    with started(tmp_path, *options, path=(tmp_path,)) as service:
        assert service.ask().json()["choices"][0]["text"] == wanted()
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 0, service.log.read_text()


@pytest.mark.slow
def test_sigterm_finishes_what_is_under_way_and_exits_with_0(tmp_path: Path) -> None:
    with started(tmp_path) as service:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(service.ask(prompt="def", max_tokens=240)))
        thread.start()
        while 'vllm:num_requests_running{model_name="demo_model"} 1.0' not in service.metrics() and not answers:
            time.sleep(0.002)
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 0, service.log.read_text()
        thread.join(60)
        assert answers[0].json()["usage"]["completion_tokens"] == 240
        assert "SIGTERM: no new requests" in service.log.read_text()
        assert "Traceback" not in service.log.read_text()


@pytest.mark.slow
@pytest.mark.interpreter
def test_two_ranks_say_what_one_says_and_end_together(tmp_path: Path) -> None:
    with started(tmp_path, "--tp", "2") as service:
        ranks = service.ranks()
        assert len(ranks) == 1
        assert service.ask().json()["choices"][0]["text"] == wanted()
        metrics = service.metrics()
        plain = re.search(r'ptqpipe_allreduce_calls_total{kind="plain"} (\d+)', metrics)
        assert plain is not None
        assert int(plain[1]) == 6 * (24 + 4)  # two sums in each of three layers; 24 steps and four probes
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 0, service.log.read_text()
        assert gone(ranks)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_packed_model_says_on_any_number_of_ranks_what_transformers_says(
    ranks: int, tmp_path: Path, shared_dir: Path
) -> None:
    """bench-4m in NVFP4, split with plain sums; transformers' own generate on its decoded weights."""
    packed = ptqpipe.convert(shared_dir / "assets/models/bench-4m/hf", format="nvfp4", out=tmp_path / "nvfp4").out
    prompts = (PROMPTS[0], PROMPTS[2], "The castle was built in", "1", "In the beginning of the war , the ship " * 6)
    with started(tmp_path, "--tp", str(ranks), "--allreduce", "off", model=packed) as service:
        answer = service.ask(prompt=list(prompts), max_tokens=24).json()
    said = {choice["index"]: choice["text"] for choice in answer["choices"]}
    encode = tokenizer(packed)
    for index, prompt in enumerate(prompts):
        ids = greedy(encode(prompt).input_ids, 24, path=packed)
        assert said[index] == encode.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.slow
@pytest.mark.skipif(not has_one_order(), reason="this machine has no products of bfloat16, or a faster way")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_invariant_service_says_the_same_to_the_bit_under_load(ranks: int, tmp_path: Path) -> None:
    packed = ptqpipe.convert(DEMO, format="nvfp4", out=tmp_path / "nvfp4").out
    more = {"max_tokens": 32, "logprobs": 3}
    options = ("--tp", str(ranks), "--dtype", "bfloat16", "--batch-invariant", "--max-batch-tokens", "64")
    with started(tmp_path, *options, model=packed) as service:
        alone = [service.ask(prompt=prompt, **more).json()["choices"][0]["logprobs"] for prompt in PROMPTS]
        with ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(lambda at: service.ask(prompt=PROMPTS[at % len(PROMPTS)], **more).json(), range(30))
            )
    for at, answer in enumerate(answers):
        assert answer["choices"][0]["logprobs"] == alone[at % len(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_dies_ends_the_service_with_its_name(tmp_path: Path, busy: bool) -> None:
    def ask_on() -> None:
        with suppress(httpx.TransportError):  # the service has ended
            while service.ask(prompt="def", max_tokens=240).status_code == 200:
                pass

    with started(tmp_path, "--tp", "2", "--allreduce", "int8", "--max-num-seqs", "4") as service:
        (rank,) = service.ranks()
        assert service.ask().status_code == 200
        metrics = service.metrics()
        assert 'ptqpipe_allreduce_calls_total{kind="quantized"} 6.0' in metrics  # the prompt's; decode stays plain
        asking = threading.Thread(target=ask_on)
        if busy:
            asking.start()
            while 'vllm:num_requests_running{model_name="demo_model"} 1.0' not in service.metrics():
                time.sleep(0.002)
        os.kill(rank, signal.SIGKILL)
        assert service.ended() == 1, service.log.read_text()
        assert f"rank 1 (process {rank}) was killed by signal 9" in service.log.read_text()
        if busy:
            asking.join(60)


@pytest.mark.slow
def test_ranks_end_when_the_first_one_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "--tp", "2") as service:
        ranks = service.ranks()
        service.process.kill()
        service.ended()
        assert gone(ranks)


@pytest.mark.slow
def test_half_requests_neither_use_up_the_files_nor_keep_the_service_from_ending(tmp_path: Path) -> None:
    code = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    code += "runpy.run_module('ptqpipe', run_name='__main__', alter_sys=True)"
    with started(tmp_path, command=("-c", code)) as service:
        port = int(service.url.rpartition(":")[2])
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        slow: list[socket.socket] = []
        for _ in range(400):
            slow.append(socket.create_connection(("127.0.0.1", port)))
            if len(slow) % 8 == 0:  # half of what the kernel holds for it: one more would wait a second to try again
                time.sleep(0.03)
        for one in slow:
            with suppress(OSError):  # closed already
                one.sendall(half)
        for _ in range(3):  # what begins to arrive has a second even at the limit
            until = time.monotonic() + 60
            while (answer := service.ask()).status_code == 503 and time.monotonic() < until:
                time.sleep(float(answer.headers["retry-after"]))
            assert answer.json()["choices"][0]["text"] == wanted()
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 0, service.log.read_text()
        log = service.log.read_text()
        assert "Traceback" not in log
        assert "CancelledError" not in log
        assert "socket.accept()" not in log
        for one in slow:
            one.close()


@pytest.mark.slow
def test_bodies_that_are_refused_do_not_stay_in_memory(tmp_path: Path) -> None:
    with started(tmp_path) as service:
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"prompt": "a", "logit_bias": {f"{at:030}x": 1 for at in range(100_000)}}).encode()

        def resident_mb(times: int) -> int:
            for _ in range(times):
                found = httpx.post(f"{service.url}/v1/completions", content=body, headers=headers, timeout=60)
                assert found.status_code == 422
            status = Path(f"/proc/{service.process.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) // 1000

        before = resident_mb(4)
        assert resident_mb(6) - before < 60  # of 6 bodies of 4 MB, which are many times that as objects


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_is_stopped_ends_the_service_with_its_name(tmp_path: Path, busy: bool) -> None:
    """After 3 s in the place of 10, which tests/serving/test_watchdog.py counts."""
    code = "import runpy, ptqpipe.serving.watchdog as w; w.STOPPED_S = 3.0; "
    code += "runpy.run_module('ptqpipe', run_name='__main__', alter_sys=True)"
    with started(tmp_path, "--tp", "2", command=("-c", code)) as service:
        (rank,) = service.ranks()
        os.kill(rank, signal.SIGSTOP)
        if busy:
            assert service.ask().status_code == 503
        assert service.ended() == 1, service.log.read_text()
        assert f"rank 1 (process {rank}) has been stopped for 3 s" in service.log.read_text()
        assert "Traceback" not in service.log.read_text()
        assert gone([rank])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-overlap",)])
def test_a_rank_that_does_not_answer_ends_the_service_with_its_name(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With 5 s in the place of 60; that the rank is stopped must not be seen first."""
    code = "import runpy, ptqpipe.serving.watchdog as w; w.STOPPED_S = 1e9; "
    code += "w.Watchdog.__init__.__kwdefaults__['wait_s'] = 5.0; "
    code += "runpy.run_module('ptqpipe', run_name='__main__', alter_sys=True)"
    with started(tmp_path, "--tp", "2", *options, command=("-c", code)) as service:
        (rank,) = service.ranks()
        assert service.ask().status_code == 200
        os.kill(rank, signal.SIGSTOP)
        assert service.ask(prompt=PROMPTS[0]).status_code == 503
        assert service.ended() == 1, service.log.read_text()
        assert f"rank 1 (process {rank}) has not answered for 5 s;" in service.log.read_text()
        assert "Traceback" not in service.log.read_text()
        assert gone([rank])


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_ranks_end_when_the_first_one_is_killed_while_they_start(tmp_path: Path, after_s: float) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEMO.parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "ptqpipe", "serve", str(DEMO), "--port", "0", "--tp", "2"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    service = Process(process, "", tmp_path)
    while not (ranks := service.ranks()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(after_s)
    process.kill()
    process.wait()
    assert gone(ranks)


@pytest.mark.slow
def test_torchruns_ranks_are_joined(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ptqpipe")
    with started(tmp_path, "--allreduce", "auto", command=command) as service:
        assert service.ask().json()["choices"][0]["text"] == wanted()
        service.process.send_signal(signal.SIGTERM)
        service.ended()
        assert "Traceback" not in service.log.read_text().split("SIGTERM")[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere"], "does not exist"),
        ([str(DEMO), "--max-model-len", "100000"], "this model can 256"),
        ([str(DEMO), "--max-num-seqs", "0"], "--max-num-seqs 0 is out of range"),
        ([str(DEMO), "--tp", "0"], "--tp is 0"),
        ([str(DEMO), "--batch-invariant", "--allreduce", "int8"], "--batch-invariant needs --dtype bfloat16"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_process_that_cannot_listen_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ptqpipe", "serve", "--port", "0", str(DEMO), "--host", "203.0.113.1"],
        capture_output=True, text=True, timeout=120, check=False, cwd=DEMO.parents[1],
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot listen" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
