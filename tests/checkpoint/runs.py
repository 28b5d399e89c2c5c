"""A small deterministic conversion, without numbers: units of named byte tensors over several shards."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode

RUN_ID = "run-1"
SIZES = {"a": (300, 40), "b": (200,), "c": (700, 1), "d": (40, 40, 0), "e": (350,)}


def specs(unit: str) -> list[TensorSpec]:
    return [TensorSpec(f"{unit}.{i}", "U8", (size,)) for i, size in enumerate(SIZES[unit])]


def content(name: str, nbytes: int) -> bytes:
    seed = sum(name.encode())
    return bytes((seed + 31 * i) % 251 for i in range(nbytes))


LAYOUT = ShardLayout.plan([specs(unit) for unit in SIZES], shard_bytes=500)
EXTRA = {"config.json": b"{}", "ptqpipe.json": json.dumps({"run_id": RUN_ID}).encode()}


def open_writer(
    out: Path,
    *,
    mode: Mode = "new",
    run_id: str = RUN_ID,
    rank: int = 0,
    world: int = 1,
    source_files: Mapping[str, str] = MappingProxyType({}),
) -> CheckpointWriter:
    return CheckpointWriter.open(
        out, LAYOUT, run_id=run_id, mode=mode, rank=rank, world=world, source_files=source_files
    )


def write_unit(writer: CheckpointWriter, unit: str) -> None:
    for spec in specs(unit):
        data = content(spec.name, spec.shape[0])
        half = len(data) // 2
        writer.write(spec.name, data[half:], byte_offset=half)
        writer.write(spec.name, data[:half])
    writer.commit(unit, {"unit": unit})


def convert(out: Path, source: Path, *, mode: Mode = "new", after_unit: Callable[[str], None] = lambda _: None) -> None:
    with open_writer(out, mode=mode) as writer:
        done = writer.done()
        for unit in SIZES:
            if unit not in done:
                write_unit(writer, unit)
                after_unit(unit)
        writer.finish(
            expected_units=SIZES, extra=EXTRA, copy=[(source / "t.json", "t.json"), (source / "t.json", "sub/t.json")]
        )


def snapshot(folder: Path) -> Mapping[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
