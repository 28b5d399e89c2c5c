"""Claims about the command line: whatever is typed, one clear line, the right exit code, no trace, and nothing lost."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ptqpipe.cli import main
from ptqpipe.cli.lines import wrapped
from tests import tiny

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    """Runs a command in this process. An exception that is no exit fails here, with its trace."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], env={**dict.fromkeys(TORCHRUN), **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*args: object, env: dict[str, str] | None = None) -> str:
    """The one line of a command that fails; click's own two lines on usage aside."""
    result = run(*args, env=env)
    assert result.exit_code in (1, 2), result.output
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error")
    assert lines[0].isprintable()
    return lines[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model; what a refused command may leave in it is nothing."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64), shards=2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "file.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    "out", ["größe 层/with spaces", "missing/parents/out", "a\nb", "-o", "~", "x.partial", ".hidden"]
)
def test_any_path_can_be_the_output(here: Path, out: str) -> None:
    assert run("convert", "model", f"--out={here / out}", "-q").exit_code == 0
    assert run("verify", here / out, "--source", "model").exit_code == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [("model/", "model"), ("./model", "model"), ("link", "link"), ("link/", "link"), ("empty/../model//", "model")],
)
def test_the_derived_name_is_the_last_part_of_the_path_however_it_is_spelled(here: Path, model: str, name: str) -> None:
    (here / "link").symlink_to("model")
    assert run("convert", model, "-q").exit_code == 0
    assert (here / f"{name}-NVFP4A16" / "config.json").is_file()


BAD_CONVERTS: list[tuple[tuple[str, ...], str]] = [
    (("model", "-o", "file"), "is a file"),
    (("model", "-o", "file", "--overwrite"), "is a file"),
    (("model", "-o", "file/out"), "is a file"),
    (("model", "-o", "model/out"), "overlap"),
    (("model", "-o", "."), "overlap"),
    (("model", "-o", "/"), "root folder"),
    (("model", "-o", "~no-such-user/out"), "home directory"),
    (("model", "-o", "x" * 300), "too long"),
    (("model", "-o", "/proc/out"), "takes no new files"),
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
    (("model", "--search", ""), "unknown search ''"),
    (("model", "--search", "_grid"), "unknown search '_grid'"),
    (("model", "--container", ""), "unknown container ''"),
    (("model", "--container", "__init__"), "unknown container"),
    (("model", "--container", "deepseek_fp8"), "deepseek_fp8 stores fp8_block only"),
    (("model", "--format", "e2m1/8/ue5m3", "--container", "modelopt"), "ModelOpt"),
    (("model", "--input-amax", "nan"), "positive number"),
]


@pytest.mark.parametrize(("args", "words"), BAD_CONVERTS, ids=[" ".join(args)[:60] for args, _ in BAD_CONVERTS])
def test_a_bad_call_of_convert_is_one_line_and_leaves_everything_as_it_was(
    here: Path, args: tuple[str, ...], words: str
) -> None:
    before = tiny.bytes_of(here)
    assert words in refused("convert", *args)
    assert tiny.bytes_of(here) == before
    assert {path.name for path in here.iterdir()} == {"model", "file", "file.jsonl", "empty", "pickled"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE in the environment is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
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
        ("simulate", "allreduce", "--partials", kind if kind != "file" else "empty"),
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
        (("verify", "good", "--all"), "--optimal"),
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


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "model", "-o", "out", "-q"),
        ("relayout", "good", "--container", "modelopt", "-o", "out"),
        ("dequantize", "good", "-o", "out"),
    ],
)
def test_resuming_what_is_complete_says_so_and_is_no_failure(here: Path, command: tuple[str, ...]) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    assert run(*command).exit_code == 0
    before = tiny.bytes_of(here)
    again = run(*command, "--resume")
    assert again.exit_code == 0
    assert "already complete" in again.stdout
    assert tiny.bytes_of(here) == before


def test_one_tensor_a_file_is_a_legal_wish(here: Path) -> None:
    assert run("convert", "model", "-o", "out", "--shard-size", "1", "-q").exit_code == 0
    assert run("verify", "out", "--source", "model").exit_code == 0


def test_a_pattern_of_a_recipe_without_a_match_is_a_warning(here: Path) -> None:
    (here / "recipe.yaml").write_text(
        "version: 1\nrules:\n- {match: '*.gaet_proj', format: nvfp4}\n- {match: '*', format: mxfp4}\n"
    )
    shown = run("convert", "model", "--recipe", "recipe.yaml", "--dry-run").stdout
    warnings = [line.strip() for line in shown.splitlines() if "matches no tensor" in line]
    assert [line.split("'")[1::2] for line in warnings] == [["*.gaet_proj", "*.gate_proj"]]
    plan = json.loads(run("convert", "model", "--recipe", "recipe.yaml", "--dry-run", "--json").stdout)
    assert sum("matches no tensor" in line for line in plan["warnings"]) == 1


def test_a_name_that_is_not_unicode_is_printed_escaped(here: Path) -> None:
    os.rename("model", os.fsencode("m") + b"\xff")
    model = os.fsdecode(b"m\xff")
    done = run("convert", model, "-o", "out", "-q")
    assert done.exit_code == 0
    assert "m\\udcff" in done.stdout
    assert run("verify", "out", "--source", model).exit_code == 0


def test_ctrl_c_in_a_dry_run_ends_without_a_trace(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("ptqpipe.stages.convert.text.plan_text", interrupted)
    result = run("convert", "model", "-o", "out", "--dry-run")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted: nothing is written."
    assert not list(here.glob("*out*"))


@pytest.mark.parametrize(
    ("command", "stage", "words"),
    [
        (("generate", "model", "-q", "-o", "out"), "generate.generate", "nothing is written"),
        (("eval", "model", "--data", "file"), "evaluate.run.evaluate", "stays in the cache for the next run"),
        (("demo", "-o", "out"), "demo.run_demo", "finished are kept in out"),
        (("simulate", "allreduce"), "simulate.error_rows", "no plots were written"),
        (("plan", "model", "--budget", "5bits", "-o", "out"), "plan.run.plan_mixed", "nothing is written"),
        (
            ("plan", "model", "--budget", "5bits", "-o", "out", "--measure", "file"),
            "plan.run.plan_mixed",
            "kept in out.measured.jsonl, and the same command continues",
        ),
        (("verify", "model"), "verify.run.verify", "nothing is written"),
        (("inspect", "model"), "inspect.inspect", "nothing is written"),
        (("diff", "model", "model"), "diff.diff", "nothing is written"),
        (("report", "model"), "report.run.make_report", "nothing is written"),
        (("convert", "model", "-o", "out"), "convert.run.convert", "nothing is written"),
        (("calibrate", "model", "--data", "file", "-o", "out"), "calibrate.run.calibrate", "nothing is written"),
        (("tune", "model", "--data", "file", "-o", "out"), "tune.run.tune", "nothing is written"),
        (("transform", "model", "--apply", "rotate", "-o", "out"), "transform.run.transform", "nothing is written"),
        (("relayout", "model", "--container", "modelopt", "-o", "out"), "relayout.run.relayout", "nothing is written"),
        (("dequantize", "model", "-o", "out"), "dequantize.dequantize", "nothing is written"),
    ],
)
def test_ctrl_c_says_in_a_sentence_what_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], stage: str, words: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ptqpipe.stages.{stage}", interrupted)
    result = run(*command)
    assert result.exit_code == 130
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Interrupted: ")
    assert words in line
    assert not list(here.glob("*out*"))


def test_ctrl_c_names_the_command_that_continues_where_there_is_something_to_continue(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        (here / ".out.partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("ptqpipe.stages.calibrate.run.calibrate", interrupted)
    command = ["calibrate", "model", "--data", "a file", "-o", "out"]
    monkeypatch.setattr(sys, "argv", ["ptqpipe", *command])
    result = run(*command)
    assert result.exit_code == 130
    assert result.stderr.strip().endswith("continue with: ptqpipe calibrate model --data 'a file' -o out --resume")


def test_what_was_measured_is_written_even_if_nobody_reads_what_is_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("ptqpipe.stages.evaluate.run.evaluate", lambda *_, **__: {"version": 1})
    monkeypatch.setattr(click, "echo", closed)
    result = run("eval", "model", "--data", "file", "-o", "found.json", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads((here / "found.json").read_text()) == {"version": 1}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes where it may not")
def test_a_read_only_target_is_one_line(here: Path) -> None:
    (here / "shut").mkdir(mode=0o500)
    assert "permissions" in refused("convert", "model", "-o", "shut/out")


@pytest.mark.usefixtures("forks")
def test_a_disk_that_fills_up_is_one_line_and_the_run_resumes(here: Path) -> None:
    """The file system's own refusal, by the largest file that this process may write."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY)); "
        "from ptqpipe.cli import main; main(sys.argv[1:])"
    )
    args = ["convert", "model", "-o", "out", "-q"]
    full = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120)
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert "cannot be written" in full.stderr.splitlines()[-1]
    assert not (here / "out").exists()
    assert run(*args, "--resume").exit_code == 0
    assert run("verify", "out", "--source", "model").exit_code == 0


def test_every_example_of_the_help_is_a_call_that_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("CKPT", "OTHER", "MODEL"):
        (tmp_path / folder).mkdir()
    (tmp_path / "CKPT.eval.json").touch()
    for name, command in main.commands.items():
        for one in command.commands.values() if isinstance(command, click.Group) else [command]:
            examples = re.findall(r"ptqpipe .*", one.epilog or "")
            assert examples, name
            for words in (shlex.split(call.partition(" > ")[0]) for call in examples):
                assert words[:2] == ["ptqpipe", name], name
                one.make_context(name, words[3 if isinstance(command, click.Group) else 2 :])


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "model", "-o", "out"),
        ("eval", "model", "--data", "file"),
        ("calibrate", "model", "--data", "file", "-o", "out"),
        ("dequantize", "model"),
        ("transform", "model", "--apply", "rotate", "-o", "out"),
    ],
)
def test_float_types_have_one_spelling_and_take_the_other(here: Path, command: tuple[str, ...]) -> None:
    (name, *arguments) = command
    for word in ("bf16", "bfloat16", "BF16"):
        parsed = main.commands[name].make_context(name, [*arguments, "--dtype", word])
        assert parsed.params["dtype"] == ("bf16" if name in ("dequantize", "transform") else "bfloat16")
    assert "'int3' is unknown; use" in refused(*command, "--dtype", "int3")
    assert run(*command, "--dtype", "int3").exit_code == 2


def test_overwrite_replaces_what_is_of_its_kind_alone(here: Path) -> None:
    assert run("convert", "model", "-o", "packed", "-q").exit_code == 0
    (here / "stats").mkdir()
    (here / "stats" / "model.layers.0.safetensors").write_bytes(b"x")
    shutil.copytree(here / "stats", here / "codes")
    (here / "stats" / "stats.json").write_text("{}")
    (here / "codes" / "rounding.json").write_text("{}")
    text = ("--data", "file.jsonl", "--samples", "1", "--seqlen", "2", "--holdout", "0")
    before = tiny.bytes_of(here)
    for command, kinds in (
        (("convert", "model"), ("stats", "codes", "pickled")),
        (("relayout", "packed", "--container", "modelopt"), ("stats", "codes")),
        (("dequantize", "packed"), ("stats", "codes")),
        (("calibrate", "model", *text), ("packed", "codes", "pickled")),
        (("tune", "model", *text[:-2]), ("packed", "stats", "pickled")),
    ):
        for kind in kinds:
            assert "that --overwrite may replace" in refused(*command, "-o", kind, "--overwrite"), (command, kind)
    assert tiny.bytes_of(here) == before
    assert run("convert", "model", "-o", "packed", "--overwrite", "-q").exit_code == 0


def test_the_demo_writes_into_no_folder_of_someone_else(here: Path) -> None:
    before = tiny.bytes_of(here)
    assert "which no demo has written" in refused("demo", "-o", "model")
    (here / "mine").mkdir()
    assert run("convert", "model", "-o", "mine/nvfp4", "-q").exit_code == 0
    assert "which no demo has written" in refused("demo", "-o", "mine")
    shutil.rmtree(here / "mine")
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
        ("tune", "model", "--data", "file.jsonl", "--method", "learned", "--share", "0.3", "-o", "out"),
        "--share belongs to --method gptq",
    ),
    (("tune", "model", "--data", "file.jsonl", "--method", "gptq", "--steps", "9", "-o", "out"), "--steps belongs to"),
    (("convert", "model", "-o", "file/out"), "cannot lie in it"),
    (("convert", "model", "-o", "/"), "root folder"),
    (("convert", "model", "--damping", "0.1", "-o", "out"), "--damping 0.1 would change nothing"),
    (("convert", "model", "--refine", "1", "-o", "out"), "--refine 1 would change nothing"),
    (("convert", "model", "--input-scale", "mse", "-o", "out"), "--input-scale mse would change nothing"),
    (("convert", "model", "--format", "nvfp4_w4a4", "--headroom", "2", "-o", "out"), "--headroom 2.0 would change"),
    (("convert", "model", "--input-amax", "9", "-o", "out"), "--input-amax 9.0 would change nothing"),
    (("convert", "model", "--low-rank-dtype", "fp8", "-o", "out"), "--low-rank-dtype fp8 would change nothing"),
    (("convert", "model", "--low-rank", "4", "-o", "out"), "use --container ptqpipe"),
    (("convert", "model", "--container", "deepseek_fp8", "-o", "out"), "stores fp8_block only"),
]


@pytest.mark.parametrize(("args", "words"), BAD_USAGE, ids=[" ".join(args) for args, _ in BAD_USAGE])
def test_a_call_that_is_wrong_ends_with_exit_code_2(here: Path, args: tuple[str, ...], words: str) -> None:
    before = tiny.bytes_of(here)
    assert words in refused(*args)
    assert run(*args).exit_code == 2
    assert tiny.bytes_of(here) == before


def test_plots_that_cannot_be_drawn_are_found_before_anything_is_computed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("ptqpipe.stages.simulate.error_rows", lambda _: pytest.fail("computed"))
    assert "--plot needs matplotlib" in refused("simulate", "allreduce", "--plot", "plots")
    assert not (here / "plots").exists()


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


AUTOMATIC = ("scheme", "algorithm", "weighting", "search")  # told in words: other options decide


def test_the_defaults_that_the_help_of_convert_tells_are_those_of_a_recipe() -> None:
    from ptqpipe.recipe.model import Recipe, Rule

    every = {field.name: field.default for kind in (Rule, Recipe) for field in fields(kind)}
    known = {name: default for name, default in every.items() if default is not None}  # None: decided later
    told = {}
    for option in main.commands["convert"].params:
        found = re.search(r"\[default: ([^\]]+)\]", getattr(option, "help", None) or "")
        if found is not None and option.name in known and option.name not in AUTOMATIC:
            told[option.name] = found[1]
    assert {"damping", "refine", "headroom", "kv_cache"} <= told.keys()
    for name, text in told.items():
        assert text in (str(known[name]), f"{known[name]:g}" if isinstance(known[name], float) else ""), name


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_trace() -> None:
    script = (
        "import sys; from importlib.abc import MetaPathFinder\n"
        "class Interrupts(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from ptqpipe.__main__ import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "")


STUCK = """
import sys, threading, time
from datetime import timedelta
import click
import ptqpipe.__main__, ptqpipe.cli
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
store.set_timeout(timedelta(seconds=1))

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)

def wait():
    try:
        store.get("what nobody sets")  # in C++; over while the interpreter's own end would still sleep
    except Exception:
        pass

@click.command()
def main():
    global slow
    slow = Slow()
    threading.Thread(target=wait, name="ptqpipe-engine", daemon=True).start()
    time.sleep(0.3)
    click.echo("said")
    sys.exit(7)

ptqpipe.cli.main = lambda: main(args=[])
ptqpipe.__main__.run()
"""


def test_a_thread_that_waits_for_a_dead_rank_does_not_spoil_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr


ENDING = """
import atexit, sys, threading, time
import ptqpipe.__main__, ptqpipe.cli

class Kept:
    def __del__(self, say=print):
        say("taken apart")

ending, shutdown = threading.Event(), threading._shutdown

def work():
    ending.wait(60)
    print("worked")

def wait_for_threads():  # what the interpreter calls first when it ends
    threading._shutdown = shutdown
    ending.set()
    shutdown()

threading._shutdown = wait_for_threads
kept = Kept()
atexit.register(print, "asked")
if sys.argv[1:]:
    threading.Thread(target=work).start()
ptqpipe.cli.main = lambda: sys.exit(3)
ptqpipe.__main__.run()
"""


@pytest.mark.parametrize(
    ("options", "said"), [((), "asked\n"), (("works on",), "worked\nasked\ntaken apart\n")], ids=["idle", "working"]
)
def test_what_a_command_leaves_in_memory_is_not_taken_apart_unless_a_thread_still_works(
    options: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "-c", ENDING, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, said), done.stderr


def test_a_gpu_that_is_found_and_not_used_is_said_once_unless_a_device_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny.save(model, tiny.llama(layers=1, hidden=32, inner=64))
    line = "A GPU was found (NVIDIA X1) and is not used; to use it, add --device cuda."
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "NVIDIA X1")

    def said(*options: str, available: bool = True) -> int:
        monkeypatch.setattr("torch.cuda.is_available", lambda: available)
        done = run("convert", model, "--format", "mxfp4", "--out", tmp_path / "out", "--overwrite", *options)
        assert done.exit_code == 0, done.output
        assert line not in done.stdout
        return done.stderr.splitlines().count(line)

    assert said() == 1
    assert [said("--device", "cpu"), said("--quiet"), said("--json"), said(available=False)] == [0, 0, 0, 0]


def test_long_lines_go_on_at_a_word_and_rows_of_tables_stay() -> None:
    """Of a terminal only: `Given.show` asks it first. What a word is too long for stays whole."""
    row, path = f"{'role':30}  {'format':30}  {'weights':30}", "/a" * 50
    text = f"  {'word ' * 20}end\n{row}\nto {path}, then\nshort"
    first, *middle, last = wrapped(text, 60).split("\n")
    assert (first[:6], last) == ("  word", "short")
    assert all(len(line) <= 60 or line in (row, f"  {path},") for line in [first, *middle])
    assert middle[0].startswith("    word")
    assert " ".join(wrapped(text, 60).split()) == " ".join(text.split())


LONG_ERRORS = [
    ("convert", "model", "--algorithm", "awq", "-o", "out"),  # click's own
    ("convert", "model", "--budget", "1GB", "--for", "nothing"),
    ("recipes", "nothing"),
    ("--owerwrite-what-lies-there-already-and-say-nothing-about-what-was-there-before", "model"),
]


@pytest.mark.parametrize("args", LONG_ERRORS, ids=" ".join)
def test_a_long_error_is_one_line_that_a_terminal_shows_in_several(
    here: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    said = refused(*args)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    monkeypatch.setattr("ptqpipe.cli.lines._is_terminal", lambda stream: True)
    lines = run(*args).stderr.splitlines()
    error = lines[next(i for i, line in enumerate(lines) if line.startswith("Error")) :]
    assert len(error) > 1
    assert all(len(line) <= 60 or " " not in line.strip() for line in error)
    assert " ".join(line.strip() for line in error) == said
