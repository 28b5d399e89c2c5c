"""Claims about ptqpipe.checkpoint.hub: what a user may name as a model, and what is said when it will not do."""

import sys
from pathlib import Path

import pytest

from ptqpipe.checkpoint.hub import check_disjoint, resolve_source
from ptqpipe.errors import CheckpointError, PtqError, UsageError
from tests.checkpoint.builders import one_line, u8_file


def refused(model: str | Path, kind: type[PtqError], *, revision: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        resolve_source(str(model), revision=revision)
    return one_line(caught.value)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    u8_file(tmp_path / "model.safetensors", "a")
    assert resolve_source(str(tmp_path)) == tmp_path


def test_folders_that_will_not_do(tmp_path: Path) -> None:
    assert "has nothing" in refused(tmp_path, CheckpointError)
    (tmp_path / "README.md").touch()
    assert "has 1 other files" in refused(tmp_path, CheckpointError)
    (tmp_path / "pytorch_model.bin").touch()
    assert "save_pretrained() it" in refused(tmp_path, CheckpointError)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in refused(tmp_path, CheckpointError)
    assert "is a file" in refused(tmp_path / "README.md", UsageError)
    assert "no revision" in refused(tmp_path, UsageError, revision="main")


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "../x", "what is this", "", "a//b"])
def test_paths_that_are_not_there_are_not_taken_for_hub_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    if name == "":
        assert "is empty" in refused(name, UsageError)
    else:
        assert "does not exist" in refused(name, UsageError)


def test_a_missing_hub_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'ptqpipe[hf]'" in refused("owner/model", UsageError)


def test_offline_and_not_in_the_cache_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE" in refused("some-owner/no-such-model", UsageError)


def test_a_snapshot_in_the_hub_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    commit = "0" * 40
    snapshot = tmp_path / "models--owner--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    u8_file(snapshot / "model.safetensors", "a")
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text(commit)
    download = hub.snapshot_download
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *a, **k: download(*a, **k, cache_dir=tmp_path, local_files_only=True)
    )
    assert resolve_source("owner/model") == snapshot
    assert resolve_source("owner/model", revision=commit) == snapshot
    assert "neither a local folder nor" in refused("owner/model", UsageError, revision="other")


def test_output_and_source_may_not_overlap(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (tmp_path / "link").symlink_to("model")
    for out in (source, source / "out", tmp_path, tmp_path / "link" / "out"):
        with pytest.raises(UsageError, match="overlap"):
            check_disjoint(source, out)
    check_disjoint(source, tmp_path / "model-NVFP4A16")
