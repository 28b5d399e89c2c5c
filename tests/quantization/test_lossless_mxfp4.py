"""Claims: MXFP4 that is written anew without being decoded has the bytes that the exact search gives for its numbers.

Expected values: ``search/brute_force.py`` and ``qtensor.encode`` on the decoded numbers, and rtn on weights in memory,
which knows nothing of the codes that these were.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import NumericsError
from ptqpipe.models.slices import Slice
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.formats import FORMATS, pack
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.kernels.cpu_carry import NO_PLACE, fp4_places, fp4_to_nvfp4, value_of
from ptqpipe.numerics.qtensor import QTensor, encode
from ptqpipe.numerics.search import brute_force
from ptqpipe.quantization import Task, UnitResult, rtn
from ptqpipe.quantization.unit import LoadedWeight, joined
from tests import families, tiny

MXFP4, NVFP4 = FORMATS["mxfp4"], FORMATS["nvfp4"]
FP8 = ("fp8_channel", "fp8_block", "fp8_block_ue8m0", "mxfp8")

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no compiled kernels here")


@pytest.fixture(params=cpu.isas() or ("none",), autouse=True)
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.force_isa(None if request.param == "none" else request.param)
    yield
    cpu.force_isa(None)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each unit that was quantized from now on: whether its codes were carried."""
    found: list[bool] = []
    transcode = rtn.transcode

    def watched(task: Task) -> UnitResult | None:
        result = transcode(task)
        found.append(result is not None)
        return result

    monkeypatch.setattr(rtn, "transcode", watched)
    return found


class Stored:
    """A weight that its source has in MXFP4."""

    def __init__(self, q: QTensor) -> None:
        self.q = q
        self.shape = q.shape

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.q.narrow(0, start, stop - start).dequantize()

    def quantized(self, start: int, stop: int) -> QTensor:
        return self.q.narrow(0, start, stop - start)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_mxfp4(shape: tuple[int, int], scales: torch.Tensor, seed: int, codes: tuple[int, ...]) -> QTensor:
    """Codes of these, drawn block by block from the first few of them, so that largest numbers of all kinds are there;
    a few blocks of zeros and of -0."""
    g = generator(seed)
    blocks = shape[0] * shape[1] // 16
    few = torch.randint(1, len(codes) + 1, (blocks, 1), generator=g)
    picked = torch.tensor(codes)[torch.randint(0, 1 << 20, (blocks, 16), generator=g) % few]
    picked = picked | torch.randint(0, 2, (blocks, 16), generator=g) << 3
    picked[3], picked[4], picked[5] = 0, 8, torch.tensor([0, 8]).repeat(8)
    return QTensor(MXFP4, shape, pack(picked.reshape(shape).to(torch.uint8), 4), scales.to(torch.uint8))


def quantized(weights: list[Any], name: str) -> tuple[UnitResult, list[QTensor]]:
    sent: dict[tuple[int, int], QTensor] = {}
    names = [str(i) for i in range(len(weights))]
    task = Task(weights, FORMATS[name], names, lambda member, row, q: sent.__setitem__((member, row), q))
    return rtn.quantize(task), [joined(sent, i) for i in range(len(weights))]


def assert_the_same(sources: list[QTensor], name: str) -> UnitResult:
    """The result and every byte are those of the same numbers in memory."""
    expected, those = quantized([LoadedWeight(q.dequantize()) for q in sources], name)
    found, these = quantized([Stored(q) for q in sources], name)
    assert repr(found) == repr(expected)
    for this, that in zip(these, those, strict=True):
        assert torch.equal(this.data, that.data)
        assert torch.equal(this.scales, that.scales)
        assert this.fmt == that.fmt
    return found


@pytest.mark.parametrize("codes", [tuple(range(8)), (1, 2, 3), (4, 6, 7, 2), (1,), (7, 1)])
def test_every_block_at_every_distance_from_the_global_scale_is_what_brute_force_finds(codes: tuple[int, ...]) -> None:
    """Scales 2^-15 to 2^11 times the global one: E4M3's powers of two, subnormal ones too, end at 2^-9 and 2^8."""
    exponent, rows = -40, 27 * 8
    scales = (torch.arange(27).repeat_interleave(8) - 15 + exponent + 127)[:, None].expand(rows, 2)
    q = random_mxfp4((rows, 64), scales, 1, codes)
    w, g = q.dequantize(), torch.tensor(2.0**exponent)
    best = brute_force.search(w, NVFP4, global_scale=g)
    expected = encode(w, best, fmt=NVFP4, global_scale=g)
    kept = 0
    for row in range(rows):
        for block in range(2):
            one = q.narrow(0, row, 1).narrow(1, 32 * block, 32)
            that = expected.narrow(0, row, 1).narrow(1, 32 * block, 32)
            found = fp4_to_nvfp4(one, exponent)
            lossless = torch.equal(that.dequantize(), one.dequantize())
            assert (found is not None) is lossless
            if found is not None:
                assert torch.equal(found[0], that.data)
                assert torch.equal(found[1], that.scales)
                kept += 1
    assert rows / 2 < kept < 2 * rows
    assert (fp4_to_nvfp4(q, exponent) is None) is (kept < 2 * rows)


@pytest.mark.parametrize("low", range(0, 255, 15))
def test_every_scale_byte_gives_the_bytes_of_the_decoded_numbers(low: int, tried: list[bool]) -> None:
    """A window of scales at every byte from 0 to 254, as wide as NVFP4 holds whatever the codes are."""
    window = torch.arange(low, low + 15)
    scales = window[torch.randint(0, 15, (64, 8), generator=generator(low))]
    sources = [random_mxfp4((64, 256), scales, low + i, tuple(range(1, 8))) for i in range(2)]
    if low == 240:  # 1.5 times 2^128 is no float32
        with pytest.raises(NumericsError, match="inf"):
            quantized([Stored(q) for q in sources], "nvfp4")
        sources = [random_mxfp4((64, 256), scales - 6, low + i, tuple(range(1, 8))) for i in range(2)]
    if 30 <= low < 225:
        found = assert_the_same(sources, "nvfp4")
        assert all(error.squared_error == 0 for error in found.errors)
        assert tried[-1]
    else:  # a global scale that float32 arithmetic does not hold
        for weights in ([Stored(q) for q in sources], [LoadedWeight(q.dequantize()) for q in sources]):
            with pytest.raises(NumericsError, match="outside 2\\^-100"):
                quantized(weights, "nvfp4")


@pytest.mark.parametrize("name", ["nvfp4", *FP8])
@pytest.mark.parametrize(("least", "most"), [(100, 106), (115, 121), (100, 140), (0, 4), (224, 228)])
def test_what_is_carried_and_what_is_not_has_the_bytes_of_the_decoded_numbers(
    name: str, least: int, most: int, tried: list[bool]
) -> None:
    g = generator(least)
    sources = [
        random_mxfp4((160, 256), torch.randint(least, most, (160, 8), generator=g), 7 + i, tuple(range(1, 8)))
        for i in range(1 if name.startswith("fp8_block") else 2)
    ]
    if name == "nvfp4" and least == 0:
        with pytest.raises(NumericsError, match="outside 2\\^-100"):
            quantized([Stored(q) for q in sources], name)
        return
    found = assert_the_same(sources, name)
    if most - least == 40 and name != "mxfp8":
        assert sum(error.squared_error for error in found.errors) > 0
    if least >= 100 and most < 140:
        assert tried[-1]
        assert all(error.squared_error == 0 for error in found.errors)


def test_a_number_at_the_edge_of_the_range_decides_alone(tried: list[bool]) -> None:
    """6 in a block of scale 2^0 sets the global scale 2^-8; 0.5 is lost at 2^-18, kept at 2^-17; 2 is kept at 2^-19."""
    scales = torch.full((64, 8), 127)
    q = random_mxfp4((64, 256), scales, 3, (7, 6, 1))
    for byte, code, kept in ((110, 1, True), (109, 1, False), (109, 2, True), (108, 4, True), (107, 4, False)):
        changed = q.scales.clone()
        changed[10, 2] = byte
        data = q.data.clone()
        data[10, 32:48] = code | code << 4
        found = assert_the_same([QTensor(MXFP4, q.shape, data, changed)], "nvfp4")
        assert tried[-1] is kept
        assert (found.errors[0].squared_error == 0) is kept


@pytest.mark.parametrize("name", ["nvfp4", *FP8])
def test_a_scale_that_is_no_number_is_refused_as_ever(name: str) -> None:
    q = random_mxfp4((160, 256), torch.full((160, 8), 120), 5, (1, 7))
    q.scales[3, 1] = 255
    with pytest.raises(NumericsError, match="32 NaN and 0 inf"):
        quantized([Stored(q)], name)


@pytest.mark.parametrize("name", ["nvfp4", *FP8])
def test_a_weight_of_zeros_keeps_their_signs(name: str) -> None:
    codes = torch.tensor([0, 8], dtype=torch.uint8).repeat(160, 128)
    zeros = QTensor(MXFP4, (160, 256), pack(codes, 4), torch.full((160, 8), 120, dtype=torch.uint8))
    assert_the_same([zeros], name)
    _, (q,) = quantized([Stored(zeros)], name)
    assert torch.equal(q.dequantize().signbit(), codes == 8)


def test_places_are_in_the_order_of_the_numbers() -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat_interleave(32).reshape(1, 256).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 8).contiguous()
    places = fp4_places(QTensor(MXFP4, (255, 256), pack(codes, 4), scales))
    assert places is not None
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = magnitudes * torch.exp2(torch.arange(255).double() - 127)[:, None]
    assert [[value_of(place) for place in row] for row in places.tolist()] == expected.tolist()
    assert bool((places[:, 0] == NO_PLACE).all())


def test_rows_apart_in_memory_are_read_where_they_lie() -> None:
    q = random_mxfp4((64, 256), torch.randint(100, 110, (64, 8), generator=generator(0)), 1, tuple(range(1, 8)))
    apart = QTensor(MXFP4, (32, 256), q.data[1::2], q.scales[1::2])
    together = QTensor(MXFP4, (32, 256), q.data[1::2].contiguous(), q.scales[1::2].contiguous())
    assert not apart.data.is_contiguous()
    found, expected = (fp4_to_nvfp4(one, 109 + 3 - 11 - 127) for one in (apart, together))
    assert found is not None
    assert expected is not None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert cpu.code_difference(apart, together) == cpu.code_difference(together, together)


def gptoss(folder: Path) -> Path:
    g = generator(0)
    base, tensors = "model.layers.0.mlp.experts", {"model.embed_tokens.weight": torch.randn(32, 128).bfloat16()}
    for name, rows in (("gate_up_proj", 256), ("down_proj", 128)):
        tensors[f"{base}.{name}_blocks"] = torch.randint(0, 256, (2, rows, 4, 16), generator=g).to(torch.uint8)
        tensors[f"{base}.{name}_scales"] = torch.randint(115, 121, (2, rows, 4), generator=g).to(torch.uint8)
    config = {"model_type": "gpt_oss", "hidden_size": 128, "quantization_config": {"quant_method": "mxfp4"}}
    return tiny.save(folder, tensors, config=config)


@pytest.mark.parametrize("cache", [False, True])
def test_rows_of_codes_are_those_of_the_numbers(tmp_path: Path, cache: bool) -> None:
    """Of every second row of an expert, too, where codes are kept and where they are read each time; then of all."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with Source.open(gptoss(tmp_path / "source")) as source:
        for where, rows in ((Slice(name, expert=1), 256), (Slice(name, start=1, step=2, expert=1), 128)):
            whole = SourceRows(source, where, shape=(rows, 128)).rows(0, rows)
            weight = SourceRows(source, where, shape=(rows, 128), cache=cache)
            for start, stop in ((10, 30), (0, rows), (rows - 1, rows)):
                q = weight.quantized(start, stop)
                assert q is not None
                assert torch.equal(q.dequantize(), whole[start:stop])
                assert torch.equal(weight.rows(start, stop), whole[start:stop])
        assert SourceRows(source, Slice("model.embed_tokens.weight"), shape=(32, 128)).quantized(0, 32) is None
        turned = Slice(name, expert=1, rotation=32)
        assert SourceRows(source, turned, shape=(256, 128)).quantized(0, 32) is None


def packed(folder: Path, **options: Any) -> Path:
    """What `convert` makes of a float model."""
    made = ptqpipe.convert(tiny.save(folder / "float", tiny.llama()), out=folder / "low", workers=1, **options).out
    assert made is not None
    return Path(made)


def modelopt(folder: Path) -> Path:
    up, g = "model.layers.0.mlp.up_proj", generator(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(32, 128).bfloat16(),
        f"{up}.weight": torch.randint(0, 256, (128, 64), generator=g).to(torch.uint8),
        f"{up}.weight_scale": torch.randint(115, 121, (128, 4), generator=g).to(torch.uint8),
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_MXFP4", "ignore": []}
    return tiny.save(folder, tensors, config={"model_type": "llama", "quantization_config": quantization})


LAYOUTS = {
    "gpt-oss": gptoss,
    "ModelOpt": modelopt,
    "DeepSeek-V4": families.make_v4,
    "compressed-tensors": lambda folder: packed(folder, format="mxfp4", container="compressed_tensors"),
    "ptqpipe": lambda folder: packed(folder, format="mxfp4a16", container="ptqpipe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_dynamic", "mxfp8", "fp8_block"])
def test_every_layout_becomes_the_checkpoint_that_the_search_makes_of_it(
    tmp_path: Path, layout: str, fmt: str, tried: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LAYOUTS[layout](tmp_path / "source")
    container = "ptqpipe" if layout == "gpt-oss" else None
    found = ptqpipe.convert(source, format=fmt, container=container, out=tmp_path / "a", workers=1).out
    assert any(tried)
    monkeypatch.setattr(rtn, "transcode", lambda task: None)
    expected = ptqpipe.convert(source, format=fmt, container=container, out=tmp_path / "b", workers=1).out
    assert found is not None
    assert expected is not None
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in found.iterdir())
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert verify(found, source=source, workers=1).ok


def test_codes_that_are_carried_wrongly_do_not_pass_for_lossless(
    tmp_path: Path, tried: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the kernel that writes the codes is seen by the one that compares them, and the search runs."""

    def damaged(q: QTensor, exponent: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = fp4_to_nvfp4(q, exponent)
        if found is not None:
            found[0][-1, -1] ^= 0x30
        return found

    monkeypatch.setattr(cpu, "fp4_to_nvfp4", damaged)
    source = families.make_v4(tmp_path / "v4")
    out = ptqpipe.convert(source, format="nvfp4", out=tmp_path / "out", workers=1).out
    assert out is not None
    assert tried
    assert not any(tried)
    assert verify(out, source=source, workers=1).ok


def test_a_changed_number_of_what_was_carried_is_found_by_verify(tmp_path: Path, tried: list[bool]) -> None:
    source = families.make_v4(tmp_path / "v4")
    out = ptqpipe.convert(source, format="nvfp4", out=tmp_path / "out", workers=1).out
    assert out is not None
    assert any(tried)
    file = next(Path(out).glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "experts" in name and tensors[name].dtype == torch.uint8)
    tensors[name][5, 5] ^= 0x70
    save_file(tensors, file, metadata={"format": "pt"})
    said = [str(finding) for finding in verify(out, source=source, workers=1).findings]
    assert any("experts" in line for line in said)
