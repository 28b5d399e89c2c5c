"""convert --data and its kin: the stages of one run give what the commands one by one give, wherever it is stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.containers import get_container
from ptqpipe.errors import AlreadyComplete, OutputError, UsageError, WrongOutput
from ptqpipe.folded import encoded
from ptqpipe.machine import Machine
from ptqpipe.options import PipelineOptions, RecipeOptions
from ptqpipe.readers import READERS
from ptqpipe.rewriting.conversion import Conversion
from ptqpipe.runtime import load_model
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.pipeline import run as stage, stages
from ptqpipe.stages.pipeline.prepare import prepare
from ptqpipe.stages.pipeline.room import memory_of
from ptqpipe.stages.pipeline.table import FP8, TABLE, Way, kind_of, markdown
from ptqpipe.stages.transform import learn as learning
from ptqpipe.stages.transform.factors import find_factors
from ptqpipe.stages.transform.plan import TransformOptions
from ptqpipe.stages.transform.run import Transformation
from ptqpipe.stages.tune import run as tune_stage
from ptqpipe.transforms import learn_rotations
from tests import tiny
from tests.calibration.models import make_model, make_windows, write_windows
from tests.transforms.models import token_ids

LENGTH = 24
ONE = Machine(workers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token rows for 8 windows and one that is held out."""
    return write_windows(tmp_path_factory.mktemp("text") / "text.jsonl", make_windows(samples=9, seqlen=LENGTH))


@pytest.fixture(scope="module")
def undisturbed(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with the defaults that nobody stopped."""
    return made(model, tmp_path_factory.mktemp("undisturbed") / "out", work_of(text)).out


def work_of(text: Path, **more: Any) -> PipelineOptions:
    return PipelineOptions(data=(str(text),), samples=8, seqlen=LENGTH, **more)


def made(model: Path, out: Path, work: PipelineOptions, scheme: str | None = None, **more: Any) -> stage.Made:
    return stage.pipeline(model, recipe=RecipeOptions(scheme), out=out, work=work, machine=ONE, **more)


def ran(*words: object) -> str:
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def weights_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def few(text: object) -> tuple[object, ...]:
    return "--data", text, "--samples", 8, "--seqlen", LENGTH, "--workers", 1


def test_best_is_tune_and_convert_in_one_call_and_leaves_nothing_else(model: Path, text: Path, tmp_path: Path) -> None:
    printed = ran("convert", model, *few(text), "-o", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    for words in ("1 tune: GPTQ in the order of the model", "[1/3] tune", "[3/3] verify", "Next: ptqpipe eval"):
        assert words in printed
    again = ran("convert", model, "--eval", text, "-o", tmp_path / "measured", "--workers", 1)
    assert f"Next: ptqpipe report {tmp_path / 'measured'} --source {model}" in again
    assert json.loads((tmp_path / "measured.eval.json").read_text())["made"]["command"].startswith("ptqpipe")
    ran("tune", model, *few(text), "-o", tmp_path / "codes")
    ran("convert", model, "--rounding", tmp_path / "codes", "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    assert record["pipeline"]["quality"] == "best"
    assert record["rounding"]["method"] == "gptq"
    said = "output error of the tuned decoder layers: "
    assert said in printed.splitlines()[-5], "before what is written, and where"
    assert f"  {said}" in ran("verify", tmp_path / "out", "--source", model)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8"])
def test_good_has_the_codes_of_statistics_with_full_moments(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """The moments that are collected block by block are those of calibrate, held-out windows apart."""
    made(model, tmp_path / "out", work_of(text, quality="good"), scheme)
    ran("calibrate", model, *few(text), "-o", tmp_path / "stats")
    ran("convert", model, "--format", scheme, "--stats", tmp_path / "stats", "-o", tmp_path / "two", "--workers", 1)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")


def test_a_tensor_that_is_kept_with_nan_is_told_as_convert_without_data_tells_it(
    model: Path, text: Path, tmp_path: Path
) -> None:
    broken, out = shutil.copytree(model, tmp_path / "broken"), tmp_path / "out"
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    windows = ["--data", str(text), "--samples", "8", "--seqlen", str(LENGTH), "--quality", "good"]
    wanted = "warning: lm_head.weight is kept and has 1 NaN and 0 inf; the source checkpoint is damaged"
    assert wanted in ran("convert", broken, "-o", tmp_path / "plain")
    assert wanted in ran("convert", broken, *windows, "-o", out)
    shown = json.loads(ran("convert", broken, *windows, "-o", out, "--overwrite", "--json", "-q"))
    assert shown["not_finite"] == {"lm_head.weight": "1 NaN and 0 inf"}


def test_the_field_of_the_rows_can_be_named(model: Path, text: Path, tmp_path: Path) -> None:
    """In text and in what is measured on; a run with one field is not continued with another."""
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"input_ids": row[::-1], "body": row}) + "\n" for row in rows))
    plain = made(model, tmp_path / "plain", work_of(text, quality="fast", eval=(str(text),)))
    named = made(model, tmp_path / "named", work_of(other, quality="fast", field="body", eval=(str(other),)))
    assert weights_of(named.out) == weights_of(plain.out)
    assert named.evaluation is not None
    assert plain.evaluation is not None
    assert named.evaluation["kl"][0]["mean"] == plain.evaluation["kl"][0]["mean"]
    with pytest.raises(WrongOutput):
        made(model, tmp_path / "named", work_of(other, quality="fast", field="input_ids"), mode="resume")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b'{"input_ids": [3]}\n'])
def test_a_text_to_measure_on_that_cannot_be_read_is_refused_before_any_work(
    content: bytes, model: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    done = CliRunner().invoke(main, [*map(str, ("convert", model, "-o", tmp_path / "out", "--eval", bad))])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "bad.jsonl" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl"}


def test_fast_weights_scales_by_small_statistics(model: Path, text: Path, tmp_path: Path) -> None:
    done = made(model, tmp_path / "out", work_of(text, quality="fast", keep_stages=str(tmp_path / "kept")))
    assert {entry["weighting"] for entry in done.record["weights"].values()} == {"diagonal"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"pipeline.json", "statistics"}
    columns = {
        name: t.numel() for file in (tmp_path / "kept").rglob("*.safetensors") for name, t in load_file(file).items()
    }
    assert max(columns.values()) <= 96  # no moment of pairs


@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4"])
def test_four_bit_activations_are_quantized_behind_a_transform(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """Its factors are folded in while the model is read, to the bytes of the commands one by one, whose float32 copy of
    the model says float32 in its config; here the model's own dtype stays. Half of the text is the model's own."""
    done = made(model, tmp_path / "out", work_of(text), scheme)
    static = scheme == "nvfp4_w4a4"
    assert done.record["transformed"]["transform"] == "rotate_residual,rotate_values,aqas"
    assert done.record["source"]["name"] == "small"
    assert ("statistics" in done.record) == static
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    own, stats, floats, codes, two = (tmp_path / name for name in ("own.jsonl", "stats", "floats", "codes", "two"))
    ran("generate", model, "--samples", 4, *few(text)[4:], "-o", own)
    mixed = ("--data", f"{text}=1", *few(f"{own}=1"))
    turned = rotated(model, mixed, tmp_path, scheme)
    ran("calibrate", turned, *mixed, "--moments", "diagonal,block", "-o", stats)
    find_factors(turned, floats, stats=stats, options=TransformOptions("aqas", format=scheme, dtype="fp32"))
    if static:
        ran("calibrate", floats, *mixed, "--moments", "diagonal", "-o", tmp_path / "again")
    again = ("--stats", tmp_path / "again") if static else ()
    ran("tune", floats, *mixed, "--format", scheme, *again, "-o", codes)
    ran("convert", floats, "--rounding", codes, *again, "-o", two)
    assert weights_of(tmp_path / "out") == weights_of(two)


def rotated(model: Path, data: tuple[object, ...], folder: Path, scheme: str) -> Path:
    """The model with rotations that are learned for a format folded in."""
    pairs, turned = folder / "pairs", folder / "turned"
    ran("calibrate", model, *data, "--moments", "diagonal,pairs", "--holdout", 0, "-o", pairs)
    steps = TABLE[kind_of([get_scheme(scheme)])]["best"].steps
    options = TransformOptions("rotate", learn=steps, format=scheme, dtype="fp32")
    find_factors(model, turned, stats=pairs, options=options)
    return turned


def test_eight_bit_activations_are_quantized_behind_rotations(model: Path, text: Path, tmp_path: Path) -> None:
    done = made(model, tmp_path / "out", work_of(text), "fp8")
    assert done.record["transformed"]["transform"] == "rotate_residual,rotate_values"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    turned = rotated(model, few(text), tmp_path, "fp8")
    ran("tune", turned, *few(text), "--format", "fp8", "-o", tmp_path / "codes")
    ran("convert", turned, "--rounding", tmp_path / "codes", "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    told = json.loads(ran("verify", tmp_path / "out", "--source", model, "--json"))
    assert told["faults"] == []
    worst = max(weight["relative_mse"] for weight in told["weights"].values())
    assert 0 < worst < 0.02, worst  # of rotated weights beside plain ones it is near 2
    with safe_open(model / "model.safetensors", "pt") as before, safe_open(done.out / "model.safetensors", "pt") as now:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert before.get_slice(name).get_dtype() == now.get_slice(name).get_dtype()


def test_a_model_whose_head_is_the_embedding_has_its_values_rotated_and_the_record_says_so(
    text: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama_tied", dtype=torch.bfloat16)
    said: list[str] = []
    done = made(model, tmp_path / "out", work_of(text), "fp8", say=said.append)
    assert done.record["transformed"]["transform"] == "rotate_values"
    assert "the head is the embedding" in done.record["pipeline"]["without"][0]
    assert any("warning: rotate_residual is refused: the head is the embedding" in line for line in said)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_w4a4"])
def test_a_head_that_becomes_a_tensor_of_its_own_lets_the_stream_be_rotated(
    scheme: str, text: Path, tmp_path: Path
) -> None:
    """As transform --untie writes it: every reader finds it by the config, and verify by the record."""
    model = make_model(tmp_path / "model", "llama_tied", dtype=torch.bfloat16)
    work = work_of(text, untie=True)
    done = made(model, tmp_path / "out", work, scheme)
    assert "without" not in done.record["pipeline"]
    assert done.record["transformed"]["transform"].startswith("rotate_residual,rotate_values")
    assert json.loads((done.out / "config.json").read_text())["tie_word_embeddings"] is False
    told = json.loads(ran("verify", done.out, "--source", model, "--json"))
    assert told["faults"] == []
    assert "--quality best --untie\n" in (done.out / "README.md").read_text()
    stored, plain = load_file(done.out / "model.safetensors"), load_file(model / "model.safetensors")
    assert stored["lm_head.weight"].dtype == plain["model.embed_tokens.weight"].dtype
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    told_size = prepare(model, RecipeOptions(scheme), None, tmp_path / "two", work, "new", ONE).weights_bytes
    size = sum(file.stat().st_size for file in done.out.glob("*.safetensors*"))
    assert abs(size - told_size) < stored["lm_head.weight"].nbytes // 8
    ran("convert", model, "--format", scheme, "-o", tmp_path / "plain", "--workers", 1)
    with torch.no_grad():
        wanted, found, nearest = (
            load_model(one)(token_ids()).logits.log_softmax(-1) for one in (model, done.out, tmp_path / "plain")
        )
        kl, of_nearest = ((wanted.exp() * (wanted - one)).sum(-1).mean() for one in (found, nearest))
    assert 0 < kl < 1.1 * of_nearest, (kl, of_nearest)
    with pytest.raises(WrongOutput, match="is no output of this run"):
        made(model, done.out, work_of(text), scheme, mode="resume")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--untie is for the rotations that --data and --quality best learn in formats with quantized inputs, and"),
        (("--data", "TEXT"), "and nvfp4 has none; leave --untie out"),
        (("--data", "TEXT", "--format", "fp8", "--quality", "good"), "has none with --quality good; leave --untie out"),
        (("--data", "TEXT", "--budget", "6.5bits"), "and --budget 6.5bits has none; leave --untie out"),
    ],
)
def test_a_head_stays_the_embedding_where_nothing_is_rotated(
    words: tuple[str, ...], said: str, model: Path, text: Path, tmp_path: Path
) -> None:
    given = [str(text) if word == "TEXT" else word for word in words]
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "out"), "--untie", *given])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_rotations_that_gain_nothing_are_left_out(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE[FP8], "best", Way("rotate", 1, method="gptq"))
    monkeypatch.setattr(learn_rotations, "_RATE", 0.0)
    done = made(model, tmp_path / "out", work_of(text), "fp8")
    assert "transformed" not in done.record
    assert "gain nothing" in done.record["pipeline"]["without"][0]


def test_the_models_own_text_is_half_of_what_four_bit_inputs_learn_from_unless_the_call_says_otherwise(
    model: Path, text: Path, tmp_path: Path
) -> None:
    half = made(model, tmp_path / "half", work_of(text), "mxfp4")
    asked = PipelineOptions(data=(str(text), "self"), samples=8, seqlen=LENGTH)
    assert weights_of(half.out) == weights_of(made(model, tmp_path / "asked", asked, "mxfp4").out)
    said: list[str] = []
    fields = made(model, tmp_path / "fields", work_of(text, field="input_ids"), "mxfp4", say=said.append)
    assert "own text is left out: --field input_ids is in no row of it" in fields.record["pipeline"]["without"][0]
    assert any("warning: the model's own text is left out" in line for line in said)
    assert not any("the model writes its own text" in line for line in said)
    assert weights_of(half.out) != weights_of(fields.out)


@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4", "nvfp4"])
def test_no_more_lies_beside_the_output_than_the_header_says(
    scheme: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at whenever a stage ends, a component has its factors, a layer its codes, and a unit is written. No file
    is a copy of the model: none is larger than the output, but for moments of gradients, where a model is this small.
    """
    seen: list[dict[str, int]] = []

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made_so_far = real(*args, **kwargs)
            files: dict[str, int] = {}
            for folder, _, names in os.walk(tmp_path):  # which ignores what another thread has deleted
                for path in (Path(folder, name) for name in names):
                    with suppress(FileNotFoundError):
                        files[str(path.relative_to(tmp_path))] = path.stat().st_size
            seen.append(files)
            return made_so_far

        return call

    looked_at = ("generate", "calibrate", "find_factors", "tune", "verify")
    inside = ((Transformation, "fold"), (Conversion, "do"), (tune_stage, "follow"))
    for where, name in (*((stages, name) for name in looked_at), *inside):
        monkeypatch.setattr(where, name, looking(getattr(where, name)))
    said: list[str] = []
    work = PipelineOptions(data=("self",), samples=8, seqlen=LENGTH)
    run = prepare(model, RecipeOptions(scheme), None, tmp_path / "out", work, "new", ONE)
    done = stage.run(run, say=said.append)
    assert f"  beside the output at most {run.disk}" in said
    memory = next(line for line in said if line.startswith("  memory: "))
    assert re.search(r"generate about 66\d MiB \(the whole model.*, tune about 66\d MiB \(one decoder layer", memory)
    output = sum(path.stat().st_size for path in done.out.iterdir())
    assert len(seen) > 10
    beside = [sum(size for name, size in files.items() if name.startswith(".out.stages")) for files in seen]
    most = max(run.disk.codes, run.disk.pairs) + run.disk.small
    assert most / 8 < max(beside) <= most
    small = ("/gradients/", "pairs.safetensors", "ptqpipe-folding.json", "rotations")
    copies = [size for files in seen for name, size in files.items() if not any(part in name for part in small)]
    assert max(copies) <= output
    assert max(sum(files.values()) for files in seen) <= output + most


def test_a_mixture_of_experts_gets_gptq_for_its_experts(text: Path, tmp_path: Path) -> None:
    """They are one stack each while the model runs, and the order of calls says nothing of them."""
    moe = make_model(tmp_path / "moe", "mixtral", dtype=torch.bfloat16)
    made(moe, tmp_path / "out", work_of(text), "fp8")
    ptqpipe.convert(moe, format="fp8", out=tmp_path / "plain", workers=1)
    found, plain = (ptqpipe.load_tensors(tmp_path / name) for name in ("out", "plain"))
    experts = [name for name in plain if "experts" in name and hasattr(plain[name], "codes")]
    assert experts
    moved = [name for name in experts if not torch.equal(found[name].codes, plain[name].codes)]
    assert len(moved) > len(experts) / 2  # the held-out window may give some back to plain rounding


def stops(real: Callable[..., Any], *, at: int, how: type[BaseException] = KeyboardInterrupt) -> Callable[..., Any]:
    """The function, which ends the run at its call number ``at``."""
    calls: list[int] = []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise how
        return real(*args, **kwargs)

    return stopping


STAGES = [  # in their order: each goes on where the one before was stopped
    (stages, "calibrate", 1),  # with pairs
    (stages, "find_factors", 1),
    (Transformation, "learn", 1),
    (learning, "_entry", 2),
    (stages, "read_json_object", 1),
    (stages, "calibrate", 1),  # of the rotated model
    (stages, "find_factors", 1),
    (Transformation, "fold", 2),
    (stages, "calibrate", 1),  # of the transformed model
    (tune_stage, "follow", 2),
    (Conversion, "do", 5),
    (Conversion, "record", 1),
    (stages, "verify", 1),
    (stages.evaluation, "evaluate", 1),
    (stages, "make_report", 1),
]


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run with all stages gives that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = made(model, out, work_of(text, eval=(str(text),), report=True), "nvfp4_w4a4")
    assert done.report == out.parent / "out.report.html"
    assert done.evaluation is not None
    assert done.evaluation["kl"][0]["mean"] > 0
    assert len(done.evaluation["samples"]) == 3
    assert "## Quality" in (out / "README.md").read_text()
    found = files_of(out)
    card = found["README.md"].decode()
    assert "KL divergence, nats per token" in card
    assert f"--data TEXT --samples 8 --seqlen {LENGTH} --quality best" in card
    assert "codes by tune gptq" in card
    return found


def test_a_run_that_was_stopped_in_every_stage_ends_with_the_same_bytes(
    model: Path, text: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(text, eval=(str(text),), report=True)
    for where, name, at in STAGES:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, stops(getattr(where, name), at=at))
            print(f"until call {at} of {name}")
            with pytest.raises(KeyboardInterrupt):
                made(model, tmp_path / "out", work, "nvfp4_w4a4", mode="resume")
    made(model, tmp_path / "out", work, "nvfp4_w4a4", mode="resume")
    assert files_of(tmp_path / "out") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.eval.json", "out.report.html"}


def test_what_was_quantized_behind_a_transform_is_compared_with_the_model_itself(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """By the factors in the record, also after a change of layout; other factors are another model's."""
    out = tmp_path / "out"
    out.mkdir()
    for name, raw in whole.items():
        (out / name).write_bytes(raw)
    ran("relayout", out, "--container", "modelopt", "-o", tmp_path / "modelopt")
    for folder in (out, tmp_path / "modelopt"):
        told = json.loads(ran("verify", folder, "--source", model, "--json"))
        assert told["faults"] == []
        assert not any("folded into the model" in note["message"] for note in told["notes"])
        worst = max(weight["relative_mse"] for weight in told["weights"].values())
        assert 0 < worst < 0.2, worst  # of rotated weights beside plain ones it is near 2
    shown = ran("report", out, "--source", model, "-o", tmp_path / "report.html")
    assert "decoder layers' output error" in shown
    record = json.loads((out / "ptqpipe.json").read_text())
    folding = next(entry for entry in record["transformed"]["foldings"] if entry.get("changed"))
    folding["factors"] = encoded(torch.full((folding["channels"],), 2.0, dtype=torch.float64))
    (out / "ptqpipe.json").write_text(json.dumps(record))
    refused = CliRunner().invoke(main, ["verify", str(out), "--source", str(model)])
    assert refused.exit_code == 1
    folding["factors"] = "damaged"
    (out / "ptqpipe.json").write_text(json.dumps(record))
    refused = CliRunner().invoke(main, ["verify", str(out), "--source", str(model)])
    assert f"the factors of '{folding['edge']}' are damaged" in refused.output


KILLED = """
import os, signal, sys
from ptqpipe.cli import main
from ptqpipe.rewriting.consume import Consumed

real = Consumed._remove


def remove(self, file):
    real(self, file)
    print(*sorted(os.listdir(self._codes.path)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


Consumed._remove = remove
main(sys.argv[1:])
"""


@pytest.mark.usefixtures("forks")
def test_codes_that_are_written_are_gone_and_a_killed_run_goes_on_without_them(
    model: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """One decoder layer's codes go before the other one's are written; kill -9 comes at that moment."""
    words = ["convert", model, *few(text), "-o", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sum(f"model.layers.{layer}.safetensors" in done.stdout for layer in (0, 1)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {".out.partial", ".out.stages"}
    refused = CliRunner().invoke(main, [*map(str, words)])
    assert refused.exit_code == 2
    assert "--resume continues it" in refused.output
    ran(*words, "--resume")
    assert files_of(tmp_path / "out") == files_of(undisturbed)
    assert "already complete" in ran(*words, "--resume")
    with pytest.raises(AlreadyComplete):
        made(model, tmp_path / "out", work_of(text), mode="resume")


KILLED_BACKWARDS = """
import os, signal, sys
from ptqpipe.cli import main
from ptqpipe.tuning import backwards

at, real = int(sys.argv[1]), backwards.reverse_model
backwards.BASE_BYTES = 8 << 30  # all of the memory: the hidden states lie on disk


def dies(*args, **kwargs):
    number = 0
    for number, found in enumerate(real(*args, **kwargs), 1):
        yield found
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)


backwards.reverse_model = dies
main(sys.argv[2:])
"""


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.usefixtures("forks")
def test_kill_9_inside_or_right_behind_the_reverse_pass_and_resume_give_the_bytes_of_an_undisturbed_run(
    layers: int, model: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The pass goes over two decoder layers: it is stopped behind the first, or when its last file is written."""
    words = [*map(str, ["convert", model, *few(text), "-o", tmp_path / "out"])]
    killed = [sys.executable, "-c", KILLED_BACKWARDS, str(layers), *words]
    done = subprocess.run(killed, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "[1/3] tune" in done.stdout or "1 tune" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {".out.stages"}
    ran(*words, "--resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert files_of(tmp_path / "out") == files_of(undisturbed)


def test_the_call_that_continues_is_told_and_another_one_is_refused(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["convert", model, *few(text), "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["ptqpipe", *map(str, words)])
    with monkeypatch.context() as patch:
        patch.setattr(tune_stage, "follow", stops(tune_stage.follow, at=2))
        stopped = CliRunner().invoke(main, [*map(str, words)])
    assert stopped.exit_code == 130
    assert f"continue with: ptqpipe convert {model}" in stopped.output
    other = CliRunner().invoke(main, [*map(str, words), "--quality", "good", "--resume"])
    assert other.exit_code == 2
    assert "was begun with another value of --quality" in other.output
    ran(*words, "--quality", "good", "--overwrite")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_run_that_replaces_an_output_goes_on_where_it_was_stopped(
    model: Path, text: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former output is there until the new one is whole; --resume need not say --overwrite again."""
    work = work_of(text)
    ptqpipe.convert(model, format="fp8", out=tmp_path / "out", workers=1)
    former = files_of(tmp_path / "out")
    with pytest.raises(WrongOutput, match="no unfinished run next to it and is no output of this run; --overwrite"):
        made(model, tmp_path / "out", work, mode="resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}  # it is told before any work
    with monkeypatch.context() as patch:
        patch.setattr(tune_stage, "follow", stops(tune_stage.follow, at=2))
        with pytest.raises(KeyboardInterrupt):
            made(model, tmp_path / "out", work, mode="overwrite")
    assert files_of(tmp_path / "out") == former
    with monkeypatch.context() as patch:
        patch.setattr(stages, "verify", stops(stages.verify, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(model, tmp_path / "out", work, mode="resume")
    made(model, tmp_path / "out", work, mode="resume")
    assert files_of(tmp_path / "out") == files_of(undisturbed)


def test_the_stages_that_another_call_kept_are_not_taken_for_ones_own(model: Path, text: Path, tmp_path: Path) -> None:
    """A recipe that was planned for another budget, a text that another model wrote."""
    kept = str(tmp_path / "kept")
    made(model, tmp_path / "a", PipelineOptions(budget="6.5bits", keep_stages=kept))
    recipe = (tmp_path / "kept" / "recipe.yaml").read_bytes()
    with pytest.raises(UsageError, match="has the stages of a run with another value of --budget; name another folder"):
        made(model, tmp_path / "b", PipelineOptions(budget="9bits", keep_stages=kept))
    made(model, tmp_path / "c", PipelineOptions(budget="6.5bits", keep_stages=kept))
    assert (tmp_path / "kept" / "recipe.yaml").read_bytes() == recipe
    with pytest.raises(UsageError, match="has files that no run left there; name an empty folder"):
        made(model, tmp_path / "d", work_of(text, keep_stages=str(text.parent)))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c", "kept"}


def test_a_run_that_fails_before_any_work_leaves_nothing(model: Path, text: Path, tmp_path: Path) -> None:
    short = CliRunner().invoke(main, ["convert", str(model), "--data", str(text), "-o", str(tmp_path / "out")])
    assert short.exit_code == 2
    assert "the data give 216 tokens, 3 windows of 64, expected 128" in short.output
    assert not list(tmp_path.iterdir())


def test_a_budget_is_kept_and_its_layers_are_tuned(model: Path, text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("--budget", "6.5bits", "--for", "vllm", "--keep-stages", kept)
    ran("convert", model, *few(text), *words, "-o", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    bits = [(entry["bits_per_weight"], entry["shape"][0] * entry["shape"][1]) for entry in record["weights"].values()]
    assert sum(b * n for b, n in bits) / sum(n for _, n in bits) <= 6.5
    assert len({rule["scheme"] for rule in record["recipe"]["rules"]}) > 1  # of which one may keep
    assert {entry["algorithm"] for entry in record["weights"].values()} == {"learned"}
    assert {path.name for path in kept.iterdir()} == {"pipeline.json", "statistics", "recipe.yaml", "codes"}
    assert "KL divergence to second order" in (kept / "recipe.yaml").read_text()
    assert not {"mxfp4a16", "mxfp8a16"} & {entry["scheme"] for entry in record["weights"].values()}


def test_the_model_writes_its_own_text(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("--data", "self", "--samples", 8, "--seqlen", LENGTH, "--quality", "good", "--workers", 1)
    printed = ran("convert", model, *words, "--keep-stages", kept, "-o", tmp_path / "out")
    assert "1 generate: the model writes its own text" in printed
    assert len((kept / "text.jsonl").read_text().splitlines()) == 9
    again = ("--data", kept / "text.jsonl", *words[2:])
    ran("convert", model, *again, "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")


@pytest.mark.parametrize(("own", "lines"), [("self", 4), ("self=3", 6)])
def test_a_text_is_mixed_with_the_models_own_by_weights(
    own: str, lines: int, model: Path, text: Path, tmp_path: Path
) -> None:
    kept, weight = tmp_path / "kept", own.removeprefix("self").removeprefix("=") or "1"
    words = ("--samples", 8, "--seqlen", LENGTH, "--quality", "good", "--workers", 1)
    ran("convert", model, "--data", text, "--data", own, *words, "--keep-stages", kept, "-o", tmp_path / "out")
    written = kept / "text.jsonl"
    assert len(written.read_text().splitlines()) == lines
    ran("convert", model, "--data", f"{text}=1", "--data", f"{written}={weight}", *words, "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    ran("convert", model, "--data", text, *words, "-o", tmp_path / "plain")
    assert weights_of(tmp_path / "out") != weights_of(tmp_path / "plain")


def test_a_folder_stands_for_the_texts_in_it_and_python_takes_the_same_options(
    model: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(text.read_bytes())
    (folder / "notes.md").write_text("no text to calibrate on")
    options = {"samples": 8, "seqlen": LENGTH, "quality": "good", "workers": 1}
    done = ptqpipe.convert(model, data=folder, out=tmp_path / "out", **options)
    two = ptqpipe.convert(model, data=[text], out=tmp_path / "two", **options)
    assert weights_of(done.out) == weights_of(two.out)


def test_a_folder_and_a_data_set_are_texts_to_measure_on_as_they_are_texts_to_learn_from(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: rows)
    (tmp_path / "texts").mkdir()
    shutil.copy(text, tmp_path / "texts" / "a.jsonl")
    kl = {}
    for name in (str(text), str(tmp_path / "texts"), "owner/name:config:test"):
        ran("convert", model, "--eval", name, "-o", tmp_path / "out", "--workers", 1, "--overwrite")
        found = json.loads((tmp_path / "out.eval.json").read_text())["kl"]
        kl[name] = found[0]["mean"]
    assert len(set(kl.values())) == 1, kl


@pytest.mark.parametrize(("vocabulary", "least", "most"), [(2048, 850 << 20, 1 << 30), (151_936, 3 << 30, 4 << 30)])
def test_the_memory_of_a_comparison_counts_what_the_model_predicts(
    vocabulary: int, least: int, most: int, tmp_path: Path
) -> None:
    """Measured: 879 MiB and 3130 MiB with small models of these heads."""
    config = {**tiny.LLAMA_CONFIG, "vocab_size": vocabulary, "max_position_embeddings": 1024}
    tiny.save(tmp_path / "model", tiny.llama(layers=1), config=config)
    with Source.open(tmp_path / "model") as source:
        found = memory_of(source, PipelineOptions(eval=("text",)), None, limit=1 << 31)
    assert least < found["eval"][0] < most


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--quality best", "--quality best says how much is computed with a text; add --data"),
        ("--formats nvfp4,fp8", "add --budget, or give one --format"),
        ("--samples 8", "--samples 8 says how --data is read; add --data FILE"),
        ("--seqlen 8 --eval TEXT", "--seqlen 8 says how --data is read"),
        ("--budget 5bits --format nvfp4", "--budget chooses the formats, and --format does; give one of them"),
        ("--budget 5", "--budget 5 is a number without a unit; write 5bits"),
        ("--budget 1bits", "--budget 1bits is too small; the smallest possible is"),
        ("--data none.txt", "none.txt does not exist"),
        ("--data EMPTY", "is a folder without .txt, .jsonl, .parquet files"),
        ("--data self --data TEXT --data self=2", "--data has self twice; give it once, self=2 for twice its share"),
        ("--data self --data TEXT --field text", "--field text is in no row of the model's own text"),
        ("--data self --data none.txt", "none.txt does not exist"),
        ("--data TEXT --damping 0.1", "--damping is decided by --quality"),
        ("--data TEXT --stats s", "--stats is for a conversion alone"),
        ("--eval none.txt", "none.txt does not exist; give --eval a .txt"),
        ("--eval EMPTY", "is a folder without .txt, .jsonl, .parquet files"),
        ("--for vllm --format mxfp4a16", "vllm does not run mxfp4a16; it runs nvfp4, nvfp4_w4a4, mxfp4,"),
        ("--for sglang --format mxfp8 --data TEXT", "sglang does not run mxfp8"),
        ("--for trtllm --format nvfp4_w4a4 --container compressed_tensors", "contradicts --for trtllm"),
        ("--for sglang --budget 5bits --formats nvfp4,mxfp4", "sglang does not run mxfp4"),
    ],
)
def test_wrong_calls_get_one_line_before_any_work(
    words: str, message: str, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = [str({"TEXT": text, "EMPTY": tmp_path / "empty"}.get(word, word)) for word in words.split()]
    done = CliRunner().invoke(main, ["convert", str(model), *given, "-o", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert " -> " not in done.output, "a header that says what will be done"
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_disk_that_is_too_small_is_found_before_any_work(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(OutputError, match="has 100 kB free, the output and what is made on the way need"):
        made(model, tmp_path / "out", work_of(text), "nvfp4_w4a4")
    assert not list(tmp_path.iterdir())


def test_a_reader_chooses_the_container(model: Path, tmp_path: Path) -> None:
    ran("convert", model, "--format", "nvfp4_w4a4", "--for", "trtllm", "-o", tmp_path / "a")
    ran("convert", model, "--format", "nvfp4_w4a4", "--container", "modelopt", "-o", tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_every_reader_runs_formats_that_its_containers_can_store() -> None:
    for reader, rows in READERS.items():
        for scheme, containers in rows.items():
            assert all(get_container(name).supports(get_scheme(scheme)) is None for name in containers), reader


def test_the_docs_have_the_table_of_qualities() -> None:
    assert markdown() in (Path(ptqpipe.__file__).parents[1] / "docs" / "calibration.md").read_text()


def test_plan_chooses_among_what_the_reader_runs_and_warns_of_what_it_gets_wrong(model: Path, tmp_path: Path) -> None:
    ran("plan", model, "--budget", "6bits", "--for", "sglang", "-o", tmp_path / "a.yaml")
    text = (tmp_path / "a.yaml").read_text()
    assert "container: compressed_tensors" in text
    assert set(re.findall(r"format: (\w+)", text)) <= {"nvfp4", "fp8_dynamic", "keep"}
    ran("convert", model, "--recipe", tmp_path / "a.yaml", "--for", "sglang", "-o", tmp_path / "out")
    words = ("plan", model, "--budget", "6bits", "-o", tmp_path / "b.yaml")
    told = ran(*words, "--formats", "mxfp4a16,fp8")
    assert "warning: vLLM 0.32 quantizes the activations of mxfp4a16" in told
    refused = CliRunner().invoke(main, [*map(str, words), "--formats", "mxfp4a16,fp8", "--for", "vllm"])
    assert refused.exit_code == 2
    assert "vllm does not run mxfp4a16" in refused.output


def test_a_folder_of_stages_in_the_model_or_the_output_is_refused_before_any_work(
    model: Path, text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(model, source)
    before = sorted(tmp_path.rglob("*"))
    for kept in (tmp_path / "out", tmp_path / "out" / "kept", tmp_path, source / "kept"):
        with pytest.raises(UsageError, match="overlap; choose another --keep-stages"):
            made(source, tmp_path / "out", work_of(text, quality="fast", keep_stages=str(kept)))
    with pytest.raises(UsageError, match="overlap; choose another -o"):
        made(source, source / "out", PipelineOptions(budget="6.5bits"))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_by_a_name_that_leads_up_is_what_is_verified_and_measured(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made(model, Path("absent") / ".." / ".." / "there", PipelineOptions(eval=(str(text),)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there", "there.eval.json"]


@pytest.mark.parametrize("more", [(), ("--eval", "text.jsonl")])
@pytest.mark.parametrize("out", [".", "..", "../here"])
def test_the_working_folder_is_not_replaced(
    out: str, more: tuple[str, ...], model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative names, of texts and of the output itself, would lead nowhere in the middle of the run, and in the shell
    after it."""
    (tmp_path / "here").mkdir()
    shutil.copy(text, tmp_path / "here" / "text.jsonl")
    if not more:
        (tmp_path / "here" / "text.jsonl").unlink()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(main, ["convert", str(model), "-o", out, *more, "--overwrite"])
    assert done.exit_code == 2, done.output
    assert "is the working folder or holds it" in done.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_not_resumed_with_another_requantize(
    first: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides what a budget chooses from, where the source has weights below 8 bits."""
    source = ptqpipe.convert(model, format="mxfp4", out=tmp_path / "source").path
    assert source is not None
    works = [PipelineOptions(budget="4.6bits", formats=("mxfp4", "nvfp4"), requantize=asked) for asked in (False, True)]
    with monkeypatch.context() as patch:
        patch.setattr(stages, "verify", stops(stages.verify, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(source, tmp_path / "out", works[first])
    with pytest.raises(UsageError, match="was begun with another value of --requantize"):
        made(source, tmp_path / "out", works[not first], mode="resume")
    made(source, tmp_path / "out", works[first], mode="resume")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "6.5bits", "--kv-cache", "fp8"), "--kv-cache needs statistics of a text; add --data FILE"),
        (("--eval", "TEXT", "--kv-cache", "fp8"), "--kv-cache needs statistics of a text; add --data FILE"),
        (("--budget", "6.5bits", "--bias-correction"), "--bias-correction needs statistics of a text; add --data"),
        (("--data", "TEXT", "--quality", "fast", "--rotate", "down_proj:32"), "--quality fast weights scales by"),
        (
            ("--data", "TEXT", "--quality", "fast", "--rotate", "down_proj:32", "--budget", "6.5bits"),
            "--quality fast weights scales by",
        ),
    ],
)
def test_what_needs_moments_that_no_stage_collects_is_refused_before_any_work(
    words: tuple[str, ...], said: str, model: Path, text: Path, tmp_path: Path
) -> None:
    given = [str(text) if word == "TEXT" else word for word in words]
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "out"), *given])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"Error: {said}" in done.stderr
    assert not any(tmp_path.iterdir())
