"""Claims about names on the hub: every command takes them, and what the hub refuses or breaks off is a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import CliRunner, Result

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import UsageError
from ptqpipe.pipeline.demo import MODEL
from tests.hub import COMMIT, TOKEN, Hub
from tests.tiny import bytes_of

FLOATS, PACKED = "owner/floats", "owner/packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ptqpipe.convert(MODEL, format="fp8", out=tmp_path_factory.mktemp("hub") / "packed", workers=1).path)


@pytest.fixture
def known(hub: Hub, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with a model and a checkpoint; the working folder holds a text alone."""
    hub.models |= {FLOATS: Path(MODEL), PACKED: packed}
    work = tmp_path / "work"
    work.mkdir()
    rows = [json.dumps({"input_ids": [(7 * row + at) % 500 for at in range(32)]}) for row in range(40)]
    (work / "text.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(work)
    return hub


def run(line: str) -> Result:
    return CliRunner().invoke(main, line.split())


SMALL = "--samples 8 --seqlen 16"
CALLS = [
    (f"convert {FLOATS} -q", {FLOATS}),
    (f"convert {FLOATS} -q --data text.jsonl --quality fast {SMALL}", {FLOATS}),
    (f"calibrate {FLOATS} --data text.jsonl {SMALL} -o stats -q", {FLOATS}),
    (f"generate {FLOATS} {SMALL} -o own.jsonl -q", {FLOATS}),
    (f"tune {FLOATS} --data text.jsonl {SMALL} --method layerwise -o codes -q", {FLOATS}),
    (f"plan {FLOATS} --budget 6bits -o recipe.yaml -q", {FLOATS}),
    (f"transform {FLOATS} --transforms rotate --untie -o rotated -q", {FLOATS}),
    (f"verify {PACKED} --source {FLOATS} -q", {PACKED, FLOATS}),
    (f"inspect {PACKED}", {PACKED}),
    (f"diff {PACKED} {FLOATS}", {PACKED, FLOATS}),
    (f"report {PACKED} --source {FLOATS} -q", {PACKED, FLOATS}),
    (f"eval {PACKED} --source {FLOATS} --data text.jsonl --seqlen 16 -q --cache-size 0", {PACKED, FLOATS}),
    (f"relayout {PACKED} --container ptqpipe -q", {PACKED}),
    (f"dequantize {PACKED} -q", {PACKED}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "named"), CALLS, ids=[line.split(" -")[0] for line, _ in CALLS])
def test_every_command_fetches_what_is_named(known: Hub, line: str, named: set[str]) -> None:
    done = run(line)
    assert done.exit_code == (1 if line.startswith("diff") else 0), done.output
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit)
    weights = {place.rpartition("/")[0] for place, _ in known.sent if place.endswith(".safetensors")}
    assert weights == named
    assert not known.leaked, "the token of the hub went to another host"
    assert TOKEN not in done.output


@pytest.mark.slow
def test_a_service_fetches_what_is_named(known: Hub, tmp_path: Path) -> None:
    """As a process of its own, which knows the hub by the environment alone."""
    home = {"HF_ENDPOINT": known.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **home, "HF_HUB_DISABLE_XET": "1"}
    call = [sys.executable, "-m", "ptqpipe", "serve", PACKED, "--port", "0", "--workers", "1"]
    served = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=environment)
    assert served.stderr is not None
    lines = []
    for line in served.stderr:
        lines.append(line)
        if "ready" in line:
            break
    served.terminate()
    served.communicate(timeout=120)
    assert "ready" in lines[-1], lines
    assert any(place.startswith(PACKED) for place, _ in known.sent)


def test_a_talk_fetches_what_is_named(known: Hub) -> None:
    talked = CliRunner().invoke(main, ["chat", PACKED, "--max-tokens", "4", "--workers", "1"], input="Once upon")
    assert any(place.startswith(PACKED) for place, _ in known.sent)
    assert talked.exit_code == 0 or "chat template" in talked.stderr, talked.output


def test_python_fetches_by_name_and_a_second_time_nothing(known: Hub, packed: Path) -> None:
    assert ptqpipe.verify(PACKED).path is not None
    sent = len(known.sent)
    assert sent == len(bytes_of(packed))
    ptqpipe.inspect(PACKED)
    assert len(known.sent) == sent


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("owner/absent", TOKEN, "nor a model on the hub that your token may see; check the name"),
        ("owner/absent", "", "a private one needs HF_TOKEN"),
        (FLOATS, "", "is gated on the hub: ask for access on its page, and set HF_TOKEN"),
        (FLOATS, "hf_another", "is gated on the hub: ask for access"),
        ("./txt.jsonl", TOKEN, "is not a hub name"),
    ],
)
def test_what_is_absent_or_gated_is_a_line(
    known: Hub, monkeypatch: pytest.MonkeyPatch, name: str, token: str, words: str
) -> None:
    known.gated.add(FLOATS)
    monkeypatch.setenv("HF_TOKEN", token)
    for call in (f"convert {name} -o out", f"verify {PACKED} --source {name}", f"eval {PACKED} --source {name}"):
        done = run(call)
        assert done.exit_code == 2, done.output
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
        assert words in line
        assert {path.name for path in Path().iterdir()} == {"text.jsonl"}


def test_a_gated_model_comes_with_the_token(known: Hub) -> None:
    known.gated.add(FLOATS)
    assert run(f"convert {FLOATS} -o out -q").exit_code == 0


def test_a_revision_that_is_not_there_is_a_line(known: Hub) -> None:
    from ptqpipe.checkpoint import resolve_source

    assert resolve_source(FLOATS, revision=COMMIT).name == COMMIT
    with pytest.raises(UsageError, match=r"cannot be fetched from the hub: .*check the name and access"):
        resolve_source(FLOATS, revision="absent")


@pytest.mark.usefixtures("no_waiting")
def test_a_download_that_breaks_off_goes_on_where_it_stopped(known: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what is written at once
    known.breaks = 1
    done = run(f"convert {FLOATS} -o out -q")
    assert done.exit_code == 0, done.output
    starts = [first for place, first in known.sent if place.endswith(".safetensors")]
    assert starts[0] == 0
    assert starts[1] > 0
    whole = ptqpipe.convert(MODEL, out="whole", workers=1)
    assert bytes_of(Path("out"))["model.safetensors"] == bytes_of(Path(whole.path))["model.safetensors"]


@pytest.mark.usefixtures("no_waiting")
def test_a_download_that_never_ends_is_a_line_and_the_next_call_fetches_what_is_missing(
    known: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    known.breaks = 1000
    done = run(f"convert {FLOATS} -o out -q")
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert line.startswith(f"Error: '{FLOATS}' was not fetched to its end (")
    assert not Path("out").exists()
    known.breaks = 0
    known.sent.clear()
    assert run(f"convert {FLOATS} -o out -q").exit_code == 0
    assert [place for place, _ in known.sent] == [f"{FLOATS}/model.safetensors"]


@pytest.mark.usefixtures("no_waiting")
def test_a_hub_that_fails_or_is_not_there_is_a_line(known: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    known.refuse = 500
    assert "is not in the hub's cache, and the hub answered 500; try again later" in run(f"inspect {PACKED}").stderr
    known.refuse = 401
    assert "HF_TOKEN or" in run(f"inspect {PACKED}").stderr
    known.refuse = 0
    assert run(f"inspect {PACKED}").exit_code == 0
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert run(f"inspect {PACKED}").exit_code == 0  # from the cache
    assert "the hub was not reached" in run(f"inspect {FLOATS}").stderr
