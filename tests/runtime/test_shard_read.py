"""Claims about reading parts of tensors: they decode to the same part of the whole, and nothing else is read.

The whole is decoded by ``containers.decode``; bytes are counted where the operating system hands them over.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint.layouts import PartKind, StoredWeight
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import FormatError
from ptqpipe.models.source import Source
from ptqpipe.runtime.shard_read import Range, read_box, read_part
from tests.runtime.models import quantized
from tests.runtime.ranks import CountedReads

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"  # [256, 128], [128, 256]
LAYOUTS = [
    ("compressed_tensors", "nvfp4"),
    ("modelopt", "nvfp4_w4a4"),
    ("compressed_tensors", "mxfp4"),
    ("compressed_tensors", "mxfp6"),
    ("compressed_tensors", "mxfp8"),
    ("compressed_tensors", "fp8_dynamic"),
    ("compressed_tensors", "int4_g32"),
    ("compressed_tensors", "fp8_static"),
    ("compressed_tensors", "fp8_block"),
    ("modelopt", "fp8_dynamic"),
    ("deepseek_fp8", "fp8_block"),
    ("mxfp8_hf", "mxfp8"),
    ("ptqpipe", "e2m1/8/ue5m3"),
]


def bytes_of_part(stored: StoredWeight, rows: int, columns: int) -> int:
    """What a part of so many rows and columns takes at most: codes, the scales that it touches, global scales."""
    fmt = stored.scheme.fmt
    high, wide = fmt.block_extent(stored.shape)
    scales = stored.part(PartKind.SCALES)
    assert scales is not None
    each = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[scales.dtype]
    return rows * columns * fmt.element.bits // 8 + (rows // high + 2) * -(-columns // wide) * each + 8


@pytest.mark.slow
@pytest.mark.parametrize(("container", "scheme"), LAYOUTS)
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        (UP, [(0, 256)], (0, 128)),
        (UP, [(64, 128)], (0, 128)),
        (UP, [(128, 256)], (0, 128)),
        (UP, [(32, 96), (160, 224)], (0, 128)),
        (DOWN, [(0, 128)], (0, 128)),
        (DOWN, [(0, 128)], (128, 256)),
        (DOWN, [(64, 96)], (128, 256)),
    ],
)
def test_a_part_decodes_to_that_part_of_the_whole(
    sources: Mapping[str, Path],
    tmp_path: Path,
    container: str,
    scheme: str,
    name: str,
    rows: list[Range],
    columns: Range,
) -> None:
    path = quantized(sources["llama"], container, scheme).save(tmp_path / "q")
    with Source.open(path) as source:
        whole = source.quantized(name).dequantize()
        expected = torch.cat([whole[start:stop, columns[0] : columns[1]] for start, stop in rows])
        with CountedReads() as reads:
            part = read_part(source, source.stored[name], rows=rows, columns=columns)
        assert torch.equal(part.dequantize(), expected)
        assert part.shape == expected.shape
        count = sum(stop - start for start, stop in rows)
        assert reads.bytes <= bytes_of_part(source.stored[name], count, columns[1] - columns[0]) + 16 * len(rows)


def test_columns_inside_a_block_are_refused(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "compressed_tensors", "mxfp4").save(tmp_path / "q")
    with Source.open(path) as source, pytest.raises(FormatError, match="do not lie on block edges of 32"):
        read_part(source, source.stored[DOWN], columns=(0, 48))


@pytest.mark.parametrize(
    ("shape", "ranges"),
    [
        ((6, 8), [[(0, 6)], [(0, 8)]]),
        ((6, 8), [[(2, 4)], [(0, 8)]]),
        ((6, 8), [[(0, 6)], [(4, 8)]]),
        ((6, 8), [[(0, 2), (4, 6)], [(0, 8)]]),
        ((3, 6, 8), [[(0, 3)], [(1, 2), (4, 5)], [(0, 8)]]),
        ((3, 6, 8), [[(0, 3)], [(0, 6)], [(2, 4)]]),
        ((9,), [[(3, 5)]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_box_is_read_alone(
    tmp_path: Path, shape: tuple[int, ...], ranges: list[list[Range]], dtype: torch.dtype
) -> None:
    whole = torch.arange(prod(shape)).reshape(shape).to(dtype)
    save_file({"w": whole, "other": torch.ones(5)}, tmp_path / "model.safetensors")
    expected = whole
    for at, part in enumerate(ranges):
        expected = torch.cat([expected.narrow(at, start, stop - start) for start, stop in part], dim=at)
    with CheckpointReader.open(tmp_path) as reader, CountedReads() as reads:
        assert torch.equal(read_box(reader, "w", ranges), expected)
        assert reads.bytes == expected.nbytes


@pytest.mark.shared
def test_experts_of_a_stack_are_read_alone(shared_dir: Path) -> None:
    with Source.open(shared_dir / "golden" / "gptoss-mxfp4") as source:
        name, stored = next((name, w) for name, w in source.stored.items() if name.endswith("gate_up_proj"))
        n, k = stored.shape
        whole = source.quantized(name, expert=2).dequantize()
        with CountedReads() as reads:
            part = read_part(source, stored, expert=2, rows=[(n // 2, n)])
        assert torch.equal(part.dequantize(), whole[n // 2 :])
        assert reads.bytes == n // 2 * (k // 2 + k // 32)
