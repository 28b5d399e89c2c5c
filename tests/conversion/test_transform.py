"""transform end to end: the same logits, the same bits where that is claimed, refusals, resuming."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.checkpoint import TensorSpec
from ptqpipe.checkpoint.fingerprint import OF_WEIGHTS
from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.cli import main
from ptqpipe.conversion.dequantize import round_to
from ptqpipe.conversion.job import WriteResult
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import AlreadyComplete, CheckpointError, NumericsError, OutputError, PtqError, UsageError
from ptqpipe.models.source import Source
from tests import tiny
from tests.quantization.transforms.models import logits, make_model, make_statistics, token_ids

pytest.importorskip("transformers")
DEMO = Path(__file__).resolve().parent.parent.parent / "ptqpipe" / "demo_model"


def run(model: Path, out: Path, options: TransformOptions, stats: Path | None) -> WriteResult:
    done = transform(model, out, stats=stats, options=options)
    assert done is not None
    return done


def check_same_logits(model: Path, out: Path, ids: torch.Tensor) -> None:
    """float64 runs agree to the rounding of the written dtype, float32 runs to that of float32.

    The bound is measured: how far the original's own float32 run is from its float64 run, times 8 (the folded
    weights are rounded once more, to float32, and the sums see other numbers).
    """
    exact = logits(model, ids, dtype=torch.float64)
    own = (logits(model, ids).double() - exact).abs().max()
    assert 0 < own < 1e-2 * exact.std()
    assert (logits(out, ids).double() - exact).abs().max() <= 8 * own
    assert (logits(out, ids, dtype=torch.float64) - exact).abs().max() <= 8 * own


def test_smoothquant_of_the_demo_model_keeps_its_logits(tmp_path: Path) -> None:
    ids = token_ids(vocabulary=1024)
    stats = make_statistics(DEMO, tmp_path / "stats", ids)
    done = run(DEMO, tmp_path / "out", TransformOptions("smoothquant"), stats)
    assert len(done.record["foldings"]) == 6
    assert not done.record["exact"]
    check_same_logits(DEMO, tmp_path / "out", ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_power_of_two_smoothing_of_the_demo_model_changes_no_bit_of_its_logits(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    ids = token_ids(vocabulary=1024)
    stats = make_statistics(DEMO, tmp_path / "stats", ids)
    done = run(DEMO, tmp_path / "out", TransformOptions("smoothquant", alpha=1.0, power_of_two=True), stats)
    assert done.record["exact"]
    assert done.record["rounding"] == 0.0
    assert sum(entry["changed"] for entry in done.record["foldings"]) > 100
    assert torch.equal(logits(tmp_path / "out", ids, dtype=dtype), logits(DEMO, ids, dtype=dtype))


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama_bias",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gpt2",
    ],
)
def test_smoothing_on_every_edge_keeps_the_logits(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    edges = ("norm", "value") if kind == "gpt2" else ("norm", "value", "up")
    done = run(model, tmp_path / "out", TransformOptions("smoothquant", fold_at=edges), stats)
    assert {entry["kind"] for entry in done.record["foldings"]} == set(edges)
    assert max(entry["largest"] / entry["least"] for entry in done.record["foldings"]) > 4
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize(
    "kind", ["llama", "llama_bias", "llama_tied", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_both_rotations_keep_the_logits(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    run(model, tmp_path / "out", TransformOptions("rotate", rotation_size=16, untie=kind == "llama_tied"), None)
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_values_rotate_where_the_residual_stream_must_not(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    run(model, tmp_path / "out", TransformOptions("rotate_values", rotation_size=16), None)
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize("kind", ["llama_bias", "gemma", "mixtral", "gpt2"])
def test_factors_that_are_folded_in_while_reading_give_the_bytes_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    """Every tensor whole, and runs of bytes that begin and end within a number, a row or an expert's plane."""
    model = make_model(tmp_path / "model", kind, dtype=torch.bfloat16)
    edges = ("norm", "value") if kind == "gpt2" else ("norm", "value", "up")
    stats = make_statistics(model, tmp_path / "stats", token_ids())
    options = TransformOptions("smoothquant", fold_at=edges, dtype="fp32")
    done = run(model, tmp_path / "out", options, stats)
    found = find_factors(model, tmp_path / "factors", stats=stats, options=options)
    assert sum(path.stat().st_size for path in (tmp_path / "factors").iterdir()) < done.written_bytes / 4
    assert [{**one, "factors": None} for one in found.content["foldings"]] == [
        {**one, "factors": None} for one in done.record["foldings"]
    ]
    check_same_bytes(tmp_path / "factors", tmp_path / "out")


def check_same_bytes(factors: Path, out: Path) -> None:
    """Reading a model with factors folded in gives the names, the order and the bytes of the written checkpoint."""
    with Source.open(factors) as folded, Source.open(out) as written:
        ours, theirs = folded.reader, written.reader
        assert list(ours.entries) == list(theirs.entries)
        assert ours.fingerprint()[:OF_WEIGHTS] == theirs.fingerprint()[:OF_WEIGHTS]
        for name, entry in theirs.entries.items():
            assert torch.equal(ours.read(name), theirs.read(name))
            for start, stop in ((0, 3), (entry.nbytes // 3, entry.nbytes // 2 + 5), (entry.nbytes - 7, entry.nbytes)):
                assert ours.read_bytes(name, start=start, stop=stop) == theirs.read_bytes(name, start=start, stop=stop)


def test_a_folder_of_factors_is_good_for_its_model_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    stats = make_statistics(model, tmp_path / "stats", token_ids())
    with pytest.raises(UsageError, match="rotate has no factors that are folded in while a model is read"):
        find_factors(model, tmp_path / "factors", stats=stats, options=TransformOptions("rotate", rotation_size=16))
    options = TransformOptions("smoothquant", dtype="fp32")
    find_factors(model, tmp_path / "factors", stats=stats, options=options)
    make_model(model, "llama", seed=1)
    with pytest.raises(CheckpointError, match=r"is not the model that .* has factors of; make them again"):
        Source.open(tmp_path / "factors")


def test_a_search_leaves_alone_what_its_format_does_not_divide(tmp_path: Path) -> None:
    """stories-like: 172 inner channels are no multiple of 16, so down_proj is not quantized and wants no factors."""
    tensors = tiny.llama(inner=172, dtype=torch.float32)
    model = tiny.save(tmp_path / "model", tensors, config={**tiny.LLAMA_CONFIG, "intermediate_size": 172})
    ids = token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids, blocks=False)
    done = run(model, tmp_path / "out", TransformOptions("awq"), stats)
    by_kind = {entry["kind"]: entry for entry in done.record["foldings"]}
    assert by_kind["up"]["skipped"] == "nothing is quantized"
    assert by_kind["norm"]["changed"] > 0
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.slow
@pytest.mark.parametrize("apply", ["awq", "aqas", "smooth_swiglu", "smoothquant,awq", "aqas,rotate"])
def test_searches_and_sequences_keep_the_logits(tmp_path: Path, apply: str) -> None:
    model, ids = make_model(tmp_path / "model", "mixtral"), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    done = run(model, tmp_path / "out", TransformOptions(apply, rotation_size=16, format="nvfp4_w4a4"), stats)
    assert set(done.record["transforms"]) == {entry["transform"] for entry in done.record["foldings"]}
    assert any(entry.get("changed") for entry in done.record["foldings"])
    check_same_logits(model, tmp_path / "out", ids)


def test_a_second_transform_sees_the_inputs_of_the_first(tmp_path: Path) -> None:
    """SmoothQuant at alpha 1 evens out the inputs: at alpha 1 again there is nothing left to do."""
    model, ids = make_model(tmp_path / "model", "llama"), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    once = run(model, tmp_path / "once", TransformOptions("smoothquant", alpha=1.0), stats)
    model_again = make_statistics(tmp_path / "once", tmp_path / "stats2", ids)
    again = run(tmp_path / "once", tmp_path / "twice", TransformOptions("smoothquant", alpha=1.0), model_again)
    for first, second in zip(once.record["foldings"], again.record["foldings"], strict=True):
        assert first["largest"] / first["least"] > 4
        assert second["largest"] / second["least"] < 1.001


@pytest.mark.parametrize("kind", ["gemma", "llama"])
def test_powers_of_two_are_exact_unless_the_norm_adds_one(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind, dtype=torch.bfloat16), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    every = TransformOptions("smoothquant", alpha=1.0, power_of_two=True, fold_at=("norm", "value", "up"))
    done = run(model, tmp_path / "out", every, stats)
    assert done.record["exact"] == (kind == "llama")
    assert {t.dtype for n, t in load_file(tmp_path / "out" / "model.safetensors").items() if "layernorm" in n} == {
        torch.bfloat16 if kind == "llama" else torch.float32
    }
    inner = run(model, tmp_path / "inner", replace(every, fold_at=("value", "up")), stats)
    assert inner.record["exact"]  # no norm among these
    for out in [tmp_path / "inner"] + [tmp_path / "out"] * (kind == "llama"):
        assert torch.equal(logits(out, ids), logits(model, ids))
        assert torch.equal(logits(out, ids, dtype=torch.bfloat16), logits(model, ids, dtype=torch.bfloat16))


def test_stacked_experts_become_what_separate_ones_become(tmp_path: Path) -> None:
    model, ids = make_model(tmp_path / "model", "qwen3_moe"), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    weights, layer = load_file(model / "model.safetensors"), "model.layers.{}.mlp.experts"

    def stacked(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {n: t for n, t in found.items() if ".experts." not in n}
        for i in range(2):
            base = layer.format(i)
            parts = [[found[f"{base}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(3)]
            result[f"{base}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
            result[f"{base}.down_proj"] = torch.stack([down for _, _, down in parts])
        return result

    other = tiny.save(tmp_path / "stacked", stacked(weights), config=json.loads((model / "config.json").read_text()))
    content = json.loads((stats / "stats.json").read_text())
    content["model"]["fingerprint"] = ptqpipe.checkpoint.reader.CheckpointReader.open(other).fingerprint()
    (tmp_path / "stats2").mkdir()
    (tmp_path / "stats2" / "stats.json").write_text(json.dumps(content))
    (tmp_path / "stats2" / "block.safetensors").write_bytes((stats / "block.safetensors").read_bytes())
    options = TransformOptions("smoothquant,rotate", rotation_size=16, fold_at=("norm", "up"))
    run(model, tmp_path / "one", options, stats)
    run(other, tmp_path / "two", options, tmp_path / "stats2")
    want, found = (
        stacked(load_file(tmp_path / "one" / "model.safetensors")),
        load_file(tmp_path / "two" / "model.safetensors"),
    )
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name
    options = TransformOptions("smoothquant", fold_at=("norm", "up"), dtype="fp32")
    run(other, tmp_path / "three", options, tmp_path / "stats2")
    find_factors(other, tmp_path / "factors", stats=tmp_path / "stats2", options=options)
    check_same_bytes(tmp_path / "factors", tmp_path / "three")


def test_a_tied_head_that_is_stored_besides_is_not_untied(tmp_path: Path) -> None:
    """Headers do not say whether it differs, and so which of the two readers take."""
    model = make_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    options = TransformOptions("rotate", rotation_size=16, untie=True)
    with pytest.raises(UsageError, match=r"to the embedding, but 'lm_head\.weight' is stored, too: delete it"):
        transform(model, tmp_path / "out", options=options)


def test_an_untied_head_is_written_once_and_the_config_says_so(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama_tied")
    done = run(model, tmp_path / "out", TransformOptions("rotate", rotation_size=16, untie=True), None)
    assert done.record["untied"] == ["lm_head.weight"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    check_same_logits(model, tmp_path / "out", token_ids())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_cost_of_rounding_is_that_of_the_written_dtype(tmp_path: Path, dtype: str) -> None:
    model = make_model(tmp_path / "model", "llama")
    done = run(model, tmp_path / "out", TransformOptions("rotate", rotation_size=16, dtype=dtype), None)
    largest = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-25}[dtype]  # half a unit in the last place
    assert 0 < done.record["rounding"] <= largest**2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == {
        "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
    }[dtype]  # fmt: skip


def test_powers_of_two_in_a_narrower_dtype_are_not_called_exact(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    stats = make_statistics(model, tmp_path / "stats", token_ids())
    options = TransformOptions("smooth_swiglu", alpha=1.0, dtype="bf16")
    done = run(model, tmp_path / "out", options, stats)
    assert not done.record["exact"]
    assert 0 < done.record["rounding"] <= 2.0**-18


def test_numbers_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = tiny.llama(layers=1, dtype=torch.float32)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    model = tiny.save(tmp_path / "model", tensors)
    with pytest.raises(NumericsError, match="F16"):
        transform(model, tmp_path / "out", options=TransformOptions("rotate", dtype="fp16"))
    assert not (tmp_path / "out").exists()


def test_powers_of_two_that_leave_the_range_of_the_dtype_are_refused(tmp_path: Path) -> None:
    tensors = tiny.llama(layers=1, dtype=torch.float16)
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 6e-8  # the least subnormal number: half of it is 0
    model = tiny.save(tmp_path / "model", tensors, config={**tiny.LLAMA_CONFIG, "dtype": "float16"})
    stats = make_statistics(model, tmp_path / "stats", token_ids())
    with pytest.raises(NumericsError, match="range"):
        transform(model, tmp_path / "out", stats=stats, options=TransformOptions("smooth_swiglu", alpha=1.0))


# --- Refusals

REFUSED: list[tuple[str, str, TransformOptions, str]] = [
    ("mean subtraction", "gpt2", TransformOptions("rotate_residual", rotation_size=16), "subtracts the mean"),
    (
        "norms after sublayers",
        "gemma2",
        TransformOptions("rotate_residual", rotation_size=16, untie=True),
        "stands between",
    ),
    ("tied", "llama_tied", TransformOptions("rotate", rotation_size=16), "untie=True"),
    (
        "tied for readers",
        "gemma",
        TransformOptions("rotate", rotation_size=16, untie=True),
        "whatever config.json says",
    ),
    ("hidden size", "llama", TransformOptions("rotate_residual", rotation_size=128), "no multiple of the block of 128"),
    ("head size", "llama", TransformOptions("rotate_values", rotation_size=64), "have 32 channels"),
    ("online", "llama", TransformOptions("rotate_online"), "while the model runs"),
    ("unknown", "llama", TransformOptions("smoothquand"), "'smoothquand'"),
    ("twice", "llama", TransformOptions("rotate,r1", rotation_size=16), "twice"),
    ("scaling after rotation", "llama", TransformOptions("rotate,smoothquant", rotation_size=16), "scale first"),
    ("no statistics", "llama", TransformOptions("smoothquant"), r"ptqpipe\.calibrate\("),
    ("block", "llama", TransformOptions("rotate", rotation_size=24), "rotation_size=24 is"),
    ("alpha", "llama", TransformOptions("smoothquant", alpha=1.5), "alpha=1.5 is"),
    ("dtype", "llama", TransformOptions("rotate", dtype="fp8"), 'dtype="fp8"'),
    ("edges", "llama", TransformOptions("smoothquant", fold_at=("norm", "down")), 'fold_at="down"'),
    ("learned without statistics", "llama", TransformOptions("rotate", learn=5, format="fp8"), "diagonal,pairs"),
    ("learned for weights", "llama", TransformOptions("rotate", learn=5, format="nvfp4"), "nvfp4 has none"),
    ("steps", "llama", TransformOptions("rotate", learn=-1, format="fp8"), "learn=-1 is"),
    ("learned beside", "llama", TransformOptions("aqas,rotate", learn=5, format="fp8"), "learn beside aqas"),
    ("nothing to learn", "llama", TransformOptions("aqas", learn=5, format="fp8"), "learn beside aqas"),
    ("format", "llama", TransformOptions("awq", format="nvfp5"), "unknown format 'nvfp5'"),
]


@pytest.mark.parametrize(("kind", "options", "says"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_folded_is_one_line_and_writes_nothing(
    tmp_path: Path, kind: str, options: TransformOptions, says: str
) -> None:
    model = make_model(tmp_path / "model", kind)
    with pytest.raises(PtqError, match=says):
        transform(model, tmp_path / "out", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_statistics_of_another_model_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    other = make_model(tmp_path / "other", "llama", seed=3)
    stats = make_statistics(other, tmp_path / "stats", token_ids())
    with pytest.raises(UsageError, match=r"belong to the model .*calibrate this one"):
        transform(model, tmp_path / "out", stats=stats)
    before = (stats / "stats.json").read_text()
    content = json.loads(before)
    del content["modules"]["model.layers.1.self_attn.q_proj"]
    (stats / "stats.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn\.q_proj"):
        transform(other, tmp_path / "out", stats=stats)
    (stats / "stats.json").write_text(before)
    tensors = load_file(stats / "block.safetensors")
    tensors["model.layers.0.self_attn.k_proj.amax"][3] = float("nan")
    save_file(tensors, stats / "block.safetensors")
    with pytest.raises(CheckpointError, match=r"amax of .*k_proj. that is not finite; calibrate again"):
        transform(other, tmp_path / "out2", stats=stats)


def test_a_quantized_source_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    ptqpipe.convert(model, out=tmp_path / "q")
    with pytest.raises(UsageError, match="dequantize"):
        transform(tmp_path / "q", tmp_path / "out", options=TransformOptions("rotate"))
    tensors = tiny.llama(dtype=torch.float32)
    stats = make_statistics(tiny.save(tmp_path / "clean", tensors), tmp_path / "stats", token_ids())
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    broken = tiny.save(tmp_path / "broken", tensors)
    content = json.loads((stats / "stats.json").read_text())
    content["model"]["fingerprint"] = ptqpipe.checkpoint.reader.CheckpointReader.open(broken).fingerprint()
    (stats / "stats.json").write_text(json.dumps(content))
    with pytest.raises(NumericsError, match="up_proj"):
        transform(broken, tmp_path / "out", stats=stats)


# --- Files


def test_other_tensors_and_files_keep_their_bytes(tmp_path: Path) -> None:
    tensors = tiny.llama(dtype=torch.float32)
    model = tiny.save(tmp_path / "model", tensors, shards=2)
    done = run(model, tmp_path / "out", TransformOptions("rotate_values"), None)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    changed = {name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)}
    assert changed == set(done.record["weights"]) == {n for n in tensors if "v_proj" in n or "o_proj" in n}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.slow
def test_any_number_of_workers_and_runs_that_were_interrupted_write_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model(tmp_path / "model", "llama"), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    options = TransformOptions("aqas,rotate", rotation_size=16, format="mxfp4", shard_size=60_000)
    want = tiny.bytes_of(run(model, tmp_path / "one", options, stats).out)
    machine = ptqpipe.run.machine.Machine(workers=3)
    transform(model, tmp_path / "three", stats=stats, options=options, machine=machine)
    assert tiny.bytes_of(tmp_path / "three") == want
    real, written = CheckpointWriter._write, 0

    def interrupted(self: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        nonlocal written
        written += 1
        if written == 12:
            raise KeyboardInterrupt
        real(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "_write", interrupted)
    single = ptqpipe.run.machine.Machine(workers=1)
    with pytest.raises(KeyboardInterrupt):
        transform(model, tmp_path / "out", stats=stats, options=options, machine=single)
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="options"):
        transform(model, tmp_path / "out", stats=stats, options=replace(options, alpha=0.3), mode="resume")
    transform(model, tmp_path / "out", stats=stats, options=options, mode="resume")
    assert tiny.bytes_of(tmp_path / "out") == want
    with pytest.raises(AlreadyComplete):
        transform(model, tmp_path / "out", stats=stats, options=options, mode="resume")


def cli(*args: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ptqpipe", "transform", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    options = TransformOptions("rotate", rotation_size=16, shard_size=60_000)
    want = tiny.bytes_of(run(model, tmp_path / "one", options, None).out)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    args = (model, "--transforms", "rotate", "--rotation-size", 16, "--shard-size", 60_000, "-o", tmp_path / "many")
    done = cli(*args, launcher=launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("rotate_residual then rotate_values") == 1
    assert tiny.bytes_of(tmp_path / "many") == want


@pytest.mark.usefixtures("forks")
def test_the_command_says_what_it_did_or_one_line(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    done = cli(model, "--transforms", "r2", "--json", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["transforms"] == ["rotate_values"]
    call = ["transform", str(model), "--transforms"]
    again = CliRunner().invoke(main, [*call, "r2", "-o", str(tmp_path / "out")])
    assert again.exit_code != 0
    assert len(again.stderr.splitlines()) == 1
    wrong = CliRunner().invoke(main, [*call, "awq", "-o", str(tmp_path / "no")])
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)
    assert "--stats" in wrong.stderr


# --- Real models


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("apply", ["smoothquant", "awq,rotate"])
def test_the_bench_model_keeps_its_logits(tmp_path: Path, shared_dir: Path, apply: str) -> None:
    model, ids = shared_dir / "assets" / "models" / "bench-4m" / "hf", token_ids(vocabulary=2048)
    stats = make_statistics(model, tmp_path / "stats", ids)
    run(model, tmp_path / "out", TransformOptions(apply), stats)
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.slow
@pytest.mark.shared
def test_powers_of_two_change_no_bit_of_the_bench_model(tmp_path: Path, shared_dir: Path) -> None:
    model, ids = shared_dir / "assets" / "models" / "bench-4m" / "hf", token_ids(vocabulary=2048)
    stats = make_statistics(model, tmp_path / "stats", ids)
    done = run(model, tmp_path / "out", TransformOptions("awq,smooth_swiglu", power_of_two=True), stats)
    assert done.record["exact"]
    assert sum(entry["changed"] for entry in done.record["foldings"]) > 100
    assert torch.equal(logits(tmp_path / "out", ids), logits(model, ids))
    assert torch.equal(logits(tmp_path / "out", ids, dtype=torch.bfloat16), logits(model, ids, dtype=torch.bfloat16))


@pytest.mark.shared
def test_a_real_gpt2_keeps_its_logits(tmp_path: Path, shared_dir: Path) -> None:
    model, ids = shared_dir / "assets" / "models" / "slm4096" / "hf", token_ids(vocabulary=54)
    stats = make_statistics(model, tmp_path / "stats", ids)
    run(model, tmp_path / "out", TransformOptions("smoothquant", fold_at=("norm", "value")), stats)
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize(
    ("dtype", "value", "says"),
    [
        ("F16", 1e6, 'has numbers that F16 cannot hold; use dtype="bf16" or fp32'),
        ("BF16", 1e300, "has numbers that BF16 cannot hold; check the model's weights"),
        ("F32", 1e300, "has numbers that F32 cannot hold; check the model's weights"),
        ("F32", float("nan"), "has NaN or inf; the checkpoint is damaged"),
    ],
)
def test_what_a_dtype_cannot_hold_gets_a_remedy_that_helps(dtype: str, value: float, says: str) -> None:
    with pytest.raises(NumericsError, match=says):
        round_to(torch.tensor([[value]], dtype=torch.float64), TensorSpec("w", dtype, (1, 1)))
