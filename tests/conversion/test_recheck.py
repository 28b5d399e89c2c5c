"""Claims about the second look of convert: a search or an encoder that errs is caught, named, and nothing is left."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import get_format, pack
from ptqpipe.numerics.qtensor import QTensor, encode
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.quantization import quantizer, recheck, rtn
from ptqpipe.quantization.unit import LoadedWeight, Promise, Task
from ptqpipe.recipe.options import ALGORITHMS, CodeOptions
from tests import tiny

LIED = "model.layers.1.self_attn.o_proj.weight"
MARK = 0.15625  # the first number of the weight that is lied about
Liar = Callable[[torch.Tensor, QTensor], QTensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = tiny.llama()
    tensors[LIED][0, 0] = MARK
    return tiny.save(tmp_path / "model", tensors)


def marked(w: torch.Tensor) -> bool:
    """Whether it is the weight that is lied about, a little enlarged or not."""
    return MARK <= float(w[0, 0]) < 1.07 * MARK


def lie(monkeypatch: pytest.MonkeyPatch, liar: Liar) -> None:
    """A search and encoder that err in one weight, whichever kernels this machine has."""
    honest, honest_scales, honest_codes = rtn.quantize_rows, rtn.search_scales, rtn.encode_rows

    def quantize_rows(w: torch.Tensor, *args: object, **options: object) -> QTensor:
        q = honest(w, *args, **options)  # type: ignore[arg-type]
        return liar(w, q) if marked(w) and options["search"] == "exact" else q

    def search_scales(w: torch.Tensor, fmt: object, *, search: str) -> torch.Tensor:
        scales = honest_scales(w, fmt, search=search)  # type: ignore[arg-type]
        lies = marked(w) and search == "exact"
        return liar(w, honest_codes(w, scales, fmt)).scales if lies else scales  # type: ignore[arg-type]

    def encode_rows(w: torch.Tensor, scales: torch.Tensor, fmt: object) -> QTensor:
        q = honest_codes(w, scales, fmt)  # type: ignore[arg-type]
        return liar(w, q) if marked(w) else q

    monkeypatch.setattr(rtn, "quantize_rows", quantize_rows)
    monkeypatch.setattr(rtn, "search_scales", search_scales)
    monkeypatch.setattr(rtn, "encode_rows", encode_rows)


def a_step_up(w: torch.Tensor, q: QTensor) -> QTensor:
    """The last block's scale is the next larger one; the codes are the nearest at that."""
    scales = q.scales.clone()
    if q.fmt.scale.enumerable:
        scales[-1, -1] += 1
    else:
        scales = torch.nextafter(scales, torch.full_like(scales, 1e9))  # all: one block of these is looked at
    return encode(w, scales, fmt=q.fmt, global_scale=q.global_scale)


def another_code(w: torch.Tensor, q: QTensor) -> QTensor:
    """Each row's last code has another lowest bit."""
    codes = q.codes.clone()
    if q.fmt.scale.enumerable:
        codes[-1, -1] ^= 1
    else:
        codes ^= 1  # all: one block of these is looked at
    return QTensor(q.fmt, q.shape, pack(codes, q.fmt.element.bits), q.scales, q.global_scale)


def one_magnitude_lost(w: torch.Tensor, q: QTensor) -> QTensor:
    """Blocks of one magnitude of some significands get the smallest scale."""
    blocks = w.float().abs().reshape(-1, q.fmt.block[1])
    significand = torch.frexp(blocks[:, 0]).mantissa * 2
    lost = (blocks.amax(1) == blocks.amin(1)) & (significand > 1.215) & (significand < 1.2745)
    scales = torch.where(lost.reshape(q.scales.shape), 0, q.scales).to(torch.uint8)
    return encode(w, scales, fmt=q.fmt)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("liar", [a_step_up, another_code])
@pytest.mark.parametrize(
    "scheme", ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8_dynamic", "fp8_tensor", "fp8_block", "int4_g32"]
)
def test_a_wrong_scale_or_code_of_a_sampled_block_is_an_error_that_names_the_weight(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, liar: Liar, workers: int
) -> None:
    lie(monkeypatch, liar)
    with pytest.raises(NumericsError, match=f"^{LIED}: .* block at row .* column .*please report") as caught:
        ptqpipe.convert(model, out=tmp_path / "out", format=scheme, workers=workers)
    assert ("brute force gives" if liar is a_step_up else "the nearest is") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_blocks_of_one_magnitude_that_are_flushed_to_zero_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny.llama()
    rows = torch.arange(128)[:, None] * 0.01
    rows[0] = MARK
    tensors[LIED] = rows.expand(128, 128).contiguous().bfloat16()
    model = tiny.save(tmp_path / "model", tensors)
    lie(monkeypatch, one_magnitude_lost)
    with pytest.raises(NumericsError, match=f"^{LIED}: .* scale code 0, brute force gives 1"):
        ptqpipe.convert(model, out=tmp_path / "out", format="mxfp4", scale_search="exact")


def test_a_run_that_was_stopped_resumes_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        lie(patched, a_step_up)
        with pytest.raises(NumericsError):
            ptqpipe.convert(model, out=tmp_path / "out", format="mxfp4")
    ptqpipe.convert(model, out=tmp_path / "out", format="mxfp4", resume=True)
    ptqpipe.convert(model, out=tmp_path / "whole", format="mxfp4")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert [(tmp_path / "out" / f).read_bytes() for f in files] == [
        (tmp_path / "whole" / f).read_bytes() for f in files
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_weight_of_every_format_has_some_blocks_looked_at(model: Path, tmp_path: Path, scheme: str) -> None:
    record = ptqpipe.convert(model, out=tmp_path / "one", format=scheme, workers=1).record
    again = ptqpipe.convert(model, out=tmp_path / "two", format=scheme, workers=2).record
    assert record["weights"] == again["weights"]
    for entry in record["weights"].values():
        blocks = get_format(entry["format"]).scale_shape(tuple(entry["shape"]))
        sample = recheck.SHORT_BLOCKS if get_format(entry["format"]).scale.enumerable else 1
        assert entry["rechecked"] == min(sample, blocks[0] * blocks[1])


def test_the_record_and_the_last_lines_say_how_many_blocks(model: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ptqpipe.cli import main

    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "out"), "--format", "mxfp4", "-q"])
    assert done.exit_code == 0
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    blocks = sum(entry["rechecked"] for entry in record["weights"].values())
    assert f"re-checked by brute force: {blocks} blocks of 14 of 14 weights, no difference" in done.output


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8_channel", "fp8_block", "fp8_tensor", "int4_g128"])
@pytest.mark.parametrize(
    ("options", "scales", "codes"),
    [
        (CodeOptions(algorithm="rtn", objective="diagonal"), True, True),
        (CodeOptions(algorithm="rtn", objective="none"), True, True),
        (CodeOptions(algorithm="gptq", objective="diagonal", scales="first", refine_passes=0), True, False),
        (CodeOptions(algorithm="gptq", objective="diagonal"), None, False),
    ],
)
def test_weighted_searches_and_error_feedback_keep_what_they_promise(
    fmt: str, options: CodeOptions, scales: bool | None, codes: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(128, 256, generator=g) * 0.02, torch.randn(512, 256, generator=g) * torch.rand(256, generator=g)
    moment = x.t() @ x / 512
    inputs = [Moments(moment.diagonal().contiguous(), full_moment=moment)]
    kept = recheck.Recheck([LoadedWeight(w)], form := get_format(fmt), names=["w"], sink=lambda *_: None)
    task = Task([LoadedWeight(w)], form, ["w"], kept.take, options, inputs)
    done = quantizer(ALGORITHMS[options.algorithm])(task)
    promise = done.promises[0]
    assert scales is None or promise.scales == scales
    assert done.record_fields[0]["reverted"] or promise.codes == codes
    (count,) = kept.check([promise])
    assert (count > 0) == (promise.scales or promise.codes)
    if promise.importance is not None and promise.scales and form.scale.enumerable:  # another objective, other scales
        with pytest.raises(NumericsError, match=r"^w: "):
            kept.check([Promise(scales=True, codes=False, importance=promise.importance.flip(0) ** 3)])


@pytest.mark.parametrize("wrong", ["scales", "codes", "neither"])
def test_of_two_weights_each_is_held_to_its_own_promise(wrong: str) -> None:
    form, g = get_format("mxfp4"), torch.Generator().manual_seed(0)
    weights = [LoadedWeight(torch.randn(8, 128, generator=g)) for _ in range(2)]
    kept = recheck.Recheck(weights, form, names=["a", "b"], sink=lambda *_: None)
    for member, weight in enumerate(weights):
        w = weight.rows(0, 8)
        q = rtn.encode_rows(w, rtn.search_scales(w, form, search="exact"), form)
        if wrong == ("scales", "codes")[member]:
            q = (a_step_up, another_code)[member](w, q)
        kept.take(member, 0, q)
    promises = [Promise(scales=True, codes=False), Promise(scales=False, codes=True)]
    if wrong == "neither":
        assert kept.check(promises) == [12, 12]
        return
    with pytest.raises(NumericsError, match={"scales": "^a: .*scale code", "codes": "^b: .*has the code"}[wrong]):
        kept.check(promises)
