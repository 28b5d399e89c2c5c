"""config.json chooses no code and nothing of how a model runs, wherever in it the key is and whatever its value."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.errors import PtqError
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import create_config
from ptqpipe.runtime.loading import check_load, load, load_model, read_config
from ptqpipe.runtime.skeleton import Skeleton
from tests import image_text
from tests.calibration.models import make_model

PACKAGE = Path(ptqpipe.__file__).parent
DEMO = PACKAGE / "demo_model"
VALUES: tuple[Any, ...] = (
    "flash_attention_2", "eager", "flex_attention", "sdpa", "evil/kernels", "evil/kernels@v1:f", "paged|evil/kernels",
    "paged|sdpa", "batched_mm", "", 7, True, 1.5, {}, {"": "evil/kernels", "text_config": "eager"}, None, [], ["eager"],
)  # fmt: skip
KEYS = (
    "_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "_experts_implementation", "experts_implementation", "_experts_implementation_internal", "use_kernels",
    "kernel_config", "fusion_config", "distributed_config", "transformers_weights", "output_attentions",
    "output_hidden_states", "return_dict", "device_map", "auto_map", "configuration_files", "torchscript",
)  # fmt: skip


class Asked(BaseException):
    """The package ``kernels`` was asked for code, or another configuration was looked for."""


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package ``kernels`` is there, for transformers, and says so where it is asked for anything."""
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    package = ModuleType("kernels")

    def asked(*_: object, **__: object) -> None:
        raise Asked

    package.get_kernel = package.load_kernel = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda *_, **__: True)
    for name in ("get_kernel", "load_and_register_attn_kernel"):
        if hasattr(hub_kernels, name):
            monkeypatch.setattr(hub_kernels, name, asked)


def changed(source: Path, target: Path, choices: Mapping[str, Any]) -> Path:
    """A copy whose config.json has the choices at its top level and in each part of it that is an object."""

    def everywhere(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: everywhere(part) if key.endswith("_config") else part for key, part in value.items()} | choices

    shutil.copytree(source, target)
    file = target / "config.json"
    file.write_text(json.dumps(everywhere(json.loads(file.read_text()))))
    return target


def implementations(config: Any) -> list[Any]:
    """Those of a config and of all of its parts."""
    parts = [part for part in vars(config).values() if hasattr(part, "get_text_config")]
    return [
        config._attn_implementation,
        config._experts_implementation,
        *(x for p in parts for x in implementations(p)),
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of text, one of experts, one of images and text."""
    root = tmp_path_factory.mktemp("models")
    make_model(root / "mixtral", "mixtral")
    torch.manual_seed(0)
    config = image_text.make_config("qwen3_vl")
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(root / "qwen3_vl")
    return {"llama": DEMO, "mixtral": root / "mixtral", "qwen3_vl": root / "qwen3_vl"}


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_vl"])
def test_the_config_is_that_without_the_key(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"  # with config.json alone
    bare.mkdir()
    shutil.copyfile(models[kind] / "config.json", bare / "config.json")
    plain = {**create_config(models[kind]).to_dict(), "_name_or_path": None}
    for at, (key, value) in enumerate((key, value) for key in KEYS for value in VALUES):
        path = changed(bare, tmp_path / str(at), {key: value})
        found = read_config(path)
        assert {**found.to_dict(), "_name_or_path": None} == plain, (key, value)
        assert set(implementations(found)) == {None}, (key, value)
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["flash_attention_2", "eager", "evil/kernels@v1:f", 7, {}, []], ids=repr)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_vl"])
def test_models_compute_the_same_bits(models: dict[str, Path], kind: str, value: Any, tmp_path: Path) -> None:
    """Through each function that creates a model."""
    ids = torch.arange(3, 19)[None]

    def results(path: Path) -> list[Any]:
        found = []
        for make in (load_model, load, check_load):
            model = make(path)
            found.append((model.config._attn_implementation, model.config._experts_implementation))
            if make is not check_load:
                with torch.no_grad():
                    found.append(model(ids).logits)
        with Source.open(path) as source:
            for images in (False, True):
                model = Skeleton.of(source, dtype=torch.float32, images=images).model
                found.append((model.config._attn_implementation, model.config._experts_implementation))
        return found

    expected, seen = results(models[kind]), results(changed(models[kind], tmp_path / "m", dict.fromkeys(KEYS, value)))
    for a, b in zip(expected, seen, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _statistics(model: Path, out: Path) -> Any:
    ptqpipe.calibrate(model, DEMO / "heldout.txt", out, samples=2, seqlen=16, holdout=1, progress=False)
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}


def _text(model: Path, out: Path) -> Any:
    ptqpipe.generate(model, out.with_suffix(".jsonl"), samples=1, seqlen=8, progress=False)
    return out.with_suffix(".jsonl").read_bytes()


def _measured(model: Path, out: Path) -> Any:
    options: dict[str, Any] = {"max_tokens": 100, "progress": False, "cache_size": 0}
    file = out.with_suffix(".eval.json")
    ptqpipe.evaluate(model, DEMO / "heldout.txt", source=model, out=file, **options)
    return json.loads(file.read_text())["perplexity"]


def _codes(model: Path, out: Path) -> Any:
    options: dict[str, Any] = {"samples": 8, "seqlen": 16, "quality": "best", "progress": False}
    ptqpipe.convert(model, out=out, data=DEMO / "heldout.txt", **options)
    return {name: x.view(torch.uint8).tolist() for name, x in sorted(load_file(out / "model.safetensors").items())}


@pytest.mark.slow
@pytest.mark.parametrize("run", [_statistics, _text, _measured, _codes])
def test_commands_give_the_same_bytes(run: Callable[[Path, Path], Any], tmp_path: Path) -> None:
    expected = run(DEMO, tmp_path / "plain")
    for at, value in enumerate(("evil/kernels", "flash_attention_2", "eager", {}, 7)):
        model = changed(DEMO, tmp_path / f"m{at}", dict.fromkeys(KEYS, value))
        assert run(model, tmp_path / f"o{at}") == expected, value


GARBAGE: tuple[Any, ...] = ({}, {"a": 1}, [], "x", -3, 1.5, True, None, "\x1b[31m", "a\nb")


@pytest.mark.parametrize("key", [
    "model_type", "architectures", "num_hidden_layers", "hidden_size", "hidden_act", "vocab_size", "rope_parameters",
    "rope_scaling", "max_position_embeddings", "num_key_value_heads", "head_dim", "torch_dtype", "dtype",
    "tie_word_embeddings", "get_text_config", "to_dict", "layer_types", "attribute_map", "text_config", "rms_norm_eps",
    "pad_token_id", "is_encoder_decoder", "name_or_path", "sliding_window", "attention_bias", "id2label",
])  # fmt: skip
def test_values_of_other_kinds_are_one_line_or_do_no_harm(key: str, tmp_path: Path) -> None:
    def layers(path: Path) -> None:
        with Source.open(path) as source:
            Skeleton.of(source, dtype=torch.float32)

    for at, value in enumerate(GARBAGE):
        path = shutil.copytree(DEMO, tmp_path / str(at))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, key: value}))
        for make in (load_model, check_load, layers):
            line = _refusal(lambda make=make, path=path: make(path))
            assert line.isprintable(), (key, value)
            assert not line or "config.json" in line or str(path) in line or "LlamaForCausalLM" in line, (value, line)


def _refusal(call: Callable[[], object]) -> str:
    """The message of the PtqError that a call raises; empty where it raises none."""
    try:
        call()
    except PtqError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "says", "never"),
    [
        ({"model_type": "my_llama", "auto_map": {"AutoConfig": "a.B"}}, "such code is never run; convert it", "update"),
        ({"model_type": "my_llama", "auto_map": 5}, "such code is never run; convert it", "update"),
        ({"model_type": "lama"}, "did you mean llama?", "auto_map"),
        ({"model_type": "wholly_new_2027"}, "update transformers, or convert it", "auto_map"),
        ({"model_type": None}, "has model_type None", "update"),
        ({"model_type": {}}, "has model_type {}", "update"),
        ({"num_hidden_layers": "x"}, "correct that value", "update"),
        ({"hidden_act": "nosuch"}, "its values contradict each other", "update"),
    ],
)
def test_a_remedy_fits_its_cause(changes: dict[str, Any], says: str, never: str, tmp_path: Path) -> None:
    path = shutil.copytree(DEMO, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    for make in (load_model, check_load):
        with pytest.raises(PtqError) as caught:
            make(path)
        assert says in str(caught.value)
        assert never not in str(caught.value)


def test_a_family_with_a_rule_of_its_own_keeps_it(tmp_path: Path) -> None:
    """transformers takes a Mistral with kinds of layers for another type, from the file alone."""
    transformers.MistralConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "layer_types": ["full_attention"] * 2}))
    assert read_config(tmp_path).model_type == transformers.AutoConfig.from_pretrained(tmp_path).model_type


def test_no_other_file_asks_transformers_for_a_config_or_an_empty_model() -> None:
    asks = re.compile(r"AutoConfig|\b_from_config\(|\bfrom_config\(|AutoModel\w*\s*[,)]")
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if asks.search(p.read_text(encoding="utf-8"))}
    assert found == {"runtime/creating.py"}
