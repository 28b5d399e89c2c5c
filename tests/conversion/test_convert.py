"""Claims about convert: the same bytes on every machine, every tensor accounted for, nothing lost or half-written."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

import ptqpipe
from ptqpipe.check.diff import diff
from ptqpipe.check.verify.command import verify
from ptqpipe.cli import main
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.convert_summary import converted_text
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import AlreadyComplete, CheckpointError, FormatError, NumericsError, OutputError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from tests import tiny

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "model", tiny.llama())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def partials(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if "partial" in p.name]


def test_the_output_is_named_after_model_and_format(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ptqpipe.convert("model").out == Path("model-NVFP4A16")
    assert (tmp_path / "model-NVFP4A16" / "config.json").is_file()
    assert ptqpipe.convert(model, format="MXFP4").out == Path("model-MXFP4")


def test_kept_tensors_and_files_keep_every_byte(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, out=tmp_path / "out").out
    before, after = tensors_of(model), tensors_of(out)
    kept = json.loads((out / "ptqpipe.json").read_text())["kept"]
    assert "lm_head.weight" in kept
    for name in kept:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes()


def test_every_source_tensor_is_in_the_record_exactly_once(model: Path, tmp_path: Path) -> None:
    record = ptqpipe.convert(model, out=tmp_path / "out").record
    assert sorted([*record["weights"], *record["kept"]]) == sorted(tiny.llama())


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in ("fp8_block", "fp8_tensor")])
def test_stored_weights_are_those_of_quantize_and_errors_are_those_of_the_decode(
    model: Path, tmp_path: Path, scheme: str
) -> None:
    done = ptqpipe.convert(model, format=scheme, objective="none", out=tmp_path / "out")
    source = tiny.llama()
    single = "model.layers.1.self_attn.o_proj.weight"  # a unit of its own
    with ptqpipe.load_tensors(done.out) as loaded:
        stored = loaded[single]
        assert isinstance(stored, QTensor)
        alone = ptqpipe.quantize(source[single], SCHEMES[scheme].fmt)
        assert torch.equal(stored.dequantize(), alone.dequantize())
        for name, entry in done.record["weights"].items():
            q = loaded[name]
            assert isinstance(q, QTensor)
            error = (q.dequantize().double() - source[name].double()).square().sum().item()
            assert entry["squared_error"] == pytest.approx(error, rel=1e-12)


def test_fused_weights_share_one_global_scale(model: Path, tmp_path: Path) -> None:
    record = ptqpipe.convert(model, out=tmp_path / "out").record["weights"]
    for layer in range(2):
        base = f"model.layers.{layer}"
        for group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            scales = {record[f"{base}.{group[0]}.{leaf}_proj.weight"]["global_scale"] for leaf in group[1]}
            assert len(scales) == 1


def test_the_searched_global_scale_is_never_worse_than_amax(model: Path, tmp_path: Path) -> None:
    unweighted = {"model": model, "objective": "none"}
    record = ptqpipe.convert(**unweighted, out=tmp_path / "out").record["weights"]
    plain = ptqpipe.convert(**unweighted, out=tmp_path / "plain", global_scale="absmax").record["weights"]
    assert all(record[name]["versus_plain_global"] <= 1.0 for name in record)
    units = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    better = 0
    for layer in range(2):
        for leaves in units:
            names = [n for n in record if f"layers.{layer}." in n and n.split(".")[-2] in leaves]
            searched, at_amax = (sum(r[n]["squared_error"] for n in names) for r in (record, plain))
            assert searched <= at_amax
            better += searched < at_amax
    assert better >= 6  # it is worth its name on random weights


def test_the_dry_run_announces_the_exact_bytes(model: Path, tmp_path: Path) -> None:
    for scheme in ("nvfp4", "fp8", "mxfp4"):
        prepared = prepare(model, options=RecipeOptions(format=scheme), out=tmp_path / scheme)
        with prepared:
            announced = prepared.outputs.layout
        ptqpipe.convert(model, format=scheme, out=tmp_path / scheme)
        written = sum(p.stat().st_size for p in (tmp_path / scheme).glob("model*"))
        assert announced.file_bytes == written


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
def test_workers_shards_of_the_source_and_memory_change_no_byte(tmp_path: Path, scheme: str) -> None:
    whole = tiny.save(tmp_path / "m", tiny.llama(layers=3))
    first = tiny.bytes_of(ptqpipe.convert(whole, format=scheme, out=tmp_path / "a", workers=1).out)
    for workers, memory in ((2, 2 << 30), (4, 700 << 20)):
        out = tmp_path / f"w{workers}"
        ptqpipe.convert(whole, format=scheme, out=out, workers=workers, max_memory=memory)
        assert tiny.bytes_of(out) == first


def test_a_sharded_source_gives_the_same_numbers(tmp_path: Path) -> None:
    one = ptqpipe.convert(tiny.save(tmp_path / "one", tiny.llama()), out=tmp_path / "a").out
    many = ptqpipe.convert(
        tiny.save(tmp_path / "many", tiny.llama(), shards=3), out=tmp_path / "b", shard_size=40_000
    ).out
    assert len(list(many.glob("*.safetensors"))) > 3
    assert (many / "model.safetensors.index.json").is_file()
    a, b = tensors_of(one), tensors_of(many)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a if a[name].dim())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float16_and_float32_sources_convert(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.save(tmp_path / "m", tiny.llama(dtype=dtype, layers=1))
    done = ptqpipe.convert(model, out=tmp_path / "out")
    assert tensors_of(done.out)["lm_head.weight"].dtype == dtype
    assert all(0.004 < w["relative_mse"] < 0.01 for w in done.record["weights"].values())


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_stored_expert_by_expert(tmp_path: Path, transposed: bool) -> None:
    tensors = tiny.fused_moe(transposed=transposed)
    upright = tiny.fused_moe()["model.layers.0.mlp.experts.gate_up_proj"]
    done = ptqpipe.convert(tiny.save(tmp_path / "m", tensors), out=tmp_path / "out")
    with ptqpipe.load_tensors(done.out) as loaded:
        for e in range(3):
            q = loaded[f"model.layers.0.mlp.experts.{e}.up_proj.weight"]
            assert isinstance(q, QTensor)
            want = upright[e, 64:].float()
            assert float((q.dequantize() - want).square().sum() / want.square().sum()) < 0.01


def test_nan_is_one_error_that_names_the_weight_and_leaves_no_output(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors[Q][17, 100] = float("nan")
    model = tiny.save(tmp_path / "m", tensors)
    with pytest.raises(
        NumericsError, match=r"'model.layers.0.self_attn.q_proj.weight' has 1 NaN and 0 inf, the first at \[17, 100\]"
    ):
        ptqpipe.convert(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nan_in_a_kept_tensor_is_told_recorded_and_found_by_verify(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors["model.norm.weight"][[3, 5, 8]] = torch.tensor([float("nan"), float("-inf"), float("inf")]).bfloat16()
    model, out = tiny.save(tmp_path / "m", tensors), tmp_path / "out"
    with prepare(str(model), out=out) as prepared:
        done = convert(prepared)
    assert done is not None
    assert {name for name, entry in done.record["kept"].items() if "not_finite" in entry} == {"model.norm.weight"}
    assert "warning: model.norm.weight is kept and has 1 NaN and 2 inf" in converted_text(done)
    report = verify(out, source=model)
    assert report.ok  # it is the source's
    (told,) = (note for note in report.notes if note.check == "values")
    assert (told.where, "1 NaN and 2 inf" in told.message) == ("model.norm.weight", True)


def test_magnitudes_that_no_format_holds_are_an_error_that_names_the_weights(tmp_path: Path) -> None:
    tensors = tiny.llama(dtype=torch.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e36
    model = tiny.save(tmp_path / "m", tensors)
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.gate_proj.*layers\.1\.mlp\.up_proj.*global scale"):
        ptqpipe.convert(model, out=tmp_path / "out")


def test_nan_in_the_config_is_the_same_config(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "m", tiny.llama(), config={**tiny.LLAMA_CONFIG, "rope_theta": float("nan")})
    out = ptqpipe.convert(model, out=tmp_path / "out").out
    assert verify(out, source=model).ok
    assert not any("rope_theta" in str(found) for found in diff(model, out).config)


def test_an_existing_output_is_refused_and_kept(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, out=tmp_path / "out").out
    before = tiny.bytes_of(out)
    with pytest.raises(OutputError, match="overwrite=True"):
        ptqpipe.convert(model, format="mxfp4", out=out)
    assert tiny.bytes_of(out) == before
    ptqpipe.convert(model, format="mxfp4", out=out, overwrite=True)
    assert tiny.bytes_of(out) != before
    assert partials(tmp_path) == []


def test_the_output_may_not_be_the_source(model: Path) -> None:
    with pytest.raises((OutputError, UsageError)):
        ptqpipe.convert(model, out=model, overwrite=True)
    assert tensors_of(model).keys() == tiny.llama().keys()


def test_a_four_bit_source_is_refused(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, out=tmp_path / "out").out
    with pytest.raises(UsageError, match="already quantized"):
        ptqpipe.convert(out, format="mxfp4", out=tmp_path / "twice")


def test_an_fp8_source_is_decoded_and_quantized(model: Path, tmp_path: Path) -> None:
    middle = ptqpipe.convert(model, format="fp8", out=tmp_path / "fp8").out
    done = ptqpipe.convert(middle, format="nvfp4", out=tmp_path / "out")
    with ptqpipe.load_tensors(middle) as a, ptqpipe.load_tensors(done.out) as b:
        decoded, q = a[Q], b[Q]
        assert isinstance(decoded, QTensor)
        assert isinstance(q, QTensor)
        w = decoded.dequantize()
        assert done.record["weights"][Q]["squared_error"] == pytest.approx(
            float((q.dequantize().double() - w.double()).square().sum()), rel=1e-12
        )
        assert "weight_scale" not in " ".join(name for name in done.record["kept"])


def test_unknown_formats_containers_and_searches_are_named(model: Path, tmp_path: Path) -> None:
    for bad, kind in (
        ({"format": "nvfp5"}, FormatError),
        ({"container": "gguf"}, UsageError),
        ({"scale_search": "best"}, UsageError),
    ):
        with pytest.raises(kind, match="known are"):
            ptqpipe.convert(model, out=tmp_path / "out", **bad)
    assert partials(tmp_path) == []


KILLER = """
import json, os, signal, sys, threading
from ptqpipe.api import convert as api  # with torch, once for all runs
from ptqpipe.checkpoint import writer

def run(model, out, target):
    count = 0
    lock = threading.Lock()
    writer.BATCH_SECONDS = 0.0  # every unit is journalled at once, so that a resume has something to skip
    def bomb(original):
        def wrapped(*args, **kwargs):
            nonlocal count
            with lock:
                count += 1
                if count == target:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return wrapped
    W = writer.CheckpointWriter
    W.write, W.commit, W._flush_batch = bomb(W.write), bomb(W.commit), bomb(W._flush_batch)
    os.pwrite, os.replace, os.rename = bomb(os.pwrite), bomb(os.replace), bomb(os.rename)
    api.convert(model, out=out, workers=2, shard_size=60_000)
    print("calls", count, flush=True)

assert len(os.listdir("/proc/self/task")) == 1  # a fork takes the calling thread alone along
model, runs = sys.argv[1], json.loads(sys.argv[2])
for out, target in runs:
    child = os.fork()
    if child == 0:
        try:
            run(model, out, target)
        finally:
            os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def killed(model: Path, runs: list[tuple[Path, int]]) -> list[list[str]]:
    """Converts into each folder in a process that is killed at the given one of its writes. The words of each line."""
    arguments = [str(model), json.dumps([(str(out), at) for out, at in runs])]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # numpy's library starts its threads when it is imported
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_run_killed_at_twenty_random_points_resumes_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    (_, calls), ended = killed(model, [(tmp_path / "whole", 10**9)])
    assert ended == ["ended", "0"]
    want = tiny.bytes_of(tmp_path / "whole")
    points = random.Random(5).sample(range(1, int(calls)), 20)
    outs = [tmp_path / f"k{index}" / "out" for index in range(len(points))]
    for out in outs:
        out.parent.mkdir()
    ends = [words[1] for words in killed(model, list(zip(outs, points, strict=True))) if words[0] == "ended"]
    assert set(ends) <= {
        "-9",
        "0",
    }  # two workers write their units together more often or less: some calls more or less
    assert (len(ends), ends.count("-9") > 15) == (20, True)
    for out in outs:
        assert not out.exists() or tiny.bytes_of(out) == want  # complete or absent
        left, complete = bool(partials(out.parent)), out.exists()
        if left or not complete:  # both behind the last rename: a resume removes what is left and says so
            with pytest.raises(AlreadyComplete) if complete else contextlib.nullcontext():
                ptqpipe.convert(model, out=out, workers=2, shard_size=60_000, resume=left)
        assert tiny.bytes_of(out) == want
        assert partials(out.parent) == []


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_resume_with_another_recipe_or_a_changed_source_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert killed(model, [(out, 40)]) == [["ended", "-9"]]
    assert partials(tmp_path)
    with pytest.raises(OutputError, match="recipe"):
        ptqpipe.convert(model, out=out, shard_size=60_000, scale_search="absmax", resume=True)
    changed = tiny.llama(seed=9)
    tiny.save(model, changed)
    with pytest.raises(OutputError, match="source"):
        ptqpipe.convert(model, out=out, shard_size=60_000, resume=True)


def torchrun(*args: object, world: int, **env: str) -> subprocess.CompletedProcess[str]:

    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "-m",
        "ptqpipe",
    ]
    return subprocess.run(
        [*launcher, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.interpreter), 4])
@pytest.mark.usefixtures("forks")
def test_several_processes_write_the_same_bytes_as_one(model: Path, tmp_path: Path, world: int) -> None:
    want = tiny.bytes_of(ptqpipe.convert(model, out=tmp_path / "one", shard_size=60_000).out)
    run = torchrun("convert", model, "-o", tmp_path / "many", "--shard-size", "60000", world=world)
    assert run.returncode == 0, run.stderr[-2000:]
    assert tiny.bytes_of(tmp_path / "many") == want
    assert run.stdout.count("Done: ") == 1  # one rank speaks


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_rank_that_fails_fails_the_run_which_resumes(tmp_path: Path) -> None:
    tensors = tiny.llama(layers=3)
    good = tiny.save(tmp_path / "m", tensors)
    want = tiny.bytes_of(ptqpipe.convert(good, out=tmp_path / "one", shard_size=60_000).out)
    prelude = tmp_path / "sitecustomize.py"
    prelude.write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import threading, signal, time\n"
        "    def die():\n"
        "        from ptqpipe.checkpoint import writer\n"
        "        real = writer.CheckpointWriter.commit\n"
        "        def commit(self, *a):\n"
        "            real(self, *a); self.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "        writer.CheckpointWriter.commit = commit\n"
        "    import sys\n"
        "    class Hook:\n"
        "        def find_spec(self, name, path=None, target=None):\n"
        "            if name == 'ptqpipe.conversion.conversion':\n"
        "                sys.meta_path.remove(self); die()\n"
        "    sys.meta_path.insert(0, Hook())\n"
    )
    args = ("convert", good, "-o", tmp_path / "many", "--shard-size", "60000")
    run = torchrun(*args, world=2, PYTHONPATH=str(tmp_path))
    assert run.returncode != 0
    assert not (tmp_path / "many").exists()
    again = torchrun(*args, "--resume", world=2)
    assert again.returncode == 0, again.stderr[-2000:]
    assert tiny.bytes_of(tmp_path / "many") == want


SLOW = """
import time
from ptqpipe.quantization import rtn
real, calls = rtn.quantize, []
def slow(*args, **kwargs):
    calls.append(args)
    if len(calls) == 4:
        print("three are done", flush=True)
    if len(calls) >= 4:
        time.sleep(0.2)
    return real(*args, **kwargs)
rtn.quantize = slow
from ptqpipe.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_an_interrupt_ends_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "m", tiny.llama(layers=6))
    want = tiny.bytes_of(ptqpipe.convert(model, out=tmp_path / "whole", workers=1).out)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    args = ["convert", str(model), "-o", str(tmp_path / "out"), "--workers", "1"]
    for number in (signal.SIGINT, signal.SIGTERM):
        run = subprocess.Popen([sys.executable, str(script), *args], stdout=-1, stderr=-1, text=True)
        assert run.stdout is not None
        while "three are done" not in run.stdout.readline():  # of the units; from now on each takes 0.2 s
            assert run.poll() is None
        run.send_signal(number)
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 130, stderr
        assert "Traceback" not in stderr
        assert not (tmp_path / "out").exists()
        args = stderr.strip().splitlines()[-1].split("continue with: ptqpipe ")[1].split()
        assert args[-1] == "--resume"
    assert CliRunner().invoke(main, args).exit_code == 0
    assert tiny.bytes_of(tmp_path / "out") == want


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("absent folder", {"model": "absent"}, "absent"),
    ("unknown format", {"args": ["--format", "nvfp5"]}, "unknown format 'nvfp5'"),
    ("both modes", {"args": ["--resume", "--overwrite"]}, "contradict"),
    ("tiny memory", {"args": ["--max-memory", "10MiB"]}, "too small"),
    ("zero workers", {"args": ["--workers", "0"]}, "--workers 0"),
    ("no such device", {"args": ["--device", "tpu"]}, "tpu"),
    ("no gpu", {"args": ["--device", "cuda"]}, "GPU"),
    ("no such recipe", {"args": ["--recipe", "nowhere.yaml"]}, "nowhere.yaml"),
]


@pytest.mark.parametrize(("args", "words"), [(case[1], case[2]) for case in BAD], ids=[case[0] for case in BAD])
def test_bad_calls_are_one_line_and_a_non_zero_exit(
    model: Path, tmp_path: Path, args: dict[str, Any], words: str
) -> None:
    if words == "GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    call = ["convert", args.get("model", model), "-o", tmp_path / "out", *args.get("args", [])]
    run = CliRunner().invoke(main, list(map(str, call)))
    assert isinstance(run.exception, SystemExit)
    assert run.exit_code != 0
    assert words in run.stderr
    assert not (tmp_path / "out").exists()


def test_resuming_what_was_never_begun_starts_it_and_says_so(model: Path, tmp_path: Path) -> None:
    """A loop that always gives --resume needs no other call for its first round."""
    out = tmp_path / "out"
    call = ["convert", str(model), "-o", str(out), "--resume"]
    first = CliRunner().invoke(main, [*call, "--quiet"])
    assert (first.exit_code, "starting from the beginning" in first.stderr) == (0, True), first.output
    before = tiny.bytes_of(out)
    second = CliRunner().invoke(main, [*call, "--quiet"])
    assert (second.exit_code, "beginning" in second.stderr, "already complete" in second.output) == (0, False, True)
    assert tiny.bytes_of(out) == before
    other = CliRunner().invoke(main, [*call, "--format", "mxfp4"])
    assert (other.exit_code, "--overwrite replaces it" in other.stderr) == (2, True)
    assert tiny.bytes_of(out) == before


def test_a_truncated_shard_is_one_line_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        ptqpipe.convert(model, out=tmp_path / "out")
    assert partials(tmp_path) == []


@pytest.mark.usefixtures("forks")
def test_json_output_is_json_alone(model: Path, tmp_path: Path) -> None:
    call = ["convert", str(model), "-o", str(tmp_path / "out"), "--json"]
    plan = json.loads(CliRunner().invoke(main, [*call, "--dry-run"]).stdout)
    assert sorted([name for unit in plan["units"] for name in unit["weights"]] + list(plan["kept"])) == sorted(
        tiny.llama()
    )
    done = json.loads(
        subprocess.run([sys.executable, "-m", "ptqpipe", *call], stdout=-1, text=True, timeout=300).stdout
    )
    assert done["written_bytes"] == plan["bytes"]
    assert {row["role"] for row in done["roles"]} >= {"q_proj", "down_proj"}


def test_a_unit_with_one_scale_is_counted_with_all_of_its_weights(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, inner=4096))
    options = RecipeOptions(format="fp8_tensor")
    with prepare(model, options=options, out=tmp_path / "out") as prepared:
        least, job = prepared.least_memory()
        assert job is not None
        assert job.id == "model.layers.0.mlp.gate_proj+up_proj"
        weights = 2 * 4096 * 128
        assert least - BASE_BYTES - WORKER_BYTES == weights * 2 + weights  # bfloat16, and codes of a byte
        with pytest.raises(UsageError, match='weights share one scale in fp8_tensor; give max_memory="551MiB"'):
            convert(prepared, machine=Machine(1, memory_bytes=least - 1))
        assert not (tmp_path / "out").exists()
        convert(prepared, machine=Machine(1, memory_bytes=least))
    ptqpipe.convert(model, format="fp8_tensor", out=tmp_path / "roomy", workers=2)
    assert tiny.bytes_of(tmp_path / "out") == tiny.bytes_of(tmp_path / "roomy")
