"""Claims about what can be reached from outside: every socket on which a command listens, from the kernel's tables."""

import ipaddress
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import ptqpipe
from ptqpipe.run import processes
from ptqpipe.serving.command import serving
from ptqpipe.serving.options import ServeOptions
from tests.serving.engine.models import DEMO
from tests.serving.server.test_processes import started

pytestmark = [
    pytest.mark.usefixtures("forks"),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc/net"),
]
LISTENS = "0A"


def addresses(pid: int) -> set[str]:
    """The addresses at which a process and its descendants listen by TCP."""
    found = set()
    with suppress(psutil.Error, OSError):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            inodes = set()
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == LISTENS and words[9] in inodes:
                        found.add(address_of(words[1].partition(":")[0]))
    return found


def address_of(digits: str) -> str:
    """An address of /proc/net/tcp or tcp6: words of 32 bits in this machine's order."""
    raw = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    return str(ipaddress.ip_address(raw))


def is_loopback(address: str) -> bool:
    """Also for IPv4 in IPv6."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@contextmanager
def watched(*pids: int) -> Iterator[set[str]]:
    """The addresses at which processes listen at any time of the block."""
    found: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for pid in pids:
                found.update(addresses(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def test_a_socket_of_every_address_is_seen() -> None:
    """Else the tests below could not fail."""
    before = addresses(os.getpid())
    with socket.create_server(("", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert {"0.0.0.0", "::"} - before <= addresses(os.getpid())
        assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1")))
    assert is_loopback("::ffff:127.0.0.1")
    assert is_loopback("::1")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--tp", "2", "--allreduce", "int8")], ids=["one rank", "two ranks"])
def test_a_service_and_its_ranks_are_reached_on_loopback_alone(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user's environment names another interface, for ranks on other machines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with started(tmp_path, *options) as service, watched(service.process.pid) as found:
        assert service.ask().status_code == 200
        assert addresses(service.process.pid)
        folders = {
            Path(word).parents[1]
            for pid in service.ranks()
            for word in psutil.Process(pid).cmdline()
            if "ptqpipe-ranks-" in word
        }
        assert len(folders) == bool(options)
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    assert all(map(is_loopback, found)), found
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_the_service_of_the_python_api_is_reached_on_loopback_alone() -> None:
    with watched(os.getpid()) as found, ptqpipe.serve(DEMO, workers=1):
        pass
    assert found
    assert all(map(is_loopback, found)), found


def test_the_service_behind_a_chat_in_the_terminal_is_reached_on_loopback_alone() -> None:
    with watched(os.getpid()) as found, serving(ServeOptions(str(DEMO), port=0, workers=1), log=lambda line: None):
        pass
    assert found
    assert all(map(is_loopback, found)), found


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_of_a_launcher_without_a_store_are_reached_at_its_address_alone(host: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "ptqpipe", "convert", str(DEMO), "-o", str(tmp_path / "out"), "-q"]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=DEMO.parents[1], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    with watched(*(rank.pid for rank in ranks)) as found:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert found
    assert all(map(is_loopback, found)), found


def test_a_name_that_is_loopback_here_alone_does_not_shut_out_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has the machine's own name."""
    mine = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: mine)
    assert processes._listening("this-machine", 0) is None
    descriptor = processes._listening("127.0.1.1", 0)
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as listening:
        assert listening.getsockname()[0] == "127.0.1.1"


def test_an_address_that_this_machine_does_not_have_is_no_restriction() -> None:
    assert processes._listening("203.0.113.1", 0) is None
