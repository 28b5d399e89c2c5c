"""Claims of calibrate: its statistics are those of the whole model, whatever the architecture, memory and processes.

Expected values are float64 sums over the inputs that a run of the whole model shows (`models.py`).
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.calibration import run_layers, runner
from ptqpipe.calibration.activations import OnDisk
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.moments import FIRST_WEIGHT
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.statistics import BLOCK, Statistics
from ptqpipe.checkpoint.layer_folder import Finished
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.cli.common import devices_of
from ptqpipe.errors import AlreadyComplete, CheckpointError, NumericsError, OutputError, UsageError
from ptqpipe.run import machine as machine_module
from ptqpipe.run.machine import Machine
from tests.calibration.models import (
    KINDS,
    VOCABULARY,
    checkpoint_names,
    make_config,
    make_model,
    make_windows,
    whole_model_inputs,
    write_windows,
)

# The statistics are float32 numbers of float64 sums. transformers computes norms, rotary embeddings and eager softmax
# in float32 even in a float64 model: where the order of a float64 sum differs by a last place, such a number may round
# to its neighbour, 2^-24 away, and a few of those add up on the way through two blocks.
ROUNDING = 2.0**-20


def options(windows: torch.Tensor, **changes: Any) -> CalibrateOptions:
    """All windows, in float64."""
    settings: dict[str, Any] = {
        "samples": windows.shape[0],
        "seqlen": windows.shape[1],
        "moments": ("diagonal", "block", "full"),
        "dtype": "float64",
    }
    return CalibrateOptions(**(settings | changes))


def run(tmp_path: Path, kind: str = "llama", *, name: str = "stats", **changes: Any) -> Finished:
    """A calibration of a small model on random windows."""
    model = tmp_path / kind
    if not model.exists():
        make_model(model, kind)
    windows = make_windows()
    data = write_windows(tmp_path / "data.jsonl", windows)
    mode = changes.pop("mode", "new")
    machine = changes.pop("machine", None)
    done = calibrate(
        model, [str(data)], tmp_path / name, options=options(windows, **changes), mode=mode, machine=machine
    )
    assert done is not None
    return done


def close(found: torch.Tensor, expected: torch.Tensor, *, scale: float | None = None) -> bool:
    """Equal to a rounding to float32, of each element or, for what cancels, of ``scale``."""
    tolerance = ROUNDING * expected.abs() if scale is None else torch.tensor(ROUNDING * scale, dtype=torch.float64)
    return bool(((found.double() - expected).abs() <= tolerance + 1e-300).all())


def weighted_gram(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """E[x x^T] of rows, of which those of first tokens count FIRST_WEIGHT times."""
    more = FIRST_WEIGHT - 1
    return (x.t() @ x + more * first.t() @ first) / (len(x) + more * len(first))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_equal_those_of_the_whole_model_in_float64(kind: str, tmp_path: Path) -> None:
    done = run(tmp_path, kind)
    inputs, key_values = whole_model_inputs(tmp_path / kind, make_windows())
    first, _ = whole_model_inputs(tmp_path / kind, make_windows()[:, :1])  # the models are causal
    expected = {
        name: (x, first.get((parameter, expert), x[:0]))
        for (parameter, expert), x in inputs.items()
        for name in checkpoint_names(kind, parameter, expert)
    }
    with Statistics.open(done.out) as statistics:
        # DeepSeek's router multiplies with a float32 copy of its weight, which the other route cannot recognize.
        routers = {name for name in statistics.modules if kind == "deepseek_v3" and name.endswith(".mlp.gate")}
        assert {name for name in statistics.modules if statistics.of(name).measured} - routers <= expected.keys()
        for name, (x, first_tokens) in expected.items():
            found = statistics.of(name, block=x.shape[1] % BLOCK == 0, full=True)
            if x.shape[0] < 16:  # too few tokens for statistics of its own
                assert not found.measured
                assert found.tokens == x.shape[0]
                continue
            assert (found.tokens, found.measured) == (x.shape[0], True), name
            gram = weighted_gram(x, first_tokens)
            size = float(gram.diagonal().max())
            assert close(found.amax, x.abs().amax(0)), name
            assert close(found.mean, x.mean(0), scale=size**0.5), name
            assert close(found.second_moment, gram.diagonal()), name
            assert found.full_moment is not None
            assert close(found.full_moment, gram, scale=size), name
            if found.block_moment is not None:
                blocks = torch.stack([gram[i : i + BLOCK, i : i + BLOCK] for i in range(0, x.shape[1], BLOCK)])
                assert close(found.block_moment, blocks, scale=size), name
            for p, value in found.quantiles.items():
                magnitudes = x.abs().flatten().sort().values  # the smallest that p of all do not exceed
                exact = float(magnitudes[math.ceil(p * magnitudes.numel()) - 1])
                assert value == pytest.approx(exact, rel=1 / 128), (name, p)
        assert len(statistics.attentions) == len(key_values)
        for name, (keys, values) in zip(statistics.attentions, key_values, strict=True):
            assert close(statistics.attention(name)[0], keys.abs().amax(dim=(0, 2, 3)))
            assert close(statistics.attention(name)[1], values.abs().amax(dim=(0, 2, 3)))
        assert statistics.model_fingerprint == CheckpointReader.open(tmp_path / kind).fingerprint()
        assert done.content["unused"] == []


HELD = ("held_second_moment", "held_block_moment", "held_full_moment")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_held_out_moments_are_those_of_the_other_windows_and_change_nothing_else(kind: str, tmp_path: Path) -> None:
    plain = run(tmp_path, kind, samples=7, holdout=0)
    done = run(tmp_path, kind, name="held", samples=7, holdout=4)
    chosen = load_samples([str(tmp_path / "data.jsonl")], tmp_path / kind, samples=7, seqlen=24, holdout=4)
    assert (done.content["data"]["samples"], done.content["data"]["held_out"]) == (7, 4)
    assert done.content["data"]["sha256"] == plain.content["data"]["sha256"]
    assert not {tuple(row) for row in chosen.windows.tolist()} & {tuple(row) for row in chosen.held_out.tolist()}
    for file in plain.out.glob("*.safetensors"):
        a, b = load_file(file), load_file(done.out / file.name)
        assert {name for name in b if not name.endswith(HELD)} == a.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    inputs, _ = whole_model_inputs(tmp_path / kind, chosen.held_out)
    first, _ = whole_model_inputs(tmp_path / kind, chosen.held_out[:, :1])
    count = 0
    with Statistics.open(done.out) as statistics:
        for (parameter, expert), x in inputs.items():
            for name in checkpoint_names(kind, parameter, expert):
                found = statistics.of(name, block=x.shape[1] % BLOCK == 0, full=True, held_out=True)
                assert statistics.of(name).held_out is None
                if found.held_out is None:  # an expert with too few tokens among the held-out ones
                    assert len(x) < 16 or not found.measured
                    continue
                gram = weighted_gram(x, first.get((parameter, expert), x[:0]))
                assert found.held_out.tokens == len(x)
                assert close(found.held_out.second_moment, gram.diagonal())
                assert found.held_out.full_moment is not None
                assert close(found.held_out.full_moment, gram, scale=float(gram.diagonal().max()))
                count += 1
    assert count >= 14


def test_one_window_is_held_out_for_every_eight_where_the_data_have_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    data = str(write_windows(tmp_path / "data.jsonl", make_windows(samples=40)))
    for samples, holdout, wanted in ((32, None, 4), (38, None, 2), (40, None, 0), (7, None, 0), (32, 8, 8), (32, 0, 0)):
        assert len(load_samples([data], model, samples=samples, seqlen=24, holdout=holdout).held_out) == wanted
    with pytest.raises(UsageError, match="expected 38 and 3 held out"):
        load_samples([data], model, samples=38, seqlen=24, holdout=3)
    with pytest.raises(UsageError, match="holdout=-1"):
        load_samples([data], model, samples=8, seqlen=24, holdout=-1)


@pytest.mark.slow
def test_resuming_with_other_held_out_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = run_layers.write_layer

    def stops(folder: Path, name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith(".1"):
            raise KeyboardInterrupt
        return write(folder, name, *args, **kwargs)

    whole = run(tmp_path, name="whole", samples=8, holdout=2)
    monkeypatch.setattr(run_layers, "write_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, samples=8, holdout=2)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="the held-out data changed"):
        run(tmp_path, samples=8, holdout=3, mode="resume")
    done = run(tmp_path, samples=8, holdout=2, mode="resume")
    assert {p.name: p.read_bytes() for p in done.out.iterdir()} == {p.name: p.read_bytes() for p in whole.out.iterdir()}


@pytest.mark.slow
def test_modules_with_one_input_share_one_entry(tmp_path: Path) -> None:
    modules = run(tmp_path, "qwen2_moe").content["modules"]
    base = "model.layers.1"
    q, k, v = (modules[f"{base}.self_attn.{leaf}"]["key"] for leaf in ("q_proj", "k_proj", "v_proj"))
    assert q == k == v
    router, shared, gate = (f"{base}.mlp.{leaf}" for leaf in ("gate", "shared_expert.up_proj", "shared_expert_gate"))
    assert modules[router]["key"] == modules[shared]["key"] == modules[gate]["key"]
    assert modules[f"{base}.mlp.experts.0.gate_proj"]["key"] == modules[f"{base}.mlp.experts.0.up_proj"]["key"]
    assert modules[f"{base}.mlp.experts.0.gate_proj"]["key"] != modules[f"{base}.mlp.experts.1.gate_proj"]["key"]
    assert modules[f"{base}.self_attn.o_proj"]["key"] != q


def test_an_expert_without_tokens_gets_its_groups_maximum_and_says_so(tmp_path: Path) -> None:
    model = make_model(tmp_path / "mixtral", "mixtral")
    tensors = load_file(model / "model.safetensors")
    router = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[router] = torch.zeros_like(tensors[router])
    tensors["model.layers.0.post_attention_layernorm.weight"][0] = 10.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    done = run(tmp_path, "mixtral")  # equal logits: every token goes to the same two experts, whichever these are
    base = "model.layers.0.block_sparse_moe.experts"
    with Statistics.open(done.out) as statistics:
        for leaf in ("w1", "w2", "w3"):
            found = [statistics.of(f"{base}.{e}.{leaf}", full=True) for e in range(4)]
            seen = [one for one in found if one.tokens]
            unseen = [one for one in found if not one.tokens]
            assert len(seen) == len(unseen) == 2
            assert [one.measured for one in seen] == [True, True]
            assert [one.measured for one in unseen] == [False, False]
            for one in unseen:
                assert torch.equal(one.amax, torch.maximum(seen[0].amax, seen[1].amax))
                assert one.quantiles[0.999] == max(other.quantiles[0.999] for other in seen)
                moments = [other.full_moment for other in (one, *seen) if other.full_moment is not None]
                mean = (moments[1].double() + moments[2].double()) / 2  # each saw every token
                assert torch.allclose(moments[0].double(), mean, rtol=0, atol=2.0**-23 * float(mean.abs().max()))
        idle = [f"{base}.{e}.w1" for e in range(4) if not statistics.of(f"{base}.{e}.w1").tokens]
    for name in idle:
        assert name in stage_text().to_json(done)["stand_ins"]
    assert idle[0] in stage_text().render(done)


def stage_text() -> Any:
    """The module that prints."""
    from ptqpipe.calibration import summary as calibrate_text

    return calibrate_text


@pytest.mark.parametrize(("large", "most"), [(1 << 20, 1), (1, 2)])
def test_threads_run_only_a_model_whose_matrices_are_worth_it(
    large: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small matrices two threads spend most of their time waiting for each other."""
    monkeypatch.setattr(machine_module, "processors", lambda: [0, 1])
    monkeypatch.setattr(machine_module, "LARGE_MATRIX", large)
    seen: set[int] = set()

    def advance(self: runner.Layer, *args: Any, **options: Any) -> None:
        seen.add(torch.get_num_threads())
        original(self, *args, **options)

    original = runner.Layer.advance
    monkeypatch.setattr(runner.Layer, "advance", advance)
    run(tmp_path, machine=Machine(workers=2))
    assert seen == {most}


def test_samples_on_disk_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[int] = []
    put = OnDisk.put
    monkeypatch.setattr(OnDisk, "put", lambda self, i, x: (spilled.append(i), put(self, i, x))[1])
    monkeypatch.setattr(run_layers, "BASE_BYTES", 2 << 30)  # so that a limit of 1 GiB leaves nothing
    plain = run(tmp_path, machine=Machine(workers=1, memory_bytes=4 << 30))
    assert not spilled
    small = run(tmp_path, name="small", machine=Machine(workers=1, memory_bytes=1 << 30))
    assert spilled
    assert small.content["digest"] == plain.content["digest"]
    assert {p.name for p in tmp_path.iterdir()} == {"llama", "data.jsonl", "stats", "small"}


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_killed_run_continues_to_the_same_statistics(tmp_path: Path) -> None:
    whole = run(tmp_path)
    data = tmp_path / "data.jsonl"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from ptqpipe.calibration import command as stage\n"
        "commit = stage.LayerFolder.commit\n"
        "def killed(self, unit, record):\n"
        "    commit(self, unit, record)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "stage.LayerFolder.commit = killed\n"
        "stage.calibrate(sys.argv[1], [sys.argv[2]], Path(sys.argv[3]), options=stage.CalibrateOptions("
        "samples=11, seqlen=24, moments=('diagonal', 'block', 'full'), dtype='float64'))\n"
    )
    out = tmp_path / "killed"
    command = [sys.executable, "-c", script, str(tmp_path / "llama"), str(data), str(out)]
    assert subprocess.run(command, timeout=120, check=False, env=_environment()).returncode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(OutputError, match="resume=True continues it"):
        run(tmp_path, name="killed")
    with pytest.raises(OutputError, match="the settings changed"):
        run(tmp_path, name="killed", mode="resume", moments=("diagonal",))
    write_windows(data, make_windows(seed=6))
    with pytest.raises(OutputError, match="the data changed"):
        calibrate(tmp_path / "llama", [str(data)], out, options=options(make_windows()), mode="resume")
    done = run(tmp_path, name="killed", mode="resume")
    assert done.content["digest"] == whole.content["digest"]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in whole.out.iterdir()}
    with pytest.raises(AlreadyComplete):
        run(tmp_path, name="killed", mode="resume")
    assert not (tmp_path / ".killed.partial").exists()


def test_finished_blocks_are_not_watched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = run_layers.write_layer

    def stops_after_one(folder: Path, name: str, *args: Any, **kwargs: Any) -> Any:
        if written:
            raise KeyboardInterrupt
        written.append(name)
        return write(folder, name, *args, **kwargs)

    monkeypatch.setattr(run_layers, "write_layer", stops_after_one)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    again: list[str] = []
    monkeypatch.setattr(run_layers, "write_layer", lambda f, n, *a, **k: (again.append(n), write(f, n, *a, **k))[1])
    run(tmp_path, mode="resume")
    assert (written, again) == (["model.layers.0"], ["model.layers.1", "lm_head"])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.usefixtures("forks")
def test_two_processes_give_the_statistics_of_one(kind: str, tmp_path: Path) -> None:
    one = run(tmp_path, kind, samples=8, holdout=3)
    out = tmp_path / "two"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ptqpipe", "calibrate", str(tmp_path / kind), "--data", str(tmp_path / "data.jsonl")]
    command += ["--samples", "8", "--holdout", "3", "--seqlen", "24"]
    command += ["--moments", "diagonal,block,full", "--dtype", "float64"]
    result = subprocess.run(
        [*command, "-o", str(out)], env=_environment(), timeout=300, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    content = json.loads((out / "stats.json").read_text())
    # Quantiles come from counts and maxima from values, which no order of sums changes.
    assert content["modules"] == one.content["modules"]
    assert content["attention"].keys() == one.content["attention"].keys()
    for file in one.out.glob("*.safetensors"):
        a, b = load_file(file), load_file(out / file.name)
        assert a.keys() == b.keys()
        for key in a:
            x, y = a[key].double(), b[key].double()
            # Two float64 sums of the same numbers, rounded to float32: at most one last place apart.
            assert torch.allclose(x, y, rtol=2.0**-23, atol=2.0**-40 * float(x.abs().max())), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("llama", 2), ("llama", 3), ("llama", 40), ("mixtral", 3), ("gpt_oss", 40), ("gemma2", 3)]
)
def test_several_devices_give_the_statistics_of_one(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that are all this CPU, each with a copy of the block and a thread of its own; batches of two windows."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)
    used: set[int] = set()
    forward = runner.Layer.forward

    def noted(self: runner.Layer, *args: Any, **kwargs: Any) -> torch.Tensor:
        used.add(id(self.module))
        return forward(self, *args, **kwargs)

    one = run(tmp_path, kind, samples=8, holdout=3)
    monkeypatch.setattr(runner.Layer, "forward", noted)
    windows = make_windows()
    done = calibrate(
        tmp_path / kind,
        [str(tmp_path / "data.jsonl")],
        tmp_path / "spread",
        options=options(windows, samples=8, holdout=3),
        machine=Machine(workers=1),
        devices=[torch.device("cpu")] * count,
    )
    assert done is not None
    assert len(used) >= min(count, 6)  # at most a copy for every batch
    assert done.content["modules"] == one.content["modules"]
    assert done.content["attention"] == one.content["attention"]
    for file in one.out.glob("*.safetensors"):
        a, b = load_file(file), load_file(done.out / file.name)
        assert a.keys() == b.keys()
        for key in a:
            x, y = a[key].double(), b[key].double()
            # Two float64 sums of the same numbers, rounded to float32: at most one last place apart.
            assert torch.allclose(x, y, rtol=2.0**-23, atol=2.0**-40 * float(x.abs().max())), key


def test_all_gpus_share_the_samples_unless_torchrun_has_given_one_to_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices_of("cuda") == devices_of("auto") == ["cuda:0", "cuda:1", "cuda:2"]
    assert (devices_of("cuda:1"), devices_of("cpu")) == (["cuda:1"], ["cpu"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert devices_of("cuda") == ["cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of("auto") == ["cpu"]


def test_activations_that_are_not_finite_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"input of 'model\.layers\.1\.mlp\.down_proj' has \d+ of \d+ values"):
        run(tmp_path)
    assert not (tmp_path / "stats").exists()


def test_inputs_whose_squares_leave_float32_are_refused(tmp_path: Path) -> None:
    """Not written as statistics that nothing reads; and no other dtype would help."""
    model = make_model(tmp_path / "llama", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 1e30
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    huge = r"input of 'lm_head' has \d+ of \d+ values that are NaN, inf or huge in float64; check the model's weights"
    with pytest.raises(NumericsError, match=huge):
        run(tmp_path)
    assert not (tmp_path / "stats").exists()


def test_a_block_whose_outputs_overflow_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e30
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        NumericsError, match=r"outputs of 'model\.layers\.0' are not finite in float16; use dtype=.fp32."
    ):
        run(tmp_path, dtype="float16")
    assert not (tmp_path / "stats").exists()
    assert not (tmp_path / ".stats.partial").exists()


@pytest.mark.slow
def test_a_quantized_checkpoint_is_calibrated_as_it_decodes(tmp_path: Path) -> None:
    import ptqpipe

    make_model(tmp_path / "llama", "llama", dtype=torch.bfloat16)
    ptqpipe.convert(str(tmp_path / "llama"), out=tmp_path / "packed", format="nvfp4")
    decoded = load_file(tmp_path / "llama" / "model.safetensors")
    with ptqpipe.load_tensors(tmp_path / "packed") as weights:
        for name in weights:
            decoded[name] = weights[name].dequantize()
    (tmp_path / "decoded").mkdir()
    save_file({k: v.float() for k, v in decoded.items()}, tmp_path / "decoded" / "model.safetensors")
    (tmp_path / "decoded" / "config.json").write_bytes((tmp_path / "llama" / "config.json").read_bytes())
    windows = make_windows()
    data = write_windows(tmp_path / "data.jsonl", windows)
    done = [
        calibrate(tmp_path / name, [str(data)], tmp_path / f"{name}-stats", options=options(windows))
        for name in ("packed", "decoded")
    ]
    assert len({one.content["digest"] for one in done if one is not None}) == 1
    assert None not in done


def test_a_column_count_that_16_does_not_divide_has_no_block_moment(tmp_path: Path) -> None:
    config = make_config("llama")
    config.intermediate_size = 100
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    done = run(tmp_path)
    with Statistics.open(done.out) as statistics:
        assert not statistics.has("model.layers.0.mlp.down_proj", "block_moment")
        assert statistics.has("model.layers.0.mlp.down_proj", "full_moment")
        assert statistics.has("model.layers.0.mlp.up_proj", "block_moment")


def test_what_does_not_fit_the_model_is_one_clear_line(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    windows = make_windows()
    good = write_windows(tmp_path / "good.jsonl", windows)
    strange = windows.clone()
    strange[3, 7] = VOCABULARY
    bad = write_windows(tmp_path / "bad.jsonl", strange)
    out = tmp_path / "stats"
    with pytest.raises(UsageError, match=f"token id {VOCABULARY}, the model's embedding has {VOCABULARY} rows"):
        calibrate(model, [str(bad)], out, options=options(windows))
    with pytest.raises(UsageError, match="seqlen=100 is more than the model's 64 positions"):
        calibrate(model, [str(good)], out, options=options(windows, samples=1, seqlen=100))
    with pytest.raises(UsageError, match='moments="diag" is unknown; use diagonal, block, full, kl, pairs'):
        calibrate(model, [str(good)], out, options=options(windows, moments=("diag",)))
    with pytest.raises(UsageError, match='dtype="float8" is unknown'):
        calibrate(model, [str(good)], out, options=options(windows, dtype="float8"))
    tensors = load_file(model / "model.safetensors")
    lost = tensors.pop("model.layers.1.self_attn.o_proj.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.1\.self_attn\.o_proj\.weight'"):
        calibrate(model, [str(good)], out, options=options(windows))
    tensors["model.layers.1.self_attn.o_proj.weight"] = lost[:, :32].contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"o_proj.weight' is 64x32, its config.json makes it 64x64; one of the two"
    ):
        calibrate(model, [str(good)], out, options=options(windows), mode="overwrite")
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.shared
def test_the_bench_model_calibrates_from_text(shared_dir: Path, tmp_path: Path) -> None:
    model = shared_dir / "assets" / "models" / "bench-4m" / "hf"
    text = shared_dir / "assets" / "data" / "wikitext2" / "wiki.train.part.txt"
    settings = CalibrateOptions(samples=16, seqlen=64, moments=("diagonal", "block"))
    done = calibrate(model, [str(text)], tmp_path / "stats", options=settings)
    assert done is not None
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    loaded.model.layers[3].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    samples = load_samples([str(text)], model, samples=16, seqlen=64)
    with torch.no_grad():
        for row in torch.split(samples.windows, 12):
            loaded(row)
    windows = torch.cat(seen).double()  # [16, 64, 768]
    x = windows.flatten(0, 1)
    with Statistics.open(done.out) as statistics:
        found = statistics.of("model.layers.3.mlp.down_proj")
    # Both run in float32, in batches of different sizes.
    expected = weighted_gram(x, windows[:, 0]).diagonal()
    assert torch.allclose(found.second_moment.double(), expected, rtol=1e-4)
    assert torch.allclose(found.amax.double(), x.abs().amax(0), rtol=1e-4)
    assert done.content["data"]["sha256"] == samples.sha256
