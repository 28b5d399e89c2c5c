"""Claims about models whose files contradict each other: every command that meets one ends with one line, and nothing
is half written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ptqpipe.cli import main
from ptqpipe.errors import PtqError
from ptqpipe.models.families import check_config, doubts
from ptqpipe.serving.command import serving
from ptqpipe.serving.options import ServeOptions
from tests import families, processors, tiny
from tests.conversion.test_sources import K, N, compressed, gptq_source, integer_source, numbers, words
from tests.serving.engine import images

EXPERT = "model.layers.1.mlp.experts has 3 experts (there is no model.layers.1.mlp.experts.3), and config.json says"
TOWER = "has a text_config and no vision_config, but the files hold a vision tower"
HALF = "multi-token prediction layer without 'model.layers.2.enorm.weight'"


def edit(folder: Path, **changes: Any) -> Path:
    """A model with other values in config.json, those that are None left out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def without(folder: Path, lost: Callable[[str], bool]) -> Path:
    """A model without some of its tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if not lost(name)}
    return tiny.save(folder, tensors, config=config)


def packed(folder: Path, changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **how: Any) -> Path:
    """INT4 in compressed-tensors' layout with something wrong about it."""
    codes, zeros, scales = numbers(4, 4)
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor([N, K])}
    tensors["weight_zero_point"] = words(zeros.t(), 4).t()
    return integer_source(folder, changed(tensors), compressed(4, 32, symmetric=how.get("symmetric", False)))


def awq(folder: Path) -> Path:
    """AWQ with zero points of half of the groups."""
    codes, zeros, scales = numbers(4, K // 32)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t(), 4, order)[:2], "scales": scales.t()}
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return integer_source(folder, tensors, described)


def dropped(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def given(**more: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: tensors | more


BEYOND = torch.full((4, N // 8), -1).int()  # the zero point 16 in every place, which version 1 stores as 15
MODELS: dict[str, Callable[[Path], Path]] = {
    "an expert too few": lambda at: without(
        families.make_model(at, "deepseek_v3"), lambda name: "layers.1.mlp.experts.3." in name
    ),
    "half of an mtp layer": lambda at: without(
        families.make_model(at, "deepseek_v3", mtp=True), lambda name: name.endswith("enorm.weight")
    ),
    "a tower without its config": lambda at: edit(images.make(at, "qwen3_vl"), vision_config=None),
    "a tower without its config, named in words": lambda at: edit(images.make(at, "llava"), vision_config=None),
    "a zero point beyond 4 bits, gptq": lambda at: gptq_source(at, 4, "gptq", False, qzeros=BEYOND)[0],
    "a zero point beyond 4 bits, compressed-tensors": lambda at: packed(
        at, given(weight_zero_point=torch.full((N, 4), 99).to(torch.int8))
    ),
    "zero points of a symmetric weight, compressed-tensors": lambda at: packed(at, lambda x: x, symmetric=True),
    "no zero points, compressed-tensors": lambda at: packed(at, dropped("weight_zero_point")),
    "zero points of other groups, awq": awq,
    "another shape, compressed-tensors": lambda at: packed(
        at, lambda x: given(weight_shape=torch.tensor([N, K + 8]))(dropped("weight_zero_point")(x)), symmetric=True
    ),
    "scales of fewer groups, compressed-tensors": lambda at: packed(
        at, lambda x: given(weight_scale=x["weight_scale"][:, :3])(dropped("weight_zero_point")(x)), symmetric=True
    ),
}
CONVERT = ("convert", "--requantize", "--scale-search", "absmax", "-o", "out")
DATA = ("--data", "data.jsonl", "--samples", "4", "--seqlen", "16", "-o", "out")
FLOAT = {"convert": CONVERT, "dry run": ("convert", "--dry-run", "--requantize", "-o", "out"),
         "plan": ("plan", "--budget", "9bits", "-o", "out"), "tune": ("tune", *DATA)}  # fmt: skip
RUNS = {"calibrate": ("calibrate", *DATA), "generate": ("generate", "--samples", "2", "-o", "out.jsonl"),
        "eval": ("eval", "--data", "data.jsonl", "--seqlen", "16", "-o", "out")}  # fmt: skip
READ = {"dequantize": ("dequantize", "-o", "out"), "relayout": ("relayout", "--container", "ptqpipe", "-o", "out")}
ALL = {**FLOAT, **RUNS, **READ}
# Model -> (words of its line, the commands that meet it).
SAID: dict[str, tuple[str, tuple[str, ...]]] = {
    "an expert too few": (EXPERT, (*FLOAT, *RUNS)),
    "half of an mtp layer": (HALF, (*FLOAT, "calibrate")),
    "a tower without its config": (TOWER, tuple(FLOAT)),
    "a tower without its config, named in words": (TOWER, tuple(FLOAT)),
    "a zero point beyond 4 bits, gptq": ("qzeros' has a zero point 16, beyond 4 bits", ("convert", "dequantize")),
    "a zero point beyond 4 bits, compressed-tensors": ("weight_zero_point' has numbers beyond 4 bits", (
        "convert", "dequantize",
    )),
    "zero points of a symmetric weight, compressed-tensors": (
        "weight_zero_point' is not 0 everywhere, but config.json says symmetric: true; start from",
        ("convert", "dequantize"),
    ),
    "no zero points, compressed-tensors": ("has no tensor 'model.layers.0.mlp.up_proj.weight_zero_point'", tuple(ALL)),
    "zero points of other groups, awq": ("qzeros' is I32 [2, 8], but its config says I32 [4, 8]; the two", tuple(ALL)),
    "another shape, compressed-tensors": ("weight_shape' says 64x136, but the codes of the weight are 64x128", (
        "convert", "dequantize",
    )),
    "scales of fewer groups, compressed-tensors": ("is F16 [64, 3], but its config says F16 [64, 4]", tuple(ALL)),
}  # fmt: skip
CALLS = [(model, command) for model, (_, commands) in SAID.items() for command in commands]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each model once, with a tokenizer."""
    found: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in found:
            folder = tmp_path_factory.mktemp("bad") / "model"
            found[name] = processors.add_tokenizer(MODELS[name](folder))
        return found[name]

    return of


@pytest.mark.parametrize(("model", "command"), CALLS, ids=[f"{model}: {command}" for model, command in CALLS])
def test_a_command_that_meets_it_ends_with_one_line_and_no_output(
    model: str, command: str, made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(model)
    monkeypatch.chdir(tmp_path)
    families.write_windows(tmp_path / "data.jsonl")
    name, *options = ALL[command]
    done = CliRunner().invoke(main, [name, str(folder), *options])
    assert isinstance(done.exception, SystemExit), done.exception
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert (done.exit_code, len(errors)) == (1, 1), done.output
    assert SAID[model][0] in errors[0]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    mid_run = "zero point" in model or "another shape" in model  # only reading the weights shows it
    assert mid_run or [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("model", MODELS)
def test_verify_and_inspect_say_it(model: str, made: Callable[[str], Path]) -> None:
    said = SAID[model][0]
    checked = CliRunner().invoke(main, ["verify", str(made(model))])
    assert checked.exit_code == 1
    assert said in checked.output
    shown = CliRunner().invoke(main, ["inspect", str(made(model))])  # which reads no codes
    assert said in shown.output or "zero point beyond" in model or "symmetric" in model or "another shape" in model


@pytest.mark.parametrize("zero", [torch.zeros(N, 4).to(torch.int8), torch.full((N // 8, 4), -0x77777778).int()])
def test_zero_points_that_are_0_change_nothing_of_a_symmetric_weight(zero: torch.Tensor, tmp_path: Path) -> None:
    """One to a byte, or packed: then 0 is the code 8."""
    plain = packed(tmp_path / "plain", dropped("weight_zero_point"), symmetric=True)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    module = next(name for name in tensors if name.endswith(".weight_packed")).removesuffix("weight_packed")
    found = tiny.save(tmp_path / "found", tensors | {f"{module}weight_zero_point": zero}, config=config)
    for folder in (plain, found):
        done = CliRunner().invoke(main, ["dequantize", str(folder), "-o", f"{folder}-bf16", "-q"])
        assert done.exit_code == 0, done.output
    decoded = [load_file(Path(f"{folder}-bf16") / "model.safetensors") for folder in (plain, found)]
    assert decoded[0].keys() == decoded[1].keys()
    assert all(torch.equal(decoded[0][name], decoded[1][name]) for name in decoded[0])


def test_a_family_without_a_row_is_said_in_a_line_and_one_with_a_row_is_not(tmp_path: Path) -> None:
    known, unknown = (tiny.save(tmp_path / name, tiny.llama(layers=1)) for name in ("known", "unknown"))
    edit(unknown, model_type="newest")
    said = {}
    for folder in (known, unknown):
        done = CliRunner().invoke(main, ["convert", str(folder), "--dry-run"])
        assert done.exit_code == 0, done.output
        said[folder] = [line for line in done.output.splitlines() if "table of families" in line]
    assert said[known] == []
    assert len(said[unknown]) == 1
    assert "has no row for model_type 'newest': names and shapes alone decide" in said[unknown][0]


@pytest.mark.parametrize("model", ["an expert too few", "no zero points, compressed-tensors"])
def test_serve_refuses_it_before_it_loads(model: str, made: Callable[[str], Path]) -> None:
    options = ServeOptions(str(made(model)), port=0, dtype="float32", workers=1)
    with pytest.raises(PtqError) as caught, serving(options, log=lambda line: None):
        pass
    assert SAID[model][0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_may_be_a_part_of_a_model_is_said_and_not_refused(tmp_path: Path) -> None:
    """But for the multi-token prediction layer, which transformers drops, `verify` calls it a fault."""
    dropped_layer = families.make_model(tmp_path / "a", "deepseek_v3")  # as transformers saves it
    fewer = edit(families.make_model(tmp_path / "b", "glm4_moe"), num_hidden_layers=5, num_nextn_predict_layers=0)
    wider = edit(tiny.save(tmp_path / "c", tiny.llama()), hidden_size=192, intermediate_size=320)
    for folder, code, said in (
        (dropped_layer, 0, "says num_nextn_predict_layers 1, but the files have no layers.2; set it to 0"),
        (fewer, 1, "says num_hidden_layers 5, but the files have 2"),
        (wider, 1, "'model.embed_tokens.weight' is 96x128, and no number of config.json is 128"),
    ):
        for call in (("convert", "--scale-search", "absmax", "-o", str(tmp_path / "out"), "--overwrite"), ("inspect",)):
            done = CliRunner().invoke(main, [call[0], str(folder), *call[1:]])
            assert done.exit_code == 0, done.output
            assert said in done.output
        checked = CliRunner().invoke(main, ["verify", str(tmp_path / "out")])
        assert checked.exit_code == code
        assert said in checked.output


def test_what_is_right_is_not_doubted(tmp_path: Path) -> None:
    for kind in ("deepseek_v3", "qwen3_next", "qwen3_5_text"):
        folder = families.make_model(tmp_path / kind, kind, mtp=True)
        tensors = {name: ("BF16", tuple(x.shape)) for name, x in load_file(folder / "model.safetensors").items()}
        config = json.loads((folder / "config.json").read_text())
        check_config(config, tensors)
        assert doubts(config, tensors) == []


PICTURE = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "w3"}]}
# Row of data -> what calibrate says of it.
ROWS: dict[str, tuple[str, str]] = {
    "a file that is none": ("absent.png", "'absent.png' cannot be read: No such file or directory; check the path"),
    "no image": ("data.jsonl", "is none that can be decoded; expected PNG, JPEG"),
    "half an image": ("half.png", "does not decode"),
    "a URL": ("http://127.0.0.1/a.png", "which is never done"),
}


@pytest.mark.parametrize("row", ROWS)
def test_images_in_data_that_are_none_are_one_line(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = processors.add(images.make(tmp_path / "model", "llava"), "llava")
    place, said = ROWS[row]
    raw = processors.png(processors.picture(1))
    (tmp_path / "half.png").write_bytes(raw[: len(raw) // 2])
    assert said in _refused(model, place, tmp_path, monkeypatch)


def test_images_in_data_of_a_model_without_processor_or_tower_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = processors.add_tokenizer(images.make(tmp_path / "bare", "llava"))
    text = processors.add_tokenizer(tiny.save(tmp_path / "text", tiny.llama()))
    (tmp_path / "a.png").write_bytes(processors.png(processors.picture(1)))
    for model, said in (
        (bare, "has none of processor_config.json, preprocessor_config.json"),
        (text, "has an image, which only calibrate and tune take, for a model of images"),
    ):
        assert said in _refused(model, "a.png", tmp_path, monkeypatch)


def _refused(model: Path, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line of `calibrate` on a row with an image at ``place``; it has written nothing."""
    monkeypatch.chdir(folder)
    message = {**PICTURE, "content": [{"type": "image", "image": place}, PICTURE["content"][1]]}  # type: ignore[index]
    (folder / "data.jsonl").write_text(json.dumps({"messages": [message]}))
    done = CliRunner().invoke(main, ["calibrate", str(model), *DATA])
    assert isinstance(done.exception, SystemExit), done.exception
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1, done.output
    assert not [path for path in folder.iterdir() if "out" in path.name]
    return errors[0]


def test_an_image_for_a_model_of_text_is_a_400_of_one_line(tmp_path: Path) -> None:
    model = processors.add_tokenizer(tiny.save(tmp_path / "text", tiny.llama()))
    options = ServeOptions(str(model), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1)
    shown = {"type": "image_url", "image_url": {"url": processors.data_uri(processors.png(processors.picture(1)))}}
    body = {"messages": [{"role": "user", "content": [shown]}], "max_tokens": 2}
    with serving(options, log=lambda line: None) as url:
        found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 400
    assert "takes no images" in found.json()["error"]["message"]
