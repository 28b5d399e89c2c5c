"""convert --push against a stand-in of the hub's HTTP API on this machine: what arrives, and how failures end."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import CliRunner, Result

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import AlreadyComplete
from tests.hub import Hub
from tests.tiny import bytes_of, llama, save


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("push") / "tiny", llama())


def convert(source: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["convert", str(source), "-o", str(out), "-q", "--push", "owner/tiny", *more])


def test_every_file_of_the_checkpoint_arrives(hub: Hub, source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert f"uploaded to {hub.address}/owner/tiny" in done.output
    assert hub.files == bytes_of(tmp_path / "out")
    assert all(call.endswith("Bearer hf_secret") for call in hub.calls if "/api/repos" in call or "/commit/" in call)
    assert "hf_secret" not in done.output


def test_python_uploads_as_the_command_does(hub: Hub, source: Path, tmp_path: Path) -> None:
    done = ptqpipe.convert(source, format="fp8", out=tmp_path / "out", push="owner/tiny")
    assert done.facts["uploaded to"] == f"{hub.address}/owner/tiny"
    assert hub.files == bytes_of(tmp_path / "out")


@pytest.mark.parametrize("more", [(), ("--budget", "9bits")])
def test_what_is_complete_already_is_uploaded_by_a_resumed_call(
    hub: Hub, source: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The command, then Python; without --push nothing is uploaded."""
    out = tmp_path / "out"
    words = ["convert", str(source), "-o", str(out), *more]
    assert CliRunner().invoke(main, [*words, "-q"]).exit_code == 0
    plain = CliRunner().invoke(main, [*words, "--resume"])
    assert plain.output.endswith("is already complete, by this very run; nothing is left to do\n")
    assert hub.files == {}
    done = convert(source, out, *more, "--resume")
    assert done.exit_code == 0, done.output
    said = f"already complete, by this very run; nothing is left to do; uploaded to {hub.address}/owner/tiny"
    assert said in done.output
    assert hub.files == bytes_of(out)
    hub.files.clear()
    budget = {"budget": "9bits"} if more else {}
    with pytest.raises(AlreadyComplete, match="; uploaded to"):
        ptqpipe.convert(source, out=out, push="owner/tiny", resume=True, **budget)
    assert hub.files == bytes_of(out)


@pytest.mark.parametrize(("status", "words"), [(401, "token is not valid"), (403, "may not write"), (500, "500")])
@pytest.mark.usefixtures("no_waiting")
def test_a_refusal_is_one_line_and_the_checkpoint_stays(
    hub: Hub, source: Path, tmp_path: Path, status: int, words: str
) -> None:
    hub.refuse = status
    done = convert(source, tmp_path / "out")
    assert done.exit_code == 1, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert words in line
    assert f"push it again with: hf upload owner/tiny {tmp_path / 'out'}" in line
    assert (tmp_path / "out" / "ptqpipe.json").is_file()


@pytest.mark.usefixtures("no_waiting")
def test_a_hub_that_is_not_there_is_one_line(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    done = convert(source, tmp_path / "out")
    assert done.exit_code == 1, done.output
    assert "the hub was not reached" in done.output
    assert (tmp_path / "out" / "ptqpipe.json").is_file()


@pytest.mark.parametrize(
    ("repo", "token", "offline", "words"),
    [
        ("owner/tiny", "", False, "needs a token"),
        ("tiny", "x", False, "expected owner/name"),
        ("a/b/c", "x", False, "expected owner/name"),
        ("owner/tiny", "x", True, "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: str, token: str, offline: bool, words: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token or None)
    done = convert(source, tmp_path / "out", "--push", repo)
    assert done.exit_code == 2
    assert words in done.output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("stale", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "old.bin"])
def test_weights_of_another_model_do_not_stay_beside_the_checkpoint(
    hub: Hub, source: Path, tmp_path: Path, stale: str
) -> None:
    """vLLM and transformers go by an index that is there, and load every shard that they find."""
    hub.files[stale] = b"another model's"
    done = convert(source, tmp_path / "out")
    assert done.exit_code == 1, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert f"'owner/tiny' has weights that are not of this checkpoint, '{stale}' for one" in line
    assert f"push it again with: hf upload owner/tiny {tmp_path / 'out'}" in line
    assert list(hub.files) == [stale]
    del hub.files[stale]
    hub.files["README.md"] = hub.files["model.safetensors"] = b"of an earlier upload"
    assert convert(source, tmp_path / "out", "--overwrite").exit_code == 0
    assert hub.files == bytes_of(tmp_path / "out")
