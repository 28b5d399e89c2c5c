"""Claims about the last lines of commands for each kind of model: they offer what works for it, and nothing else."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.check.report.find import find_source
from ptqpipe.cli import main
from ptqpipe.models.model_kind import continues_text
from tests import tiny

DEMO = Path(ptqpipe.__file__).parent / "demo_model"

# (architectures, model_type, further keys) -> whether the model continues text
KINDS: list[tuple[list[str] | None, str, dict[str, Any], bool]] = [
    (["LlamaForCausalLM"], "llama", {}, True),
    (["GPT2LMHeadModel"], "gpt2", {}, True),
    (["Gemma3ForConditionalGeneration"], "gemma3", {"text_config": {"model_type": "gemma3_text"}}, True),
    (["MyModelForCausalLM"], "my_model", {}, True),
    (None, "llama", {}, True),
    (["Qwen3Model"], "qwen3", {}, False),
    (["Qwen3ForSequenceClassification"], "qwen3", {}, False),
    (["LlamaForTokenClassification"], "llama", {}, False),
    (["Qwen2ForRewardModel"], "qwen2", {}, False),
    (["BertForMaskedLM"], "bert", {}, False),
    (["BertModel"], "bert", {}, False),
    (["ViTForImageClassification"], "vit", {}, False),
    (["CLIPModel"], "clip", {}, False),
    (["WhisperForConditionalGeneration"], "whisper", {}, False),
    (["T5ForConditionalGeneration"], "t5", {}, False),
    (["BartForConditionalGeneration"], "bart", {}, False),
    (["NewForConditionalGeneration"], "new_pair", {"is_encoder_decoder": True}, False),
]


def source(folder: Path, config: dict[str, Any], *, words: bool = True) -> Path:
    tiny.save(folder, tiny.llama(layers=1, hidden=64, inner=128), config=config)
    for name in ("tokenizer.json", "tokenizer_config.json") if words else ():
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def offered(*words: object) -> list[list[str]]:
    done = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert "Error" not in done.output, done.output
    _, head, tail = done.stdout.rpartition("Next: ")
    if not head:
        return []
    return [shlex.split(line)[:2] for line in tail.splitlines()]


@pytest.mark.parametrize(("named", "kind", "more", "writes"), KINDS, ids=lambda value: str(value)[:40])
def test_commands_offer_what_works(
    named: list[str] | None, kind: str, more: dict[str, Any], writes: bool, tmp_path: Path
) -> None:
    config = {"model_type": kind, **more} | ({} if named is None else {"architectures": named})
    model, out = source(tmp_path / "m", config), tmp_path / "o"
    assert continues_text(model) == writes
    serves = [["ptqpipe", "serve"], ["vllm", "serve"]] if writes else []
    assert offered("convert", model, "-o", out) == [["ptqpipe", "eval" if writes else "verify"], *serves]
    assert offered("relayout", out, "--container", "modelopt", "-o", tmp_path / "r") == [["ptqpipe", "diff"], *serves]
    assert offered("dequantize", out, "-o", tmp_path / "d") == [["ptqpipe", "diff"], *serves[1:]]
    checked = CliRunner().invoke(main, ["verify", str(out), "--source", str(model)])
    words = checked.stdout.rpartition("Next: ")[2].split() if "Next: " in checked.stdout else []
    sound = checked.exit_code == 0  # not where transformers knows the class, whose tensors these are not
    assert [word for word in words if word in ("eval", "serve")][:1] == (["eval"] if writes and sound else [])


def test_without_a_tokenizer_it_is_said_and_nothing_is_offered_that_needs_one(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model = source(tmp_path / "m", config, words=False)
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "o")])
    assert f"warning: {model} has no tokenizer: eval, serve and vLLM need" in done.stderr
    assert done.stdout[done.stdout.index("Next: ") :].split()[:3] == ["Next:", "ptqpipe", "verify"]
    encoder = source(tmp_path / "e", {"model_type": "vit", "architectures": ["ViTModel"]}, words=False)
    assert "tokenizer" not in CliRunner().invoke(main, ["convert", str(encoder), "-o", str(tmp_path / "f")]).stderr


def test_a_format_that_vllm_computes_otherwise_is_not_offered_to_it(tmp_path: Path) -> None:
    model = source(tmp_path / "m", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    calls = offered("convert", model, "--format", "mxfp4a16", "-o", tmp_path / "o")
    assert calls == [["ptqpipe", "eval"], ["ptqpipe", "serve"]]


def test_two_quantized_checkpoints_are_measured_against_their_source(tmp_path: Path) -> None:
    tmp_path = tmp_path / "alone" / "here"  # folders beside it are looked into
    model = source(tmp_path / "m", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    for name, scheme in (("a", "nvfp4"), ("b", "fp8")):
        ptqpipe.convert(model, out=tmp_path / name, format=scheme, progress=False)
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    lines = done.stdout[done.stdout.rindex("Next: ") + 6 :].splitlines()
    wanted = [["ptqpipe", "eval", str(tmp_path / name), "--source", str(model)] for name in "ab"]
    assert [shlex.split(line) for line in lines] == wanted
    shutil.rmtree(model)
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "Next: " not in done.stdout


def test_a_source_in_a_folder_beside_is_known_by_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(DEMO, tmp_path / "models" / "demo")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ptqpipe.convert(model, out=Path("q"), progress=False)
    assert find_source(Path("q")) == model
    (model / "model.safetensors").rename(tmp_path / "gone.safetensors")
    assert find_source(Path("q")) is None


def test_a_folder_of_tensors_that_is_no_model_has_no_next_step(tmp_path: Path) -> None:
    """As the statistics of calibrate and the codes of tune are."""
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64))
    tensors = tmp_path / "tensors"
    tensors.mkdir()
    shutil.copyfile(model / "model.safetensors", tensors / "model.safetensors")
    assert f"Next: ptqpipe convert {model}" in CliRunner().invoke(main, ["inspect", str(model)]).output
    assert "Next:" not in CliRunner().invoke(main, ["inspect", str(tensors)]).output
