"""Claims about calls that go wrong: each ends with its exit code and one line that says what to do instead.

A table of calls, run in this process in a folder with a model and what is not one. `tests/cli` has those of a
wrong output and of options that contradict each other.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ptqpipe.cli import main
from tests import tiny

COMMIT = "0" * 40


def run(*call: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in call])


def refused(*call: str, code: int) -> str:
    """The one line of a call that is refused, click's two lines on usage aside."""
    done = run(*call)
    assert isinstance(done.exception, SystemExit), done.exception
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert (done.exit_code, len(lines), done.stdout) == (code, 1, ""), done.output
    assert lines[0].startswith("Error")
    return lines[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, what was made of it and of another one, and folders that are no model. No call may change any of it."""
    at = tmp_path_factory.mktemp("calls")
    for seed, name in enumerate(("model", "other")):
        config = {**tiny.LLAMA_CONFIG, "num_hidden_layers": 1}
        tiny.save(at / name, tiny.llama(seed=seed, layers=1), config=config)
    assert run("convert", at / "model", "-o", at / "model-NVFP4A16", "-q").exit_code == 0
    (at / "m.gguf").write_bytes(b"GGUF")
    (at / "gguf").mkdir()
    (at / "gguf" / "m.gguf").write_bytes(b"GGUF")
    (at / "text.txt").write_text("some text")
    (at / "empty.yaml").touch()
    (at / "few.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    shutil.copytree(at / "model", at / "images")
    images = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": tiny.LLAMA_CONFIG,
    }
    (at / "images" / "config.json").write_text(json.dumps(images))
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": torch.randn(32, 32) for i in (0, 1, 3)}
    tiny.save(at / "too-few", experts, config={"model_type": "qwen3_moe", "num_experts": 4})
    tower = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(32, 32),
        "visual.blocks.0.attn.proj.weight": torch.ones(8, 8),
    }
    tiny.save(at / "tower", tower, config={"model_type": "qwen3_vl", "text_config": {}, "image_token_id": 5})
    (at / "recipe.yaml").write_text("version: 1\nrules:\n- {match: '*', format: nvfp4, algoritm: gptq}\n")
    return at


CONVERT = ("convert", "model", "-o", "out")
PLAN = ("plan", "model", "--budget", "5bits", "-o", "out.yaml")
LIKE = "such integers are not offered, the nearest is"
CALLS: list[tuple[tuple[str, ...], int, str]] = [
    ((*CONVERT, "--format", "nvfp5"), 2, "unknown format 'nvfp5'; did you mean nvfp4? known are nvfp4, nvfp4_w4a4"),
    ((*CONVERT, "--format", "w3a16"), 2, f"{LIKE} int4_g128; known are"),
    ((*CONVERT, "--format", "Q4_K_M"), 2, "did you mean int4_g128?"),
    ((*CONVERT, "--format", "Q5_K_M"), 2, f"{LIKE} int4_g128; "),
    ((*CONVERT, "--format", "W8A8_INT"), 2, "did you mean int8_w8a8?"),
    ((*CONVERT, "--format", "w4a4"), 2, "did you mean nvfp4_w4a4?"),
    ((*CONVERT, "--format", "fp4"), 2, "did you mean nvfp4?"),
    ((*CONVERT, "--format", "gibberish"), 2, "unknown format 'gibberish'; known are nvfp4"),
    ((*CONVERT, "--container", "compressed"), 2, "did you mean compressed_tensors? known are"),
    ((*CONVERT, "--scale-search", "exakt"), 2, "did you mean exact?"),
    ((*CONVERT, "--algorithm", "awq"), 2, "ptqpipe transform MODEL --transforms awq"),
    ((*CONVERT, "--algorithm", "learned"), 2, "ptqpipe tune MODEL --data TEXT -o codes"),
    ((*CONVERT, "--algorithm", "gtpq"), 2, "'rtn', 'gptq'"),
    ((*CONVERT, "--fromat", "nvfp4"), 2, "--format"),
    ((*CONVERT, "--scheme", "nvfp4"), 2, "No such option '--scheme'. Did you mean '--format'?"),
    ((*CONVERT, "--calib_data", "text.txt"), 2, "Did you mean '--data'?"),
    (("relayout", "model"), 2, "Missing option '--container'. Layout to write; `ptqpipe formats` lists them"),
    (("plan", "model", "-o", "r.yaml"), 2, "Missing option '--budget'. Bits per weight, or the size"),
    (("plan", "model", "--budget", "2TB", "-o", "out.yaml"), 2, "--budget 2TB has room for every weight as it is"),
    (("plan", "model", "--budget", "16bits", "-o", "out.yaml"), 2, "--budget 16bits has room for every weight as it"),
    ((*CONVERT, "--budget", "16bits"), 2, "--budget 16bits has room for every weight as it is"),
    (("recipes", "nvfp4_gtpq"), 2, "unknown recipe 'nvfp4_gtpq'; did you mean nvfp4_gptq or"),
    (("recipes", "llama"), 2, "did you mean llama4 or llama3? `ptqpipe recipes` lists all"),
    (("recipes", "gibberish"), 2, "unknown recipe 'gibberish'; name a YAML file, or a recipe that `ptqpipe"),
    ((*CONVERT, "--recipe", "gibberish"), 2, "recipe gibberish does not exist; name a YAML file, or a recipe"),
    ((*CONVERT, "--recipe", "lama3.yaml"), 2, "recipe lama3.yaml does not exist; did you mean llama3 or"),
    ((*CONVERT, "--recipe", "nvfp4"), 2, "nvfp4 is a format: give --format nvfp4"),
    ((*CONVERT, "--recipe", "nvfp4_gtpq"), 2, "did you mean nvfp4_gptq or"),
    (("convert", "--model", "model"), 2, "No such option '--model'. Name it without one: main convert MODEL"),
    ((*CONVERT, "--budget", "1GB", "--data", "self"), 2, "--budget 1GB changes nothing: model has"),
    ((*CONVERT, "--algorithm", "gptq"), 2, "--data TEXT without --algorithm does it all at once"),
    (("serve", "model", "--host", "nowhere.invalid"), 2, "choose another --host"),
    ((*CONVERT, "--ignore", "down_proj"), 2, "did you mean '*down_proj'?"),
    ((*CONVERT, "--recipe", "recipe.yaml"), 2, "unknown key 'algoritm'; did you mean algorithm?"),
    ((*CONVERT, "--mtp", "fp8"), 2, "--mtp fp8: model has no multi-token prediction layer; leave it out"),
    ((*CONVERT, "--mtp", "fp4"), 2, "'keep', 'fp8', 'nvfp4'"),
    ((*CONVERT, "--mtp", "fp8", "--budget", "5bits"), 2, "--budget chooses the formats, and --mtp fp8 does"),
    ((*CONVERT, "--max-memory", "350MiB"), 2, "--max-memory 350MiB is too small"),
    (("convert", "modle", "-o", "out"), 2, "did you mean 'model'?"),
    (("convert", "./modle", "-o", "out"), 2, "does not exist, and is not a hub name like 'owner/model'; did you mean"),
    (("convert", "m.gguf", "-o", "out"), 2, "is GGUF, which is not read; take the folder of the original model"),
    (("inspect", "text.txt"), 2, "'text.txt' is a file, expected a model: its folder, or its name on the hub"),
    (("inspect", "model/config.json"), 2, "is a file, expected the folder that holds it"),
    ((*CONVERT, "--shard-size", "0"), 2, "--shard-size 0 cannot hold anything; write a size"),
    ((*CONVERT, "--recipe", "empty.yaml"), 2, "the recipe is empty; `ptqpipe recipes NAME` prints an example"),
    ((*CONVERT, "--text-field", "body"), 2, "--text-field body says how --data is read; add --data FILE"),
    (
        (*CONVERT, "--data", "few.jsonl", "--text-field", "body"),
        2,
        "has input_ids, not 'body'; choose one with --text-field",
    ),
    (("convert", "gguf", "-o", "out"), 1, "holds GGUF, which is not read; take the folder of the original model"),
    (
        ("convert", "model-NVFP4A16", "-o", "out"),
        2,
        "converting it to nvfp4 can only add error: use `ptqpipe relayout`",
    ),
    (("convert", "too-few", "-o", "out"), 1, "mlp.experts has 3 experts (there is no model.layers.0.mlp.experts.2)"),
    (("plan", "too-few", "--budget", "5bits", "-o", "out.yaml"), 1, "and config.json says num_experts 4; download"),
    (("convert", "tower", "-o", "out"), 1, "has a text_config and no vision_config, but the files hold a vision tower"),
    (("convrt", "model"), 2, "convert"),
    (("model",), 2, "to quantize that model: ptqpipe convert model"),
    (("convert", ".", "-o", "/dev/null/out"), 1, "has no .safetensors files itself; did you mean 'images'?"),
    ((*CONVERT, "--stats", "modle"), 2, "did you mean 'model'?"),
    ((*CONVERT, "--codes", "codes"), 2, "give the folder that this wrote: ptqpipe tune MODEL --data TEXT"),
    (("calibrate", "model", "--data", "txet.txt", "-o", "out"), 2, "did you mean 'text.txt'?"),
    (("transform", "model", "--transforms", "awk", "-o", "out"), 2, "did you mean awq? known are"),
    (("transform", "model", "--transforms", "awq", "-o", "out"), 2, "ptqpipe calibrate model --data TEXT --out STATS"),
    (("report", "model", "--eval", "recipe.yml"), 2, "expected a file; did you mean 'recipe.yaml'?"),
    (("verify", "model-NVFP4A61"), 2, "did you mean 'model-NVFP4A16'?"),
    (("verify", "m.gguf"), 2, "is GGUF, which is not read"),
    (("verify", "owner/absent"), 2, "neither a local folder nor in the hub's cache"),
    (("inspect", "./model-NVFP4A61"), 2, "did you mean"),
    (("diff", "model", "modle"), 2, "did you mean 'model'?"),
    (("serve", "modle"), 2, "did you mean 'model'?"),
    (("chat", "modle"), 2, "did you mean 'model'?"),
    (("serve", "gguf"), 1, "GGUF"),
    (("serve", "model", "--engine", "vllm"), 2, "pip install --no-deps /"),
    (("serve", "model", "--speculative", "mtp", "--port", "0"), 2, "no multi-token prediction layer is known"),
    (("serve", "model", "--speculative", "mtp", "--tp", "2", "--port", "0"), 2, "on one rank, not on 2; leave it or"),
    (("serve", "model", "--speculative", "eagle"), 2, "'mtp'"),
    (("serve", "model", "--speculative-tokens", "2"), 2, "add --speculative mtp"),
    (("serve", "model", "--speculative", "mtp", "--speculative-tokens", "0"), 2, "out of range; use 1 or more"),
    (("serve", "images", "--port", "8017"), 1, "has no tokenizer that transformers reads"),
    (("eval", "images", "--data", "text.txt"), 1, "has no tokenizer that transformers reads"),
    (("calibrate", "images", "--data", "text.txt", "-o", "out"), 1, "has no tokenizer that transformers reads"),
    (("tune", "images", "--data", "text.txt", "-o", "out"), 1, "has no tokenizer that transformers reads"),
    (("calibrate", "model", "--data", "text.txt", "-o", "out"), 1, "it has none of tokenizer.json"),
    (("calibrate", "model", "--data", "self", "-o", "out"), 2, "--data self is an option of convert; here"),
    (("tune", "model", "--data", "self=2", "-o", "out"), 2, "ptqpipe generate MODEL --out own.jsonl"),
    (("serve", "model"), 1, "it has none of tokenizer.json"),
    (("plan", "model", "--budget", "4.75", "-o", "out.yaml"), 2, "write 4.75bits"),
    ((*CONVERT, "--data", "few.jsonl", "--samples", "0"), 2, "--samples 0 "),
    ((*CONVERT, "--data", "self", "--samples", "0"), 2, "--samples 0 "),
    ((*CONVERT, "--data", "few.jsonl", "--seqlen", "16"), 2, "give 3 tokens, 0 windows of 16, expected 128"),
    (("tune", "model", "--data", "few.jsonl", "--samples", "0", "-o", "out"), 2, "--samples 0 "),
    (("generate", "model", "--seed", f"{10**22}", "-o", "out.jsonl"), 2, f"--seed {10**22} is out of range; use 0 to"),
    (("calibrate", "model", "--data", "few.jsonl", "--seed", f"{10**22}", "-o", "out"), 2, "is out of range; use 0"),
    (("tune", "model", "--data", "few.jsonl", "--seed", f"{10**22}", "-o", "out"), 2, "is out of range; use 0 to"),
    (("calibrate", "model", "--data", "few.jsonl", "--seed", "-1", "-o", "out"), 2, "--seed -1 is out of range; use 0"),
    ((*CONVERT, "--data", "few.jsonl", "--seed", f"{10**22}"), 2, "is out of range; use 0 to"),
    ((*PLAN, "--measure", "few.jsonl", "--seqlen", "0"), 2, "--seqlen 0: expected 2 or more"),
    ((*PLAN, "--measure", "few.jsonl", "--seqlen", f"{10**6}"), 2, "is more than the model's"),
    (("generate", "model", "--samples", "0", "-o", "out.jsonl"), 2, "--samples 0 "),
    (("convert", "model", "-o", ""), 2, "'-o' / '--out': the name is empty"),
    (("convert", "model", "--overwrite", "-o", ""), 2, "is a variable of the shell not set?"),
    (("transform", "model", "--transforms", "rotate", "-o", ""), 2, "the name is empty"),
    (("convert", ""), 2, "the model's name is empty"),
    (("verify", ""), 2, "the model's name is empty"),
    (("verify", "model-NVFP4A16", "--source", ""), 2, "'--source': the model's name is empty"),
    (("report", "model-NVFP4A16", "--eval", ""), 2, "'--eval': the name is empty"),
    (("calibrate", "model", "--data", "", "-o", "out"), 2, "a name in --data is empty"),
    ((*CONVERT, "--container", "gguf"), 2, "deepseek_fp8, gptoss_mxfp4, modelopt, mxfp8_hf, ptqpipe"),
]


@pytest.mark.parametrize(("call", "code", "words"), CALLS, ids=[" ".join(call) for call, _, _ in CALLS])
def test_a_wrong_call_is_one_line_that_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...], code: int, words: str
) -> None:
    monkeypatch.chdir(folder)
    before = {path.name for path in folder.iterdir()}
    assert words in refused(*call, code=code)
    assert {path.name for path in folder.iterdir()} == before


def test_an_empty_key_in_the_environment_is_no_service_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PTQPIPE_API_KEY", "")
    for command in (("serve", "model"), ("chat", "model")):
        assert "PTQPIPE_API_KEY in the environment is empty" in refused(*command, code=2)


@pytest.mark.parametrize(
    ("command", "former", "name"),
    [
        ("convert", "--rounding", "--codes"),
        ("convert", "--for", "--reader"),
        ("transform", "--block", "--rotation-size"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_one_here(command: str, former: str, name: str) -> None:
    assert f"Did you mean '{name}'?" in refused(command, "model", former, "x", code=2)


def test_a_list_without_a_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = refused("convert", "model", "--budget", "5bits", "--formats", ",", code=2)
    assert "--formats names nothing; give a name" in said


def test_what_a_conversion_alone_takes_names_the_option_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    said = refused("convert", "model", "--stats", "s", "--formats", "nvfp4", code=2)
    assert "--stats is for a conversion alone, and --formats for one with data" in said


WRITE = [
    CONVERT[:2],
    (*CONVERT[:2], "--budget", "5bits"),
    ("calibrate", "model", "--data", "few.jsonl"),
    ("tune", "model", "--data", "few.jsonl", "--samples", "1"),
    ("transform", "model", "--transforms", "rotate", "--untie"),
    ("relayout", "model-NVFP4A16", "--container", "modelopt"),
    ("dequantize", "model-NVFP4A16"),
    ("demo",),
    ("generate", "model", "--samples", "1", "--seqlen", "8"),
    ("plan", "model", "--budget", "5bits"),
    ("report", "model-NVFP4A16"),
    ("eval", "model-NVFP4A16", "--data", "text.txt"),
]
ENDINGS = {"generate": ".jsonl", "plan": ".yaml", "report": ".html", "eval": ".json"}
PLACES = {"/proc/x": "'/proc' is not writable", "text.txt/x": "text.txt' is a file"}


@pytest.mark.parametrize("call", WRITE, ids=[" ".join(call) for call in WRITE])
@pytest.mark.parametrize("out", PLACES)
def test_a_place_where_nothing_can_be_written_is_named_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...], out: str
) -> None:
    monkeypatch.chdir(folder)
    before = {path.name for path in folder.iterdir()}
    said = refused(*call, "-o", f"{out}{ENDINGS.get(call[0], '')}", code=2)
    assert PLACES[out] in said
    assert "another --out" in said
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("package", "call", "words"),
    [
        ("scipy", ("plan", "model", "--budget", "5bits", "-o", "out.yaml"), "ptqpipe plan needs scipy"),
        ("jinja2", ("report", "model-NVFP4A16"), "ptqpipe report needs jinja2"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, call: tuple[str, ...], words: str
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(folder)
    assert f"{words}; install it with: pip install 'ptqpipe[" in refused(*call, code=2)


def test_a_source_that_is_another_model_is_said_first_and_few_faults_follow(folder: Path) -> None:
    done = run("verify", folder / "model-NVFP4A16", "--source", folder / "other")
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert lines[0].startswith(f"{folder / 'other'} is not the model that {folder / 'model-NVFP4A16'} was made from")
    faults = [line for line in lines if line.startswith("  [")]
    assert 1 <= len(faults) <= 10
    every = run("verify", folder / "model-NVFP4A16", "--source", folder / "other", "--all-faults").stdout.splitlines()
    found = json.loads(run("verify", folder / "model-NVFP4A16", "--source", folder / "other", "--json").stdout)
    listed = every[every.index("faults:") + 1 :]
    assert listed.index("") == len(found["faults"])
    assert found["source_is_another_model"]
    good = run("verify", folder / "model-NVFP4A16", "--source", folder / "model")
    assert (good.exit_code, good.stdout.splitlines()[0].split()[0]) == (0, str(folder / "model-NVFP4A16"))


def test_a_source_that_is_no_model_is_the_only_fault(folder: Path) -> None:
    done = run("verify", folder / "model-NVFP4A16", "--source", folder / "gguf")
    assert done.exit_code == 1
    assert "GGUF, which is not read" in done.stdout
    assert "1 fault," in done.stdout.splitlines()[-1]


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub, offline, that holds owner/model and owner/quantized; the working folder is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name, path in (("model", "model"), ("quantized", "model-NVFP4A16")):
        repository = tmp_path / "cache" / f"models--owner--{name}"
        shutil.copytree(folder / path, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_a_hub_name_stands_wherever_a_model_or_a_checkpoint_is_named(hub: Path) -> None:
    for call in (
        ("verify", "owner/quantized", "--source", "owner/model"),
        ("inspect", "owner/quantized"),
        ("diff", "owner/quantized", "owner/quantized"),
        ("report", "owner/quantized", "--source", "owner/model"),
        ("relayout", "owner/quantized", "--container", "modelopt", "-q"),
        ("dequantize", "owner/quantized", "-q"),
        ("convert", "owner/model", "--format", "mxfp4", "-q"),
    ):
        assert run(*call).exit_code == 0, call
    written = {"quantized.report.html", "quantized-modelopt", "quantized-bf16", "model-MXFP4"}
    assert {path.name for path in hub.iterdir()} == written


def test_serve_and_eval_take_a_hub_name(hub: Path) -> None:
    """They get as far as the tokenizer, which this model has none of; the folder of the snapshot is named."""
    for call in (
        ("serve", "owner/quantized"),
        ("eval", "owner/quantized", "--source", "owner/model", "--data", __file__),
    ):
        assert "it has none of tokenizer.json" in refused(*call, code=1)


def test_completion_of_a_line_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptqpipe.checkpoint.resolve_source", lambda *_: pytest.fail("fetched"))
    main.commands["verify"].make_context("verify", ["owner/quantized"], resilient_parsing=True).close()


def test_quantize_is_convert(folder: Path, tmp_path: Path) -> None:
    assert run("quantize", folder / "model", "-o", tmp_path / "out", "-q").exit_code == 0
    assert (tmp_path / "out" / "ptqpipe.json").read_bytes() == (folder / "model-NVFP4A16" / "ptqpipe.json").read_bytes()
    assert "quantize " not in run("--help").stdout.partition("dequantize")[0]
