"""Claims about ptqpipe.checkpoint.reader and .files: whole folders, indexes, which files are carried."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import CheckpointError
from tests.checkpoint.builders import entry, index_file, one_line, raw_file, u8_file


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader.open(folder)
    return one_line(caught.value)


def raw(t: torch.Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


WRITABLE = [dtype for dtype in DTYPE_NAMES if dtype != torch.float8_e8m0fnu]  # the library's writer lacks that one


@pytest.mark.parametrize("dtype", WRITABLE)
def test_what_the_library_writes_is_read_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(), (1,), (7, 3), (2, 3, 5), (0, 4), (4, 0), (1, 1, 1, 2)]
    tensors = {f"t{i}": random_bits(dtype, shape, i) for i, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.entries.keys() == tensors.keys()
        for name, expected in tensors.items():
            assert same_bits(reader.read(name), expected)
            assert bytes(reader.read_bytes(name)) == raw(expected)


def test_rows_are_the_slices_of_the_whole(tmp_path: Path) -> None:
    w = random_bits(torch.bfloat16, (9, 5), 0)
    save_file({"w": w, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        for start in range(10):
            for stop in range(start, 10):
                assert same_bits(reader.read("w", start=start, stop=stop), w[start:stop])
        assert same_bits(reader.read("w", start=4), w[4:])
        assert reader.read("empty", start=0, stop=0).shape == (0, 3)
        assert reader.read("scalar").shape == ()
        for start, stop in [(-1, 2), (3, 2), (0, 10)]:
            with pytest.raises(ValueError, match="rows"):
                reader.read("w", start=start, stop=stop)


def test_bytes_are_read_into_the_callers_memory(tmp_path: Path) -> None:
    w = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    save_file({"w": w}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        into = torch.zeros(2, 4, dtype=torch.int16)
        reader.read_into("w", into, start=8, stop=24)
        assert torch.equal(into, w[1:])
        part = bytearray(3)
        reader.read_into("w", part, start=1, stop=4)
        assert bytes(part) == w.numpy().tobytes()[1:4]
        assert bytes(reader.read_bytes("w", start=22)) == w.numpy().tobytes()[22:]
        with pytest.raises(ValueError, match="into a buffer of 3"):
            reader.read_into("w", part, start=0, stop=4)
        with pytest.raises(ValueError, match="of 24"):
            reader.read_into("w", part, start=22, stop=25)
        with pytest.raises(ValueError, match="contiguous"):
            reader.read_into("w", into.t(), start=0, stop=16)


def test_sub_byte_tensors_are_bytes_only(tmp_path: Path) -> None:
    raw_file(tmp_path / "m.safetensors", {"f": entry("F4", [2, 4], 0, 4), "g": entry("F8_E8M0", [2], 4, 6)}, b"abcdef")
    with CheckpointReader.open(tmp_path) as reader:
        assert bytes(reader.read_bytes("f")) == b"abcd"
        with pytest.raises(CheckpointError, match="F4, which has no torch dtype"):
            reader.read("f")
        assert same_bits(reader.read("g"), torch.tensor([101, 102], dtype=torch.uint8).view(torch.float8_e8m0fnu))


def test_shards_are_read_in_natural_order_and_the_index_agrees(tmp_path: Path) -> None:
    names = [f"s{i}.safetensors" for i in (10, 9, 1)]
    for name in names:
        u8_file(tmp_path / name, f"b.{name}", f"a.{name}")
    index_file(tmp_path, {f"{x}.{n}": n for n in names for x in "ab"})
    reader = CheckpointReader.open(tmp_path)
    assert [p.name for p in reader.files] == ["s1.safetensors", "s9.safetensors", "s10.safetensors"]
    assert list(reader.entries)[:2] == ["b.s1.safetensors", "a.s1.safetensors"]
    assert reader.index == tmp_path / "model.safetensors.index.json"


def test_files_without_an_index_are_joined(tmp_path: Path) -> None:
    u8_file(tmp_path / "one.safetensors", "a")
    u8_file(tmp_path / "two.safetensors", "b")
    assert list(CheckpointReader.open(tmp_path).entries) == ["a", "b"]


def test_links_into_a_hub_cache_work(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    u8_file(tmp_path / "blobs" / "0123", "a")
    (tmp_path / "blobs" / "4567").write_text("{}")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to("../blobs/4567")
    reader = CheckpointReader.open(tmp_path / "snapshot")
    assert reader.read("a").tolist() == [0]
    assert [p.name for p in reader.extra_files] == ["tokenizer.json"]


def secret(tmp_path: Path) -> Path:
    """A file outside of any model."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("{}")
    return tmp_path / "elsewhere" / "secret"


LEAVING: dict[str, Callable[[Path, Path], object]] = {
    "tokenizer.json": lambda model, file: (model / "tokenizer.json").symlink_to(file),
    "config.json": lambda model, file: (model / "config.json").symlink_to(file),
    "relative": lambda model, file: (model / "relative").symlink_to("../elsewhere/secret"),
    "nested/deep": lambda model, file: [(model / "nested").mkdir(), (model / "nested" / "deep").symlink_to(file)],
    "chain": lambda model, file: [(model / "second").symlink_to(file), (model / "chain").symlink_to("second")],
    "detour": lambda model, file: [
        (file.parent / "back").symlink_to(file),
        (model / "detour").symlink_to("../elsewhere/back"),
    ],
    "via/..": lambda model, file: (model / "dotted").symlink_to("../model/../elsewhere/secret"),
}


@pytest.mark.parametrize("case", LEAVING)
def test_a_link_out_of_the_folder_is_named_before_its_content_is_carried(case: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    u8_file(model / "model.safetensors", "a")
    LEAVING[case](model, secret(tmp_path))
    reader = CheckpointReader.open(model)
    with pytest.raises(CheckpointError, match=r"a link that leaves the model's folder.*delete the link") as error:
        reader.check_links()
    one_line(error.value)


def test_links_within_a_folder_and_to_weights_elsewhere_are_used(tmp_path: Path) -> None:
    """Shards on another disk are common, and a file that is no safetensors file cannot pass for one."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    disk.mkdir()
    u8_file(disk / "w", "a")
    (model / "model.safetensors").symlink_to(disk / "w")
    (model / "real.json").write_text("{}")
    (model / "alias.json").symlink_to("real.json")
    (model / "folder").symlink_to(secret(tmp_path).parent)  # not entered
    (tmp_path / "by-name").symlink_to(model)
    for path in (model, tmp_path / "by-name"):
        reader = CheckpointReader.open(path)
        reader.check_links()
        assert [p.name for p in reader.extra_files] == ["alias.json", "real.json"]


@pytest.mark.parametrize(("target", "allowed"), [("../../blobs/4567", True), ("../../../models--b/blobs/89", False)])
def test_a_snapshot_links_into_the_blobs_of_its_own_model_alone(target: str, allowed: bool, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    for folder in (snapshot, tmp_path / "models--a--b" / "blobs", tmp_path / "models--b" / "blobs"):
        folder.mkdir(parents=True)
    u8_file(tmp_path / "models--a--b" / "blobs" / "0123", "a")
    (tmp_path / "models--a--b" / "blobs" / "4567").write_text("{}")
    (tmp_path / "models--b" / "blobs" / "89").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "tokenizer.json").symlink_to(target)
    reader = CheckpointReader.open(snapshot)
    if allowed:
        reader.check_links()
        return
    with pytest.raises(CheckpointError, match=r"tokenizer\.json' is a link that leaves the model's folder"):
        reader.check_links()


def test_a_folder_of_links_into_a_hub_cache_may_link_what_belongs_to_its_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for folder in (model, tmp_path / "models--a--b" / "blobs"):
        folder.mkdir(parents=True)
    u8_file(tmp_path / "models--a--b" / "blobs" / "0123", "a")
    (tmp_path / "models--a--b" / "blobs" / "4567").write_text("{}")
    (model / "model.safetensors").symlink_to("../models--a--b/blobs/0123")
    (model / "tokenizer.json").symlink_to("../models--a--b/blobs/4567")
    CheckpointReader.open(model).check_links()


def test_a_file_that_takes_the_name_of_another_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    u8_file(path, "a")
    reader = CheckpointReader.open(tmp_path)
    reader.fingerprint()
    assert reader.read("a").tolist() == [0]
    raw, status = path.read_bytes(), path.stat()
    (tmp_path / "other").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "other", path)
    with pytest.raises(CheckpointError, match="has changed"):
        reader.check_unchanged()


def make_indexed(folder: Path) -> None:
    u8_file(folder / "x.safetensors", "a", "b")
    u8_file(folder / "y.safetensors", "c")
    index_file(folder, {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"})


def _index(content: str | bytes) -> Callable[[Path], object]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "model.safetensors.index.json").write_bytes(raw)


def _map(**changes: object) -> Callable[[Path], object]:
    full: dict[str, object] = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    return lambda folder: index_file(folder, {k: v for k, v in (full | changes).items() if v is not None})


FOLDER_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / "y.safetensors").unlink(), "lacks the shard 'y.safetensors'"),
    "truncated shard": (lambda f: os.truncate(f / "x.safetensors", 60), "claims a header"),
    "shard a folder": (lambda f: [(f / "y.safetensors").unlink(), (f / "y.safetensors").mkdir()], "not a regular"),
    "shard a dead link": (
        lambda f: [(f / "y.safetensors").unlink(), (f / "y.safetensors").symlink_to("gone")],
        "No such file",
    ),
    "index not JSON": (_index("{"), "does not parse"),
    "index not UTF-8": (_index(b"\xff\xfe"), "not UTF-8"),
    "index a list": (_index("[]"), "of type list"),
    "index without map": (_index("{}"), "weight_map that is a NoneType"),
    "index with empty map": (_index('{"weight_map":{}}'), "weight_map that is empty"),
    "index map a list": (_index('{"weight_map":[]}'), "a list"),
    "index nested": (_index('{"weight_map":' + "[" * 10**5), "nested too deeply"),
    "index duplicate": (_index('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}'), "duplicate key 'a'"),
    "index a pointer": (_index("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "file not a string": (_map(a=1), "places tensor 'a' in 1"),
    "parent path": (_map(a="../x.safetensors"), "inside the folder"),
    "absolute path": (_map(a="/x.safetensors"), "inside the folder"),
    "path with NUL": (_map(a="x\0.safetensors"), "inside the folder"),
    "another suffix": (_map(a="x.bin"), "inside the folder"),
    "absent tensor": (_map(d="x.safetensors"), "names tensor 'd', which 'x.safetensors' does not hold"),
    "tensor not named": (_map(b=None), "holds tensor 'b' but"),
    "wrong shard": (_map(b="y.safetensors"), "places it in 'y.safetensors'"),
    "tensor twice": (lambda f: u8_file(f / "y.safetensors", "c", "a"), "places it in 'x.safetensors'"),
    "stray weights": (lambda f: u8_file(f / "z.safetensors", "z"), "does not name (1 in all)"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "holds list"),
    "config nested": (lambda f: (f / "config.json").write_text("[" * 10**5), "not JSON"),
    "config a folder": (lambda f: (f / "config.json").mkdir(), "cannot be read"),
    "extra a dead link": (lambda f: (f / "tokenizer.json").symlink_to("gone"), "is a broken link"),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_each_fault_of_a_folder_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    make_indexed(tmp_path)
    assert CheckpointReader.open(tmp_path).entries.keys() == {"a", "b", "c"}
    damage, fragment = FOLDER_FAULTS[fault]
    damage(tmp_path)
    assert fragment in refused(tmp_path)


def test_faults_without_an_index(tmp_path: Path) -> None:
    assert "has nothing, expected .safetensors files" in refused(tmp_path)
    raw_file(tmp_path / "model.safetensors", {})
    assert "holds no tensors" in refused(tmp_path)
    u8_file(tmp_path / "model.safetensors", "a")
    u8_file(tmp_path / "model.fp16.safetensors", "a")
    assert "'a' is in both 'model.fp16.safetensors' and 'model.safetensors'" in refused(tmp_path)
    (tmp_path / "model.fp16.safetensors").unlink()
    assert "is a file" in refused(tmp_path / "model.safetensors")
    assert "does not exist" in refused(tmp_path / "absent")
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00003.safetensors")
    assert "lacks model-00002-of-00003.safetensors of 3 shards" in refused(tmp_path)


def test_two_indexes_are_not_guessed_between(tmp_path: Path) -> None:
    for stem in ("one", "two"):
        u8_file(tmp_path / f"{stem}.safetensors", stem)
        (tmp_path / f"{stem}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {stem: f"{stem}.safetensors"}})
        )
    assert "keep one" in refused(tmp_path)


def test_only_weights_and_bookkeeping_stay_behind(tmp_path: Path) -> None:
    u8_file(tmp_path / "model.safetensors", "a")
    carried = [
        "tokenizer.model",
        "chat_template.jinja",
        "modeling_x.py",
        "README.md",
        "original/params.json",
        ".gitattributes",
    ]
    left = [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
    ]
    left += ["model.gguf", "onnx/model.onnx", "onnx/model.onnx_data", "tf_model.h5", "pytorch_model.bin.index.json"]
    own = ["config.json", "hf_quant_config.json", "ptqpipe.json"]
    for name in [*carried, *left, *own, ".git/HEAD", ".cache/x/y.json", "__pycache__/m.pyc", ".out.partial/out/z.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "loop").symlink_to(".")
    reader = CheckpointReader.open(tmp_path)
    assert {p.relative_to(tmp_path).as_posix() for p in reader.extra_files} == set(carried)
    folders = [".git", ".cache", "__pycache__", ".out.partial", "loop"]
    assert {p.relative_to(tmp_path).as_posix() for p in reader.left_out} == {*left, *folders}
    assert reader.left_out[tmp_path / "loop"] == "link to a folder"


def test_consolidated_weights_alone_are_the_checkpoint(tmp_path: Path) -> None:
    u8_file(tmp_path / "consolidated.safetensors", "a")
    reader = CheckpointReader.open(tmp_path)
    assert list(reader.entries) == ["a"]
    assert not reader.left_out


def test_config_may_hold_infinity_and_may_be_absent(tmp_path: Path) -> None:
    u8_file(tmp_path / "model.safetensors", "a")
    reader = CheckpointReader.open(tmp_path)
    assert (reader.has_config, dict(reader.config), reader.read_json("hf_quant_config.json")) == (False, {}, None)
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    reader = CheckpointReader.open(tmp_path)
    assert reader.has_config
    assert reader.config["time_step_limit"] == [0.0, float("inf")]


def test_a_source_that_changes_while_open_is_noticed(tmp_path: Path) -> None:
    w = torch.zeros(1000)
    save_file({"v": w, "w": w + 1}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    reader.check_unchanged()
    reader.read("v")
    os.truncate(tmp_path / "model.safetensors", 4200)
    with pytest.raises(CheckpointError, match="has changed since"):
        reader.read("w")
    with pytest.raises(CheckpointError, match="has changed since"):
        reader.check_unchanged()
    reader.close()
    with pytest.raises(CheckpointError, match="has changed since"):
        reader.read("v")


def test_a_read_error_of_the_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    u8_file(tmp_path / "model.safetensors", "a")
    reader = CheckpointReader.open(tmp_path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError) as caught:
        reader.read("a")
    assert "Input/output error" in one_line(caught.value)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    u8_file(tmp_path / "model.safetensors", "a")
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        CheckpointReader.open(tmp_path).read("b")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(1000, dtype=torch.int16)
    save_file({"w": w}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:7]], offset))
    assert torch.equal(reader.read("w"), w)


def test_opening_costs_headers_not_weights(tmp_path: Path) -> None:
    # 64 GiB of holes: a reader that touched or mapped the weights could not open this within a second's worth of memory
    nbytes = 2**36
    raw_file(tmp_path / "model.safetensors", {"w": entry("U8", [2**16, 2**20], 0, nbytes)})
    size = (tmp_path / "model.safetensors").stat().st_size
    try:
        os.truncate(tmp_path / "model.safetensors", size + nbytes)
    except OSError:
        pytest.skip("the file system takes no sparse file of 64 GiB")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with CheckpointReader.open(tmp_path) as reader:
        assert not reader.read("w", start=2**16 - 1).any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.shared
def test_golden_checkpoints_are_read_as_the_library_reads_them(shared_dir: Path) -> None:
    folders = [p for p in sorted((shared_dir / "golden").iterdir()) if (p / "config.json").exists()]
    assert len(folders) >= 20
    for folder in folders:
        with CheckpointReader.open(folder) as reader:
            expected = {name: t for file in reader.files for name, t in load_file(file).items()}
            assert reader.entries.keys() == expected.keys()
            assert all(same_bits(reader.read(name), t) for name, t in expected.items())
            assert all(DTYPES[e.dtype][0] == expected[e.name].dtype for e in reader.entries.values())
