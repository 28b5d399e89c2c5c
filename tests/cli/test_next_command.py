"""What a command prints as the next one, pasted: codes and statistics know what they are good for, and say what is not.

The tests run the printed line itself, split as a shell would, and look at what was written.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ptqpipe
from ptqpipe.cli import main, next_steps
from ptqpipe.cli.next_steps import _in_lines
from ptqpipe.errors import CheckpointError, PtqError, UsageError
from ptqpipe.quantization.learned_codes import LearnedCodes
from tests.calibration.models import make_model, make_windows, write_windows

FEW = ("--samples", "8", "--seqlen", "16")
ATTENTION = "re:.*self_attn.*"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "a model", "llama", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(ptqpipe.__file__).parent / "demo_model" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty windows: more than are asked for, so that some are held out."""
    return write_windows(tmp_path_factory.mktemp("text") / "some text.jsonl", make_windows(samples=20, seqlen=16))


@pytest.fixture(scope="module")
def stats(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "the stats"
    ran("calibrate", model, "--data", text, *FEW, "-o", out)
    return out


@pytest.fixture(scope="module")
def w4a4(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("codes") / "codes"
    tune(model, text, out, "--format", "nvfp4_w4a4", "--ignore", ATTENTION)
    return out


@pytest.fixture(scope="module")
def w4a4_stats(model: Path, text: Path, stats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("codes") / "codes"
    tune(model, text, out, "--format", "nvfp4_w4a4", "--stats", stats)
    return out


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def ran(*words: object) -> str:
    done = call(*words)
    assert done.exit_code == 0, done.output
    return done.output


def tune(model: Path, text: Path, out: Path, *words: object) -> str:
    return ran("tune", model, "--data", text, "--method", "gptq", *FEW, *words, "-o", out)


def refused(*words: object, code: int = 2) -> str:
    """The one line of a call that is refused."""
    done = call(*words)
    assert done.exit_code == code, done.output
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def pasted(output: str, *more: object) -> str:
    """What the first command that the last lines offer prints, with ``more`` at its end."""
    program, *words = offered(output)[0]
    assert program == "ptqpipe"
    return ran(*words, *more)


def offered(output: str) -> list[list[str]]:
    """The commands in the last lines of an output, each split as a shell would; they parse."""
    _, head, tail = output.rpartition("Next: ")
    assert head, output
    calls = [shlex.split(line) for line in tail.splitlines()]
    for program, *words in calls:
        if program == "ptqpipe":
            main.commands[words[0]].make_context(words[0], list(words[1:])).close()
        else:
            assert program in ("vllm", "xdg-open", "open", "less")
    return calls


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ptqpipe.json").read_text())
    return found


@pytest.mark.parametrize(
    ("words", "name", "activations"),
    [
        (("--format", "nvfp4_w4a4"), "nvfp4-pack-quantized", ("float", 4, 16)),
        (("--format", "mxfp4"), "mxfp4-pack-quantized", ("float", 4, 32)),
        (("--format", "fp8"), "float-quantized", ("float", 8, None)),
        (("--format", "nvfp4"), "nvfp4-pack-quantized", None),
    ],
)
def test_the_command_that_tune_prints_writes_the_format_that_was_tuned(
    model: Path,
    words: tuple[str, ...],
    name: str,
    activations: tuple[str, int, int | None] | None,
    text: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    pasted(tune(model, text, tmp_path / "my codes", *words), "-o", out)
    (group,) = config(out)["config_groups"].values()
    found = group.get("input_activations")
    assert config(out)["format"] == name
    assert (found and (found["type"], found["num_bits"], found.get("group_size"))) == activations
    assert {entry["algorithm"] for entry in record(out)["weights"].values()} == {"learned"}
    assert {entry["scheme"] for entry in record(out)["weights"].values()} == {
        {"fp8": "fp8_dynamic"}.get(words[1], words[1])
    }
    ran("verify", out, "--source", model)


def test_what_tune_gained_is_said_instead_of_the_weights_error(model: Path, w4a4: Path, tmp_path: Path) -> None:
    told = ran("convert", model, "--codes", w4a4, "-o", tmp_path / "out", "-q")
    blocks = json.loads((w4a4 / "rounding.json").read_text())["blocks"].values()
    ratios = [entry["learned_loss"] / entry["start_loss"] if entry["kept"] else 1.0 for entry in blocks]
    words = "held-out samples" if all(entry["held_out"] for entry in blocks) else "the calibration samples"
    mean = f"{sum(ratios) / len(ratios):.3f}"
    line = f"output error of the tuned decoder layers: {mean} times that of plain rounding, on {words}"
    assert line in told
    assert "SQNR dB" not in told
    assert "proven" not in told
    found = json.loads(ran("convert", model, "--codes", w4a4, "-o", tmp_path / "json", "--json"))
    assert list(found["tuned_blocks"].values()) == ratios
    assert "SQNR dB" not in ran("verify", tmp_path / "out", "--source", model)


def test_container_and_ignored_modules_come_with_the_codes(model: Path, text: Path, tmp_path: Path) -> None:
    words = ("--format", "nvfp4_w4a4", "--container", "modelopt", "--ignore", ATTENTION)
    printed = tune(model, text, tmp_path / "codes", *words)
    pasted(printed, "-o", tmp_path / "out")
    ran("convert", model, "--codes", tmp_path / "codes", *words, "-o", tmp_path / "told")
    (tmp_path / "api").mkdir()
    ptqpipe.convert(model, codes=tmp_path / "codes", out=tmp_path / "api" / "out")
    for folder in (tmp_path / "out", tmp_path / "told", tmp_path / "api" / "out"):
        found = record(folder)
        assert found["container"] == "modelopt"
        assert {entry["scheme"] for entry in found["weights"].values()} == {"nvfp4_w4a4"}
        assert found["weights"]
        assert not [name for name in found["weights"] if "self_attn" in name]
        assert config(folder) == config(tmp_path / "out")


def test_codes_can_be_written_in_another_container_that_holds_the_same_weights(
    model: Path, w4a4: Path, tmp_path: Path
) -> None:
    for container in ("modelopt", "compressed_tensors"):
        ran("convert", model, "--codes", w4a4, "--container", container, "-o", tmp_path / container)
    a, b = (ptqpipe.load_tensors(tmp_path / name) for name in ("modelopt", "compressed_tensors"))
    with a, b:
        for name in record(tmp_path / "modelopt")["weights"]:
            assert a[name].dequantize().equal(b[name].dequantize())


@pytest.mark.slow
def test_static_input_scales_of_tuned_codes_are_those_of_their_statistics(
    model: Path, w4a4_stats: Path, text: Path, stats: Path, tmp_path: Path
) -> None:
    printed = ran("tune", model, "--data", text, "--format", "nvfp4_w4a4", *FEW, "--stats", stats,
                  "-o", tmp_path / "codes")  # fmt: skip
    last = printed.splitlines()[-1]
    assert last == f"Next: ptqpipe convert '{model}' --codes {tmp_path}/codes --stats '{stats}'"
    pasted(printed, "-o", tmp_path / "out")
    assert record(tmp_path / "out")["statistics"]["digest"] == json.loads((stats / "stats.json").read_text())["digest"]
    assert "give the --stats that tune had" in refused("convert", model, "--codes", w4a4_stats, "-o", tmp_path / "no")
    other = tmp_path / "other"
    ran("calibrate", model, "--data", text, *FEW, "--seed", "3", "-o", other)
    words = ("convert", model, "--codes", w4a4_stats, "-o", tmp_path / "no")
    assert f"{other} holds others" in refused(*words, "--stats", other)
    assert "--headroom 2.0 contradicts" in refused(*words, "--stats", stats, "--headroom", "2")
    assert not (tmp_path / "no").exists()


def test_codes_that_started_from_statistics_do_not_need_them_where_inputs_have_no_static_scale(
    model: Path, text: Path, stats: Path, tmp_path: Path
) -> None:
    tune(model, text, tmp_path / "codes", "--stats", stats)
    ran("convert", model, "--codes", tmp_path / "codes", "-o", tmp_path / "out")
    ran("verify", tmp_path / "out", "--source", model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "nvfp4"), "--format nvfp4 contradicts .*, which holds codes for nvfp4_w4a4; leave --format out"),
        (("--format", "mxfp4"), "--format mxfp4 contradicts"),
        (("--format", "nvfp5"), "unknown format 'nvfp5'"),
        (("--ignore", "*0.mlp.up_proj"), "tuned with '.*0.mlp.*weight' in nvfp4_w4a4, this call has it kept"),
        (("--ignore", "re:.*1.mlp.down_proj"), "tuned with '.*1.mlp.down_proj.weight' in nvfp4_w4a4, .* kept"),
        (("--input-amax", "100"), "--input-amax 100.0 contradicts .*, which was tuned with the format's own"),
        (("--scale-search", "absmax"), "--scale-search absmax would change nothing: .* has the codes of every weight"),
        (("--global-scale", "absmax"), "--global-scale absmax would change nothing"),
    ],
)
def test_what_contradicts_the_codes_is_refused_in_one_line(
    model: Path, words: tuple[str, ...], message: str, w4a4: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = refused("convert", model, "--codes", w4a4, *words, "-o", out)
    assert re.search(message, line), line
    assert not list(tmp_path.iterdir())


def test_statistics_are_refused_for_codes_that_were_tuned_at_constant_input_scales(
    model: Path, w4a4: Path, stats: Path, tmp_path: Path
) -> None:
    line = refused("convert", model, "--codes", w4a4, "--stats", stats, "-o", tmp_path / "out")
    assert "was tuned without statistics" in line


def test_a_recipe_file_that_says_something_else_than_the_codes_is_refused(
    model: Path, w4a4: Path, tmp_path: Path
) -> None:
    """Also where it quantizes what tune kept, and where it fuses other weights."""
    for number, (body, message) in enumerate(
        (
            ('rules:\n  - match: "*"\n    format: nvfp4_w4a4\n', "self_attn.*kept, this call has it in nvfp4_w4a4"),
            ('rules:\n  - match: "*mlp*"\n    format: nvfp4\n', "in nvfp4_w4a4, this call has it in nvfp4;"),
            (
                'fuse: [["q_proj", "k_proj"]]\nrules:\n  - match: "*mlp*"\n    format: nvfp4_w4a4\n',
                "gate_proj.*this call has it in another fused group",
            ),
        )
    ):
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"version: 1\n{body}")
        with pytest.raises(UsageError, match=message):
            ptqpipe.convert(model, codes=w4a4, recipe=path, out=tmp_path / "out")
    path.write_text('version: 1\nrules:\n  - match: "*mlp*"\n    format: nvfp4_w4a4\n')
    assert ptqpipe.convert(model, codes=w4a4, recipe=path, out=tmp_path / "out").record["weights"]


def test_a_container_that_holds_other_weights_is_refused(tmp_path: Path) -> None:
    model, windows = make_model(tmp_path / "moe", "qwen3_moe"), make_windows(samples=3)
    tokens = write_windows(tmp_path / "tokens.jsonl", windows)
    data = ("--data", tokens, "--samples", "3", "--seqlen", windows.shape[1], "--method", "gptq")
    ran("tune", model, *data, "--format", "fp8", "-q", "-o", tmp_path / "codes")
    words = ("convert", model, "--codes", tmp_path / "codes", "-o", tmp_path / "out")
    ran(*words)
    line = refused(*words, "--container", "deepseek_fp8", "--overwrite")
    assert "deepseek_fp8" in line


@pytest.mark.parametrize("damage", ["gone", "null", "other", "field"])
def test_codes_whose_recipe_is_gone_or_of_another_version_are_one_line(
    model: Path, damage: str, w4a4: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(w4a4, tmp_path / "codes")
    file = folder / "rounding.json"
    content = json.loads(file.read_text())
    if damage == "gone":
        del content["recipe"]
    elif damage == "field":
        del content["recipe"]["headroom"]
    else:
        content["recipe"] = None if damage == "null" else {"rules": "*"}
    file.write_text(json.dumps(content))
    line = refused("convert", model, "--codes", folder, "-o", tmp_path / "out", code=1)
    assert "rounding.json" in line
    assert line.strip().endswith("tune again")
    with pytest.raises(CheckpointError):
        ptqpipe.convert(model, codes=folder, out=tmp_path / "out")


def test_a_refused_call_leaves_no_file_of_the_codes_open(
    model: Path, w4a4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    real = LearnedCodes.close

    def close(self: LearnedCodes) -> None:
        closed.append(self.path)
        real(self)

    monkeypatch.setattr(LearnedCodes, "close", close)
    with pytest.raises(PtqError):
        ptqpipe.convert(model, codes=w4a4, format="mxfp4", out=tmp_path / "out")
    assert closed == [w4a4]


@pytest.mark.parametrize(
    ("moments", "algorithm"), [("diagonal,full", "gptq"), ("diagonal", "rtn"), ("diagonal,block", "rtn")]
)
def test_the_command_that_calibrate_prints_does_what_the_moments_allow(
    model: Path, moments: str, algorithm: str, text: Path, tmp_path: Path
) -> None:
    printed = ran("calibrate", model, "--data", text, *FEW, "--moments", moments, "-o", tmp_path / "my stats")
    pasted(printed, "-o", tmp_path / "out")
    ways = {(entry["algorithm"], entry["weighting"]) for entry in record(tmp_path / "out")["weights"].values()}
    assert ways == {(algorithm, "diagonal")}
    if moments == "diagonal":
        line = refused("convert", model, "--stats", tmp_path / "my stats", "--algorithm", "gptq", "-o", tmp_path / "no")
        assert "--moments diagonal,full" in line


def test_nearest_codes_with_statistics_have_weighted_scales_as_the_help_says(
    model: Path, stats: Path, tmp_path: Path
) -> None:
    ran("convert", model, "--stats", stats, "--algorithm", "rtn", "-o", tmp_path / "out")
    assert {entry["weighting"] for entry in record(tmp_path / "out")["weights"].values()} == {"diagonal"}
    ran("convert", model, "--stats", stats, "--algorithm", "rtn", "--objective", "none", "-o", tmp_path / "none")
    assert not [entry for entry in record(tmp_path / "none")["weights"].values() if "weighting" in entry]


@pytest.mark.slow
def test_the_commands_that_generate_transform_and_plan_print_do_their_work(
    model: Path, stats: Path, tmp_path: Path
) -> None:
    written = tmp_path / "own text.jsonl"
    printed = ran("generate", model, "--samples", "8", "--seqlen", "16", "-o", written)
    at_once, by_statistics = (call[1:] for call in offered(printed))
    ran(*at_once, "--quality", "fast", "-o", tmp_path / "at once")
    assert record(tmp_path / "at once")["statistics"]["data"]["samples"] == 8
    again = ran(*by_statistics)
    assert (tmp_path / "own text-stats" / "stats.json").is_file()
    pasted(again, "-o", tmp_path / "own")
    assert record(tmp_path / "own")["statistics"]["data"]["samples"] == 8
    printed = ran("transform", model, "--transforms", "smoothquant", "--stats", stats, "--format", "nvfp4_w4a4",
                  "-o", tmp_path / "a model")  # fmt: skip
    pasted(printed, "-o", tmp_path / "smooth")
    assert {entry["scheme"] for entry in record(tmp_path / "smooth")["weights"].values()} == {"nvfp4_w4a4"}
    printed = ran("plan", model, "--budget", "6bits", "--stats", stats, "-o", tmp_path / "a recipe.yaml")
    pasted(printed, "-o", tmp_path / "mixed")
    assert {entry["algorithm"] for entry in record(tmp_path / "mixed")["weights"].values()} == {"gptq"}


def test_the_commands_that_a_checkpoint_leads_to_are_real_calls(model: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "an output", tmp_path / "the other"
    told = ran("convert", model, "-o", out)
    assert re.search(
        rf"^Done: {re.escape(str(out))} \S+ [kMG]B \(0\.\d\dx\), [\d.]+ s, peak \S+ [MG]iB$", told, re.MULTILINE
    )
    assert [words[:3] for words in offered(told)] == [
        ["ptqpipe", "eval", str(out)],
        ["ptqpipe", "serve", str(out)],
        ["vllm", "serve", str(out)],
    ]
    assert offered(told)[0][3:] == ["--source", str(model)]
    assert "equal" in pasted(ran("relayout", out, "--container", "modelopt", "-o", other))
    own = offered(ran("relayout", out, "--container", "ptqpipe", "-o", tmp_path / "own"))
    assert "vllm" not in {program for program, *_ in own}
    assert offered(ran("verify", out, "--source", model))[0] == ["ptqpipe", "eval", str(out), "--source", str(model)]
    assert "sound" in pasted(ran("inspect", out))
    assert "--source" not in pasted(ran("inspect", out)).splitlines()[-1]  # the model is not found elsewhere
    beside = tmp_path / model.name
    shutil.copytree(model, beside)
    for looked in ("inspect", "verify"):
        assert offered(ran(looked, out))[0] == ["ptqpipe", "verify", str(out), "--source", str(beside)]
    shutil.rmtree(beside)
    assert offered(ran("inspect", model))[0] == ["ptqpipe", "convert", str(model)]
    page = offered(ran("report", out, "-o", tmp_path / "a page.html"))[0][1]
    assert Path(page).is_file()
    plain = ran("dequantize", out, "-o", tmp_path / "plain", "--dtype", "fp32")
    assert offered(plain)[0] == ["ptqpipe", "diff", str(out), str(tmp_path / "plain")]
    for one, other in ((out, model), (model, out)):  # in either order what was made is measured against its source
        differs = call("diff", one, other)
        assert differs.exit_code == 1
        assert offered(differs.stdout)[0] == ["ptqpipe", "eval", str(out), "--source", str(model)]


def test_packages_that_a_call_needs_and_are_not_there_are_installed_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_steps, "find_spec", lambda name: None)
    told = ran("convert", model, "-o", tmp_path / "out")
    install = told.index("pip install 'ptqpipe[serve]'\n")
    assert told.index("ptqpipe eval") < install < told.index("ptqpipe serve")
    monkeypatch.undo()
    assert "pip install" not in ran("convert", model, "-o", tmp_path / "other")


def test_the_tables_of_a_plan_fit_a_terminal(tmp_path: Path) -> None:
    demo = Path(ptqpipe.__file__).parent / "demo_model"
    told = ran("plan", demo, "--budget", "5bits", "-o", tmp_path / "recipe.yaml")
    lines = told.splitlines()
    head = next(at for at, line in enumerate(lines) if line.lstrip().startswith("bits  "))
    assert set(lines[head].split()) >= {"size", "cost", "fp8_dynamic", "keep", "mxfp4a16", "mxfp8a16", "nvfp4"}
    assert max(map(len, lines[head : lines.index("", head)])) <= 80


def test_an_output_that_begins_with_a_dash_is_named_so_that_no_option_is_meant(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert offered(ran("convert", model, "--out=-x"))[1] == ["ptqpipe", "serve", "./-x"]


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
def test_no_next_command_where_a_script_reads_or_silence_was_asked_for(model: Path, flag: str, tmp_path: Path) -> None:
    assert "Next: " not in ran("convert", model, "-o", tmp_path / "out", flag)


@pytest.mark.parametrize(("left", "words"), [("complete", "exists and is not empty"), ("unfinished", "unfinished run")])
def test_an_output_that_is_in_the_way_is_found_before_anything_is_announced(
    model: Path, left: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if left == "complete":
        ran("convert", model, "-o", out)
    else:
        with monkeypatch.context() as stopped:
            stopped.setattr(
                "ptqpipe.conversion.unit_job.QuantizeUnit.run", lambda *_: (_ for _ in ()).throw(MemoryError)
            )
            assert call("convert", model, "-o", out).exit_code == 1
    done = call("convert", model, "-o", out)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_call_that_a_terminal_would_break_is_broken_where_a_shell_takes_it() -> None:
    words = ["ptqpipe", "calibrate", "a model", "--data", "own - text.jsonl", "--samples", "128", "-o", "x" * 40]
    whole = _in_lines(words, None)
    assert shlex.split(whole) == words
    assert "\n" not in whole
    narrow = _in_lines(words, 80)
    assert max(map(len, narrow.splitlines())) <= 80 - len("Next: ")
    assert all(line.endswith(" \\") for line in narrow.splitlines()[:-1])
    told = subprocess.run(["bash", "-c", f"printf '%s\\n' {narrow}"], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == words
