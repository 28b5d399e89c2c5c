"""Claims about loading: how far it is, in bytes of weights, and that Ctrl-C ends it at once."""

import gc
import os
import signal
import threading
import time

import pytest

from ptqpipe.errors import PtqError
from ptqpipe.models.source import Source
from ptqpipe.runtime import load
from ptqpipe.runtime.fill import watched
from ptqpipe.serving.engine.service import Service, State
from ptqpipe.serving.facts import LINE_S, LoadingBar, facts_of, heading, instructions
from ptqpipe.serving.server.uvicorn_server import bind, run
from tests.serving.engine.models import DEMO


def test_every_byte_of_the_weights_is_counted_once() -> None:
    seen: list[tuple[int, int]] = []
    with watched(lambda done, total: seen.append((done, total))):
        load(DEMO, dtype="float32")
    with Source.open(DEMO) as source:
        total = sum(entry.nbytes for entry in source.reader.entries.values())
        count = len(source.reader.entries)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) == 1 + count
    load(DEMO, dtype="float32")
    assert len(seen) == 1 + count


def test_who_is_told_may_end_the_loading() -> None:
    def enough(done: int, total: int) -> None:
        if done > total / 2:
            raise PtqError("enough")

    with watched(enough), pytest.raises(PtqError, match="enough"):
        load(DEMO, dtype="float32")


def test_without_a_terminal_there_are_few_lines() -> None:
    lines: list[str] = []
    now = [0.0]
    with LoadingBar(lines.append, terminal=False, clock=lambda: now[0]) as bar:
        for step in range(101):
            now[0] = step * LINE_S / 25
            bar(step * 10**7, 10**9)
    assert lines == [f"loading ... {part} % of 1.00 GB" for part in (25, 50, 75, 100)]


def test_on_a_terminal_there_is_a_bar_that_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingBar(lambda line: None, terminal=True) as bar:
        bar(0, 10**9)
        time.sleep(0.12)  # tqdm draws ten times a second
        bar(4 * 10**8, 10**9)
    said = capsys.readouterr().err
    assert "loading:  40% ████" in said
    assert "400 MB/1.00 GB" in said
    assert said.rpartition("\r")[2].strip() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_gives_it_up_and_speaks_of_no_sequences(number: signal.Signals) -> None:
    handled, lines = threading.Event(), []

    class Ended(threading.Event):
        """The service's, which the server waits for once the handlers of signals are there."""

        def wait(self, timeout: float | None = None) -> bool:
            handled.set()
            return super().wait(timeout)

    def build() -> None:
        while service.state is State.LOADING:
            time.sleep(0.01)
        raise PtqError("the loading was given up")

    def kill() -> None:
        assert handled.wait(60)
        os.kill(os.getpid(), number)

    async def app(scope: object, receive: object, send: object) -> None:
        """Is never asked."""

    service = Service(build, max_queue=1)  # type: ignore[arg-type]
    service.ended = Ended()
    threading.Thread(target=kill).start()
    service.start()
    with bind("127.0.0.1", 0) as listening:  # who waited for the deadline would wait longer than any test may take
        run(app, service, listening, host="127.0.0.1", drain_s=1e5, log=lines.append)
    assert lines == [f"{number.name}: loading is given up"]
    assert service.state is State.STOPPED
    assert gc.get_freeze_count() == 0  # what is frozen at the end leaks, and libraries of C++ count what leaks


def test_the_first_lines_say_what_is_served_and_how_to_ask() -> None:
    facts = facts_of(str(DEMO))
    with Source.open(DEMO) as source:
        nbytes = sum(entry.nbytes for entry in source.reader.entries.values())
    assert (facts["weights_bytes"], facts["bits_per_weight"]) == (nbytes, None)
    assert heading("demo", facts).startswith(f"serving demo: {facts['architecture']}, {facts['formats'][0]}, ")
    chat = instructions("http://127.0.0.1:8000", chats=True, key=True)
    assert any("/v1/chat/completions" in line and "Bearer $PTQPIPE_API_KEY" in line for line in chat)
    plain = instructions("http://127.0.0.1:8000", chats=False, key=False)
    assert any("curl http://127.0.0.1:8000/v1/completions " in line and "Bearer" not in line for line in plain)
    assert "stop: Ctrl-C" in plain[-1]
