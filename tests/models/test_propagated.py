"""Input energies that weights alone let expect: against sampled inputs, by layout, through convert and verify."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import NumericsError, PtqError, UsageError
from ptqpipe.models.propagated import LEAST
from ptqpipe.models.slices import Slice
from ptqpipe.models.source import Source
from tests import tiny
from tests.calibration.models import make_model

LAYER = "model.layers.0"


def outliers(seed: int = 0) -> dict[str, torch.Tensor]:
    """A Llama whose gains differ, with one MLP channel whose gate and up projection are large and alike."""
    tensors = tiny.llama(seed=seed)
    random = torch.Generator().manual_seed(seed)
    for name, weight in tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = (weight.float() + torch.rand(weight.shape, generator=random)).bfloat16()
    gate = tensors[f"{LAYER}.mlp.gate_proj.weight"]
    gate[5] *= 30
    tensors[f"{LAYER}.mlp.up_proj.weight"][5] = gate[5]
    return tensors


def moments_of(folder: Path, *names: str, workers: int = 1) -> list[torch.Tensor]:
    with Source.open(folder) as source:
        inputs = source.propagated
        inputs.compute(workers=workers)
        moments = [inputs.of(Slice(f"{name}.weight"), source.tensors[f"{name}.weight"][1][1]) for name in names]
    assert all(one is not None for one in moments)
    return [one for one in moments if one is not None]


def near(actual: torch.Tensor, expected: torch.Tensor, *, rel: float) -> bool:
    """Equal but for a factor that all have in common."""
    expected = (expected / expected.median()).clamp_min(LEAST)
    return bool(((actual / actual.median()).double() / expected - 1).abs().max() < rel)


def test_the_first_layer_is_what_sampled_inputs_have(tmp_path: Path) -> None:
    tensors = {name: weight.double() for name, weight in outliers().items()}
    folder = tiny.save(tmp_path / "model", outliers())
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    q, o, up, down = moments_of(folder, *(f"{LAYER}.{name}" for name in names))
    x = torch.randn(40_000, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = x * tensors[f"{LAYER}.input_layernorm.weight"]
    assert near(q, first.square().mean(dim=0), rel=0.05)
    values = (first @ tensors[f"{LAYER}.self_attn.v_proj.weight"].t()).view(-1, 2, 1, 32).expand(-1, 2, 2, 32)
    values = values.reshape(len(x), 128)
    assert near(o, values.square().mean(dim=0), rel=0.08)
    written = 1 + values.square().mean(dim=0) @ tensors[f"{LAYER}.self_attn.o_proj.weight"].square().t()
    second = x * written.sqrt() / written.mean().sqrt() * tensors[f"{LAYER}.post_attention_layernorm.weight"]
    assert near(up, second.square().mean(dim=0), rel=0.05)
    gated = (second @ tensors[f"{LAYER}.mlp.gate_proj.weight"].t()) * (
        second @ tensors[f"{LAYER}.mlp.up_proj.weight"].t()
    )
    assert near(down, gated.square().mean(dim=0), rel=0.15)
    assert int(down.argmax()) == 5


def test_outliers_that_a_layer_writes_are_in_the_next_ones_inputs(tmp_path: Path) -> None:
    tensors = outliers()
    tensors[f"{LAYER}.mlp.down_proj.weight"][77, 5] = 8.0
    q, up = moments_of(
        tiny.save(tmp_path / "model", tensors), "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    )
    for moments in (q, up):
        assert int(moments.argmax()) == 77
        assert float(moments.max()) > 20


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt2", "gemma2", "deepseek_v3"])
def test_other_layouts_have_moments_of_what_a_norm_feeds(tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path / "model", kind)
    with Source.open(folder) as source:
        inputs = source.propagated.compute()
        places = {name for name, _ in inputs}
        kept = ("norm", "embed", "wte", "wpe", "ln_", "lm_head", "bias", "router")
        missing = [n for n in source.tensors if n not in places and not any(part in n for part in kept)]
        wanted = {"gpt2": ["mlp.c_proj"], "deepseek_v3": ["o_proj"]}.get(kind, [])  # behind no gate, latent values
        assert all(any(part in name for part in wanted) for name in missing), missing
        assert all(bool((h > 0).all()) and bool(torch.isfinite(h).all()) for h in inputs.values())


def test_any_number_of_threads_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", outliers())
    names = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.k_proj", "mlp.down_proj")]
    for one, other in zip(moments_of(folder, *names), moments_of(folder, *names, workers=3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("fmt", "share"), [("nvfp4", 0.5), ("mxfp4", 1.0)])
def test_convert_spends_its_scales_on_the_channels_that_count_and_verify_proves_them(
    tmp_path: Path, fmt: str, share: float
) -> None:
    tensors = outliers()
    folder = tiny.save(tmp_path / "model", tensors)
    name = f"{LAYER}.mlp.down_proj.weight"
    of_channel = {}
    for objective in ("none", "propagated"):
        done = ptqpipe.convert(folder, format=fmt, objective=objective, out=tmp_path / objective, workers=1)
        with ptqpipe.load_tensors(done.out) as loaded:
            q = loaded[name]
            assert not isinstance(q, torch.Tensor)
            of_channel[objective] = float((q.dequantize().double() - tensors[name].double())[:, 5].square().sum())
        report = verify(done.out, source=folder, optimal=True, all_blocks=True, workers=1)
        assert report.faults == ()
        assert all(weight.optimality is not None and not weight.optimality.worse for weight in report.weights)
    assert of_channel["propagated"] < share * of_channel["none"]
    default = ptqpipe.convert(folder, format=fmt, out=tmp_path / "default", workers=2)
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("default", "propagated", "none")]
    assert files[0] == files[1] != files[2]
    assert {entry["weighting"] for entry in default.record["weights"].values()} == {"propagated"}


def test_a_scale_that_the_plain_error_would_choose_is_a_fault(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", outliers())
    out, plain = (
        ptqpipe.convert(folder, format="nvfp4", objective=objective, out=tmp_path / objective, workers=1).out
        for objective in ("propagated", "none")
    )
    (out / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    record = json.loads((out / "ptqpipe.json").read_text())
    assert record["recipe"]["rules"][0]["weighting"] == "propagated"
    faults = {fault.check for fault in verify(out, source=folder, optimal=True, workers=1).faults}
    assert {"repeat", "optimal"} <= faults


def test_a_model_of_which_nothing_is_known_gets_the_least_squared_error(tmp_path: Path) -> None:
    config = {**tiny.LLAMA_CONFIG, "model_type": "nothing_like_it"}
    folder = tiny.save(tmp_path / "model", outliers(), config=config)
    done = ptqpipe.convert(folder, format="nvfp4", out=tmp_path / "out", workers=1)
    assert {entry["weighting"] for entry in done.record["weights"].values()} == {"none"}
    plain = ptqpipe.convert(folder, format="nvfp4", objective="none", out=tmp_path / "plain", workers=1)
    assert (done.out / "model.safetensors").read_bytes() == (plain.out / "model.safetensors").read_bytes()
    assert verify(done.out, source=folder, optimal=True, workers=1).faults == ()


@pytest.mark.parametrize(
    "options",
    [
        {"format": "fp8"},
        {"format": "nvfp4", "scale_search": "absmax"},
        {"format": "mxfp4", "scale_search": "ocp_floor"},
    ],
)
def test_where_it_has_no_meaning_it_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    folder = tiny.save(tmp_path / "model", outliers())
    with pytest.raises(UsageError, match=r'objective="propagated" is for searches that take weights.*nvfp4'):
        ptqpipe.convert(folder, objective="propagated", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("input_layernorm.weight", (64,)),
        ("self_attn.o_proj.weight", (64, 128)),
        ("mlp.gate_proj.weight", (128, 128)),
        ("mlp.down_proj.weight", (64, 256)),
    ],
)
def test_widths_that_contradict_each_other_are_no_structure(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = outliers()
    tensors[f"{LAYER}.{name}"] = torch.ones(shape, dtype=torch.bfloat16)
    with Source.open(tiny.save(tmp_path / "model", tensors)) as source:
        assert source.propagated.compute() == {}


def test_biases_of_another_length_are_no_structure(tmp_path: Path) -> None:
    tensors = outliers()
    for length, count in ((64, 14), (63, 0)):
        tensors[f"{LAYER}.self_attn.v_proj.bias"] = torch.ones(length, dtype=torch.bfloat16)
        with Source.open(tiny.save(tmp_path / str(length), tensors)) as source:
            assert len(source.propagated.compute()) == count


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "gpt2", "deepseek_v3", "qwen2"])
def test_a_damaged_checkpoint_is_refused_or_no_structure(tmp_path: Path, kind: str) -> None:
    """Tensors that are missing, empty, or of another shape or dtype, one or two at a time."""
    folder = make_model(tmp_path / "model", kind)
    whole, rng = load_file(folder / "model.safetensors"), random.Random(kind)
    damages: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda _: None,
        lambda w: w[: len(w) // 2],
        lambda w: w[None] if w.dim() < 3 else w[0],
        lambda w: w.t(),
        lambda w: w[:0],
        lambda w: w.new_ones(()),
        lambda w: w.repeat([2] * w.dim()),
        lambda w: w.to(rng.choice([torch.uint8, torch.float8_e4m3fn, torch.float64])),
        lambda w: w * float("nan"),
    ]
    names, outcomes = [name for name, w in whole.items() if 0 < w.dim() < 3], set()
    for _ in range(60):
        tensors = dict(whole)
        for name in rng.sample(names, rng.choice((1, 2))):
            damaged = rng.choice(damages)(tensors.pop(name))
            tensors |= {} if damaged is None else {name: damaged.contiguous()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        try:
            with Source.open(folder) as source:
                moments = source.propagated.compute()
        except PtqError:
            outcomes.add("refused")
            continue
        assert all(bool((h > 0).all()) and bool(torch.isfinite(h).all()) for h in moments.values())
        outcomes.add("known" if moments else "unknown")
    assert {"known", "unknown"} <= outcomes


def test_damaged_rows_count_as_zeros(tmp_path: Path) -> None:
    tensors = outliers()
    tensors[f"{LAYER}.self_attn.v_proj.weight"][3] = float("nan")
    folder = tiny.save(tmp_path / "model", tensors)
    (o,) = moments_of(folder, f"{LAYER}.self_attn.o_proj")
    assert bool(torch.isfinite(o).all())
    out = ptqpipe.convert(folder, format="nvfp4", ignore=["*v_proj"], out=tmp_path / "out", workers=1).out
    assert verify(out, source=folder, optimal=True, workers=1).faults == ()
    with pytest.raises(NumericsError, match=r"v_proj.*NaN"):
        ptqpipe.convert(folder, format="nvfp4", out=tmp_path / "damaged", workers=1)
