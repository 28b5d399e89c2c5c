"""Claims about ptqpipe.checkpoint.fingerprint: copies are the same model, changes are seen, little is read."""

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint.fingerprint import BYTES_PER_PAGE, LEAST_PAGES, OF_WEIGHTS, PAGE, pages
from ptqpipe.checkpoint.header import FileHeader, TensorEntry, parse_file
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import CheckpointError
from tests.checkpoint.builders import index_file


def fingerprint(folder: Path) -> str:
    with CheckpointReader.open(folder) as reader:
        return reader.fingerprint()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 64), "norm": (64,), "up": (128, 64), "empty": (0, 3), "down": (64, 128), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Two shards, an index, two configs."""
    folder.mkdir(parents=True)
    made = tensors(seed)
    for file, names in (("x.safetensors", ("embed", "norm", "empty")), ("y.safetensors", ("up", "down", "scalar"))):
        save_file({name: made[name] for name in names}, folder / file)
    index_file(folder, {n: "x.safetensors" if n in ("embed", "norm", "empty") else "y.safetensors" for n in made})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text("{}")
    return folder


def test_a_copy_with_other_times_and_another_name_is_the_same_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy", copy_function=shutil.copyfile)
    for number, path in enumerate(sorted(copy.iterdir())):
        os.utime(path, ns=(number, number))
    assert fingerprint(copy) == fingerprint(model)


def test_a_hub_cache_of_links_is_the_same_model_as_a_plain_copy(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hub = tmp_path / "models--acme--model"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "0123").mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, hub / "blobs" / f"{number}")
        (hub / "snapshots" / "0123" / path.name).symlink_to(f"../../blobs/{number}")
    assert fingerprint(hub / "snapshots" / "0123") == fingerprint(model)


def test_the_way_it_is_found_stays() -> None:
    """The embedded model's, as a literal: another way would make strangers of all statistics that people have."""
    demo = Path(__file__).resolve().parents[2] / "ptqpipe" / "demo_model"
    assert fingerprint(demo) == "ddb16faf8dd92c3190c3a42a1c374f4f5294b705d62dc06801970805056d3bf7"


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Writes shard y again, its tensors changed, with the old times."""

    def apply(folder: Path) -> None:
        path = folder / "y.safetensors"
        before = path.stat()
        made = {name: tensors()[name] for name in ("up", "down", "scalar")}
        change(made)
        save_file(made, path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return apply


def _renamed(folder: Path) -> None:
    (folder / "y.safetensors").rename(folder / "z.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("y.safetensors", "z.safetensors"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "every tensor": _weights(lambda made: [t.mul_(1.001) for t in made.values()]),
    "one matrix": _weights(lambda made: made["down"].add_(1e-3)),
    "one number alone in its tensor": _weights(lambda made: made["scalar"].add_(1)),
    "a tensor's name": _weights(lambda made: made.update(gate=made.pop("up"))),
    "a dtype": _weights(lambda made: made.update(up=made["up"].view(torch.int32))),
    "a size": _weights(lambda made: made.update(more=torch.ones(3))),
    "a file's name": _renamed,
    "config.json": lambda folder: (folder / "config.json").write_text('{"model_type": "mistral"}'),
    "a second config": lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_of_what_is_computed_is_another_model(what: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    if what == "a tensor's name":
        (model / "model.safetensors.index.json").unlink()
    if what == "a size":
        (model / "model.safetensors.index.json").unlink()
    before = fingerprint(model)
    CHANGES[what](model)
    after = fingerprint(model)
    assert after != before
    config = "config" in what
    assert (after[:OF_WEIGHTS] == before[:OF_WEIGHTS]) == config
    assert (after[OF_WEIGHTS:] == before[OF_WEIGHTS:]) == (not config)


def test_what_computes_nothing_does_not_count(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    before = fingerprint(model)
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    (model / "tokenizer.json").write_text("{}")
    os.utime(model / "x.safetensors", ns=(1, 1))
    os.chmod(model / "x.safetensors", 0o444)
    assert fingerprint(model) == before


def header_of(sizes: list[int], *, offset: int = 1000) -> FileHeader:
    """A header of so many tensors, without a file."""
    entries, at = [], offset
    for number, nbytes in enumerate(sizes):
        entries.append(TensorEntry(f"t{number}", "U8", (nbytes,), Path("f"), at, nbytes))
        at += nbytes
    return FileHeader(Path("f"), tuple(entries), {}, "ab" * 32, at, 0, 0)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [5000],
        [0, 3, 0, 70_000, 1, 0],
        [100] * LEAST_PAGES,
        [10_000] * 1000,
        [BYTES_PER_PAGE * 4, 64, BYTES_PER_PAGE * 4, 64] * 20,
        [],
        [0],
    ],
    ids=lambda sizes: f"{len(sizes)} tensors",
)
def test_pages_lie_in_tensors_and_in_pages_of_the_file_and_their_number_is_as_documented(sizes: list[int]) -> None:
    header = header_of(sizes)
    found = list(pages(header))
    count = LEAST_PAGES + header.file_bytes // BYTES_PER_PAGE
    filled = [entry for entry in header.entries if entry.nbytes]
    assert len(found) == (count if filled else 0)
    for entry, start, stop in found:
        assert 0 <= start < stop <= entry.nbytes
        assert (entry.offset + start) // PAGE == (entry.offset + stop - 1) // PAGE
    looked_at = {entry.name for entry, _, _ in found}
    if len(filled) <= count:
        assert looked_at == {entry.name for entry in filled}
    else:
        assert len(looked_at) == count


def test_many_tensors_are_looked_at_throughout_the_file_whatever_their_order() -> None:
    header = header_of([8192, 16, 4096, 16] * 500)
    found = list(pages(header))
    numbers = sorted(int(entry.name[1:]) for entry, _, _ in found)
    assert max(b - a for a, b in pairwise(numbers)) <= 2 * 2000 // LEAST_PAGES
    assert len({number % 4 for number in numbers}) == 4  # no stride that sees the small ones alone


def test_only_the_pages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(1 << 22), "v": torch.zeros(1 << 20)}, tmp_path / "model.safetensors")
    seen = []
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: seen.append((at, len(views[0]))) or whole(fd, views, at))
    fingerprint(tmp_path)
    header = parse_file(tmp_path / "model.safetensors")
    assert sorted(seen) == sorted((e.offset + a, b - a) for e, a, b in pages(header))
    assert sum(nbytes for _, nbytes in seen) <= LEAST_PAGES * PAGE


def test_a_file_cut_short_since_it_was_opened_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*has changed since"):
        reader.fingerprint()
