"""Claims: a model in memory and one that is loaded get the bytes that the converter writes for their folder."""

import gc
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ptqpipe
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import OutputExists, UsageError
from ptqpipe.pipeline.demo import MODEL
from ptqpipe.runtime.hf import PackedConfig
from ptqpipe.runtime.linear import PackedLinear
from tests.runtime.models import logits, save_source
from tests.tiny import bytes_of


def weight_files(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files of weights, and of the config that says what they are."""
    files = [*folder.glob("*.safetensors"), folder / "config.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def packed_parts(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Codes, scales and factors of every packed layer."""
    found = {name: layer.packed.in_rows() for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    return {
        name: {part: value for part in ("data", "scales", "factor") if (value := getattr(one, part)) is not None}
        for name, one in found.items()
    }


def same_parts(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = packed_parts(one), packed_parts(other)
    assert a
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys() and all(torch.equal(a[name][part], b[name][part]) for part in a[name])
        for name in a
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Seeded models in their folders; one of them has an output head that is its embedding."""
    return {name: save_source(name, tmp_path_factory.mktemp(name) / name) for name in ("llama", "tied", "qwen3_moe")}


@pytest.mark.parametrize(
    ("name", "format"), [("llama", "nvfp4"), ("qwen3_moe", "fp8"), ("tied", "nvfp4"), ("qwen3_moe", "int8_w8a8")]
)
def test_a_model_in_memory_is_saved_as_convert_writes_its_folder(
    sources: dict[str, Path], tmp_path: Path, name: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, down to the fingerprint of the source in the record; no weight of the float model is written."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, seen = QuantizeUnit.run, set()

    def looking(*given: Any) -> Any:
        seen.update(path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors*"))
        return run(*given)

    monkeypatch.setattr(QuantizeUnit, "run", looking)
    model = AutoModelForCausalLM.from_pretrained(sources[name], dtype=torch.bfloat16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    packed = ptqpipe.quantize_model(model, format)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {path.parts[0][:15] for path in seen} == {"ptqpipe-packed-"}
    model.save_pretrained(tmp_path / "saved" / name)
    ptqpipe.convert(tmp_path / "saved" / name, format=format, out=tmp_path / "q")
    assert ptqpipe.save_checkpoint(packed, tmp_path / "mine") == tmp_path / "mine"
    assert bytes_of(tmp_path / "mine") == bytes_of(tmp_path / "q")
    integers = {"quantization_config": PackedConfig()} if format == "int8_w8a8" else {}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, **integers)
    assert type(packed) is type(theirs)
    assert packed.dtype is model.dtype
    assert same_parts(packed, theirs)
    assert torch.equal(logits(packed), logits(theirs))


def test_the_checkpoint_of_a_packed_model_goes_with_it(sources: dict[str, Path], monkeypatch: Any) -> None:
    place = Path(sources["llama"]).parent / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    packed = ptqpipe.quantize_model(AutoModelForCausalLM.from_pretrained(sources["llama"]), "nvfp4")
    kept = [path.name for path in place.iterdir()]
    assert len(kept) == 1, kept  # the float folder has gone
    assert not any(path.name.startswith(".") for path in place.iterdir())
    del packed
    gc.collect()
    assert list(place.iterdir()) == []


def test_what_is_no_longer_the_checkpoint_is_not_saved(sources: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(sources["tied"])
    packed = ptqpipe.quantize_model(model, "fp8", out=tmp_path / "q")
    with pytest.raises(UsageError, match="was not packed by quantize_model"):
        ptqpipe.save_checkpoint(model, tmp_path / "saved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("of value")
    with pytest.raises(OutputExists, match="is no checkpoint; choose another"):
        ptqpipe.save_checkpoint(packed, tmp_path / "mine", overwrite=True)
    ptqpipe.save_checkpoint(packed, tmp_path / "saved")
    with pytest.raises(OutputExists, match="overwrite=True replaces it, or choose another out"):
        ptqpipe.save_checkpoint(packed, tmp_path / "saved")
    ptqpipe.save_checkpoint(packed, tmp_path / "saved", overwrite=True)
    with torch.no_grad():
        packed.model.norm.weight.mul_(2)
    with pytest.raises(UsageError, match="was changed since quantize_model packed it"):
        ptqpipe.save_checkpoint(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_model_that_was_loaded_by_its_name_on_the_hub_keeps_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "models--owner--tiny" / "snapshots" / "0123"
    shutil.copytree(MODEL, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.name_or_path = "owner/tiny"
    ptqpipe.quantize_model(model, "fp8", out=tmp_path / "out", workers=1)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()


def test_what_is_no_model_of_transformers_is_one_line() -> None:
    with pytest.raises(UsageError, match="Linear is no model of transformers; give the model inside a wrapper"):
        ptqpipe.quantize_model(torch.nn.Linear(16, 16))
    with pytest.raises(UsageError, match='samples=8 says how data is read; add data="FILE"'):
        ptqpipe.quantize_model("MODEL", samples=8)


@pytest.mark.parametrize(("name", "format"), [("llama", "nvfp4"), ("llama", "fp8"), ("tied", "nvfp4")])
def test_loading_with_a_config_quantizes_to_the_converters_bytes(
    sources: dict[str, Path], tmp_path: Path, name: str, format: str
) -> None:
    ptqpipe.convert(sources[name], format=format, out=tmp_path / "q")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    mine, info = AutoModelForCausalLM.from_pretrained(
        sources[name], quantization_config=ptqpipe.Config(format), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert mine.dtype is theirs.dtype
    assert same_parts(mine, theirs)
    assert torch.equal(logits(mine), logits(theirs))
    assert mine.config.quantization_config.to_dict() == theirs.config.quantization_config.to_dict()
    with pytest.raises(ValueError, match="not serializable"):
        mine.save_pretrained(tmp_path / "saved")


def test_a_config_for_a_quantized_model_or_an_unknown_format_is_one_line(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    ptqpipe.convert(sources["llama"], format="fp8", out=tmp_path / "q")
    with pytest.raises(UsageError, match="quantized already"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q", quantization_config=ptqpipe.Config("nvfp4"))
    with pytest.raises(ptqpipe.PtqError, match="unknown format 'nvfp5'"):
        ptqpipe.Config("nvfp5")
    assert repr(ptqpipe.Config("nvfp4")) == "<Config nvfp4: quantizes while loading>"


def test_decoding_while_loading_gives_the_float_model(sources: dict[str, Path], tmp_path: Path) -> None:
    config = ptqpipe.Config("nvfp4", packed=False, ignore=("*down_proj",))
    model = AutoModelForCausalLM.from_pretrained(sources["llama"], dtype=torch.float32, quantization_config=config)
    ptqpipe.convert(sources["llama"], format="nvfp4", ignore=["*down_proj"], out=tmp_path / "q")
    assert torch.equal(logits(model), logits(ptqpipe.load_model(tmp_path / "q")))


@pytest.mark.slow
def test_a_forward_loop_is_calibration_data(there: Path, tmp_path: Path) -> None:
    """The rows that it calls the model with, without padding: the same codes as from those tokens in a file."""
    model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained("MODEL")(Path("TEXT.txt").read_text())["input_ids"][:1280]
    batches = torch.tensor(tokens).reshape(10, 2, 64)

    def loop(called: Any) -> None:
        for batch in batches:
            padded = torch.nn.functional.pad(batch, (0, 3))
            called(input_ids=padded, attention_mask=torch.nn.functional.pad(torch.ones_like(batch), (0, 3)))

    options: dict[str, Any] = {"quality": "fast", "samples": 8, "seqlen": 64}
    packed = ptqpipe.quantize_model(model, "nvfp4", forward_loop=loop, **options)
    other = ptqpipe.quantize_model(
        "MODEL", "nvfp4", data=[row.tolist() for row in batches.flatten(0, 1)], out=tmp_path / "q", **options
    )
    ptqpipe.save_checkpoint(packed, tmp_path / "mine")
    assert weight_files(tmp_path / "mine") == weight_files(tmp_path / "q")
    assert other.path == tmp_path / "q"
    plain = ptqpipe.quantize_model(model, "nvfp4")
    assert not same_parts(packed, plain)


def test_what_has_no_float_weights_is_one_line(sources: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(sources["llama"])
    with pytest.raises(UsageError, match="this LlamaForCausalLM is packed already; give the float model"):
        ptqpipe.quantize_model(ptqpipe.quantize_model(model, "nvfp4"), "fp8")
    with pytest.raises(UsageError, match="is on the meta device, without values; load the model's weights first"):
        ptqpipe.quantize_model(model.to("meta"), "nvfp4")
