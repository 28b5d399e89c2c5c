"""The command line: whatever is typed wrong is one clear line with the right exit code, and nothing is lost."""

import json
import os
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.calls import refused, run

BAD_CONVERTS: list[tuple[tuple[str, ...], str]] = [
    (("model", "-o", "file"), "is a file"),
    (("model", "-o", "file", "--overwrite"), "is a file"),
    (("model", "-o", "file/out"), "is a file"),
    (("model", "-o", "model/out"), "overlap"),
    (("model", "-o", "."), "overlap"),
    (("model", "-o", "/"), "root folder"),
    (("model", "-o", "~no-such-user/out"), "home directory"),
    (("model", "-o", "x" * 300), "too long"),
    (("model", "-o", "/proc/out"), "is not writable"),
    (("model", "-o", "empty/../pickled"), "is not empty"),
    (("model", "-o", "pickled", "--overwrite"), "no model that --overwrite may replace"),
    (("file",), "is a file"),
    (("model/config.json",), "is a file"),
    (("empty",), "has nothing"),
    (("pickled",), "save_pretrained"),
    (("",), "name is empty"),
    (("nobody/no-such-model",), "neither a local folder nor in the hub's cache"),
    (("no such model",), "does not exist"),
    (("~no-such-user/model",), "home directory"),
    (("x" * 5000,), "too long"),
    (("model", "--shard-size", "0"), "--shard-size 0"),
    (("model", "--shard-size", "9" * 400), "more than any machine has"),
    (("model", "--max-memory", "abc"), "not a size"),
    (("model", "--max-memory", "-1"), "not a size"),
    (("model", "--workers", "none"), "not a valid integer"),
    (("model", "--device", "cuda:x"), "unknown"),
    (("model", "--ignore", "re:("), "not a regular expression"),
    (("model", "--ignore", ""), "empty pattern"),
    (("model", "--ignore", "*"), "nothing would be quantized"),
    (("model", "--ignore", "lm-head"), "did you mean 'lm_head'?"),
    (("model", "--recipe", "."), "it is a folder"),
    (("model", "--recipe", "file"), "must be a mapping"),
    (("model", "--recipe", "file", "--format", "mxfp4"), "contradict"),
    (("model", "--format", ""), "unknown format ''"),
    (("model", "--format", f"e2m1/{'9' * 5000}/e4m3"), "unknown format"),
    (("model", "--format", "e2m1/7/e4m3"), "nothing would be quantized"),
    (("model", "--scale-search", ""), "unknown search ''"),
    (("model", "--scale-search", "_grid"), "unknown search '_grid'"),
    (("model", "--container", ""), "unknown container ''"),
    (("model", "--container", "__init__"), "unknown container"),
    (("model", "--container", "deepseek_fp8"), "deepseek_fp8 stores fp8_block only"),
    (("model", "--format", "e2m1/8/ue5m3", "--container", "modelopt"), "ModelOpt"),
    (("model", "--input-amax", "nan"), "a number above 0 and below 1e30"),
]


@pytest.mark.parametrize(("args", "words"), BAD_CONVERTS, ids=[" ".join(args)[:60] for args, _ in BAD_CONVERTS])
def test_a_bad_call_of_convert_is_one_line_and_leaves_everything_as_it_was(
    here: Path, args: tuple[str, ...], words: str
) -> None:
    before = tiny.bytes_of(here)
    assert words in refused("convert", *args)
    assert words in refused("convert", *args, "--json")
    assert tiny.bytes_of(here) == before
    assert {path.name for path in here.iterdir()} == {"model", "file", "file.jsonl", "empty", "pickled"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE in the environment is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment is '0', expected a number of 1 or more"),
        ({"WORLD_SIZE": "2"}, "RANK in the environment is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK in the environment is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 of WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "does not reach the others"),
        ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_one_line(here: Path, env: dict[str, str], words: str) -> None:
    assert words in refused("convert", "model", "-o", "out", env=env)
    assert not list(here.glob("*out*"))


def bad_checkpoints(here: Path) -> dict[str, Path]:
    """Folders that are no checkpoint of ours, by what is wrong with them."""
    good = (here / "good" / "model.safetensors").read_bytes()
    made = {name: here / name for name in ("garbage", "cut", "listed")}
    for name, weights in (("garbage", os.urandom(999)), ("cut", good[: len(good) // 2]), ("listed", good)):
        made[name].mkdir()
        (made[name] / "model.safetensors").write_bytes(weights)
        (made[name] / "config.json").write_text("[]" if name == "listed" else "{}")
    return {**made, "empty": here / "empty"}


def test_commands_on_what_is_no_checkpoint_are_one_line_each(here: Path) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    for path in bad_checkpoints(here).values():
        before = {entry.name for entry in here.iterdir()}
        refused("inspect", path)
        refused("inspect", path, "--json")
        refused("diff", path, "good")
        refused("diff", "good", path)
        refused("relayout", path, "--container", "modelopt")
        refused("dequantize", path)
        for args in ((path,), ("good", "--source", path)):
            result = run("verify", *args)
            assert result.exit_code == 1
            assert result.output.count("[open]") == 1
            assert json.loads(run("verify", *args, "--json").stdout)["faults"]
        assert {entry.name for entry in here.iterdir()} == before


@pytest.mark.parametrize("kind", ["nothing", "file", "x" * 300, "no\nline"])
def test_a_checkpoint_that_is_no_folder_ends_every_command_with_exit_code_2(here: Path, kind: str) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    before = tiny.bytes_of(here)
    for command in (
        ("inspect", kind),
        ("diff", kind, "good"),
        ("diff", "good", kind),
        ("relayout", kind, "--container", "modelopt"),
        ("dequantize", kind),
        ("verify", kind),
        ("verify", "good", "--source", kind),
        ("report", kind),
        ("report", "good", "--source", kind),
        ("report", "good", "--eval", kind if kind != "file" else "empty"),
        ("convert", kind, "-o", "out"),
    ):
        refused(*command)
        assert run(*command).exit_code == 2, command
    assert tiny.bytes_of(here) == before


def test_a_plain_checkpoint_is_told_from_a_converted_one(here: Path) -> None:
    assert "not quantized" in refused("relayout", "model", "--container", "modelopt")
    assert "not quantized" in refused("dequantize", "model")
    verified = run("verify", "model")
    assert verified.exit_code == 1
    assert "plain checkpoint" in verified.stdout
    assert run("inspect", "model").exit_code == 0


def test_a_record_that_cannot_be_read_is_found_before_anything_is_written(here: Path) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    (here / "good" / "ptqpipe.json").write_text("{")
    for command in (("relayout", "good", "--container", "modelopt"), ("dequantize", "good")):
        assert "ptqpipe.json" in refused(*command)
    assert not list(here.glob(".*partial"))


def test_bad_calls_of_the_other_commands_are_one_line(here: Path) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    before = tiny.bytes_of(here)
    for args, words in (
        (("verify", "good", "--all-blocks"), "--optimal"),
        (("verify", "good", "--stats", "empty"), "--stats needs --source"),
        (("relayout", "good", "--container", "nope"), "unknown container"),
        (("relayout", "good", "--container", "modelopt", "-o", "good", "--overwrite"), "overlap"),
        (("relayout", "good", "--container", "modelopt", "-o", "good/x"), "overlap"),
        (("relayout", "good", "--container", "modelopt", "-o", "pickled", "--overwrite"), "no model"),
        (("dequantize", "good", "--dtype", "int3"), "unknown"),
        (("dequantize", "good", "--resume", "--overwrite"), "contradict"),
        (("dequantize", "good", "--max-memory", "1"), "too small"),
    ):
        assert words in refused(*args)
    assert tiny.bytes_of(here) == before


BAD_USAGE: list[tuple[tuple[str, ...], str]] = [
    (("convert", "model", "-o", "pickled"), "exists and is not empty"),
    (("convert", "model", "--format", "nope", "-o", "out"), "unknown format 'nope'"),
    (("convert", "model", "--recipe", "nvfp4", "-o", "out"), "nvfp4 is a format: give --format nvfp4"),
    (("plan", "model", "--budget", "4.75", "-o", "out.yaml"), "write 4.75bits"),
    (("plan", "model", "--budget", "5bits", "-o", "file"), "not a recipe of ptqpipe plan"),
    (("report", "model", "-o", "q.pdf"), "ends in neither .html nor .md"),
    (("verify", "model", "--stats", "empty", "--source", "model"), "holds no stats.json"),
    (("generate", "model", "--seqlen", "8", "-o", "file.jsonl"), "--overwrite"),
    (("generate", "model", "--seqlen", "8", "-o", "own.txt"), "does not end in .jsonl"),
    (("generate", "model", "--seqlen", "0", "-o", "own.jsonl"), "--seqlen 0"),
    (("calibrate", "model", "--data", "file.jsonl", "--seqlen", "0", "-o", "out"), "--seqlen 0"),
    (("tune", "model", "--data", "file.jsonl", "--seqlen", "0", "-o", "out"), "--seqlen 0"),
    (("calibrate", "model", "--data", "file.jsonl", "--moments", ",", "-o", "out"), "--moments names nothing"),
    (
        ("tune", "model", "--data", "file.jsonl", "--method", "layerwise", "--feedback", "0.3", "-o", "out"),
        "--feedback belongs to --method gptq",
    ),
    (("tune", "model", "--data", "file.jsonl", "--method", "gptq", "--steps", "9", "-o", "out"), "--steps belongs to"),
    (("convert", "model", "-o", "file/out"), "cannot be created in it"),
    (("convert", "model", "-o", "/"), "root folder"),
    (("convert", "model", "--damping", "0.1", "-o", "out"), "--damping 0.1 would change nothing"),
    (("convert", "model", "--refine-passes", "1", "-o", "out"), "--refine-passes 1 would change nothing"),
    (("convert", "model", "--input-scale", "mse", "-o", "out"), "--input-scale mse would change nothing"),
    (("convert", "model", "--format", "nvfp4_w4a4", "--headroom", "2", "-o", "out"), "--headroom 2.0 would change"),
    (("convert", "model", "--input-amax", "9", "-o", "out"), "--input-amax 9.0 would change nothing"),
    (("convert", "model", "--container", "deepseek_fp8", "-o", "out"), "stores fp8_block only"),
]


@pytest.mark.parametrize(("args", "words"), BAD_USAGE, ids=[" ".join(args) for args, _ in BAD_USAGE])
def test_a_call_that_is_wrong_ends_with_exit_code_2(here: Path, args: tuple[str, ...], words: str) -> None:
    before = tiny.bytes_of(here)
    assert words in refused(*args)
    assert run(*args).exit_code == 2
    assert tiny.bytes_of(here) == before


@pytest.mark.parametrize(
    "command",
    [
        ("calibrate", "--data", "file", "-o", "out"),
        ("tune", "--data", "file", "-o", "out"),
        ("eval", "--data", "file"),
        ("generate", "-o", "out"),
        ("plan", "--budget", "5bits", "--measure", "file", "-o", "out.yaml"),
        ("convert", "-o", "out"),
    ],
)
def test_a_broken_config_is_named_as_such(here: Path, command: tuple[str, ...]) -> None:
    (here / "model" / "config.json").write_text("{")
    name, *arguments = command
    assert "config.json" in refused(name, "model", *arguments)
