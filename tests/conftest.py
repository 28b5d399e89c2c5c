"""What all tests share: the assets outside the repository, and no network."""

import functools
import gc
import getpass
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import quick_disk, template

# Before any test imports huggingface_hub or transformers, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"
quick_disk.install()  # before ptqpipe is imported
# No test speaks TLS, and each client of HTTP would read all root certificates for it: 25 ms of a core.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# The same examples in every run, however long a busy machine takes to draw them.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

# Whoever starts the tests in the background of a shell has SIGINT ignored, and processes that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

_REPOSITORY = Path(__file__).resolve().parent.parent


def shared_folder() -> Path:
    """Where the shared assets would be."""
    return Path(os.environ.get("PTQPIPE_SHARED", _REPOSITORY.parent / "shared"))


def published_folder() -> Path:
    """Where the models that scripts/fetch_models.py writes would be."""
    return Path(os.environ.get("PTQPIPE_MODELS", shared_folder().resolve().parent / "real"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What all tests import stays for good: to look through it for garbage again and again took 6 of 20 CPU-seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked ``shared`` or ``published`` where that folder is not."""
    missing = {
        "shared": (shared_folder(), "shared assets", "PTQPIPE_SHARED"),
        "published": (published_folder(), "models of scripts/fetch_models.py", "PTQPIPE_MODELS"),
    }
    for name, (folder, what, variable) in missing.items():
        if folder.is_dir():
            continue
        skip = pytest.mark.skip(reason=f"no {what} at {folder} ({variable} names another place)")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with ``golden/`` and ``assets/``; the test is skipped where there is none."""
    path = shared_folder()
    if not path.is_dir():
        pytest.skip(f"no shared assets at {path} (PTQPIPE_SHARED names another place)")
    return path


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_go_with_the_tests_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torchrun and Chromium leave theirs behind; pytest keeps the folders of its last three runs alone.

    The C++ that torch.compile makes stays where torch keeps it, for the next run.
    """
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _numbers_without_a_seed_do_not_depend_on_the_tests_before() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def template_of_forks() -> Callable[..., None]:
    """What starts processes by forks of one that has the libraries, which is started for this."""
    return template.begin()


@pytest.fixture
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the test starts this interpreter, it gets a fork with the libraries imported: 1 s of a core, not 3 to 8.

    Not for claims about what a process imports, how much memory it takes, or an end while it starts; nor where a test
    is marked ``interpreter``. What libraries set in the environment when a test imports them (lm_eval and scikit-learn
    do) is not there: it would take effect only in an interpreter of its own, which every later test would get.
    """
    if request.node.get_closest_marker("interpreter") is None:
        for name in template.read_once(os.environ).keys() - template.SETTLED.keys():
            monkeypatch.delenv(name)
        monkeypatch.setattr(subprocess.Popen, "_execute_child", request.getfixturevalue("template_of_forks"))


@pytest.fixture(autouse=True)
def _signal_handlers_and_working_folder_stay() -> Iterator[None]:
    """What a test leaves of them reaches every later test of its process, and their children."""
    before, folder = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, os.getcwd()
    yield
    assert {number: signal.getsignal(number) for number in before} == before
    assert os.getcwd() == folder
