"""Measured sensitivities, and the readers of mixed recipes: transformers runs what a plan wrote."""

import json
from pathlib import Path

import pytest
import torch

from ptqpipe.check.evaluate.scores import score
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import UsageError
from ptqpipe.models.slices import Member, Slice
from ptqpipe.models.source import Source
from ptqpipe.pipeline.budget.command import Budget, MixedPlan, plan_mixed, write_recipe
from ptqpipe.pipeline.budget.measure import Measurement
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.runtime.find_weight import find_place
from ptqpipe.runtime.loading import load_model
from tests.tiny import llama, save

FORMATS = ("nvfp4", "fp8_dynamic", "keep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("measured") / "model", llama())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, since the tiny model has no tokenizer."""
    ids = torch.randint(0, 96, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text(json.dumps({"input_ids": ids}) + "\n")
    return file


def measured(model: Path, text: Path, record: Path, bits: float = 6.0) -> tuple[MixedPlan, list[int]]:
    """The plan, and how many measurements each run made."""
    before = record.read_bytes()[: record.read_bytes().rfind(b"\n") + 1].count(b"\n") if record.exists() else 1
    plan = plan_mixed(model, Budget(bits=bits), formats=FORMATS, sensitivity=Measurement(text, record, seqlen=32))
    return plan, list(range(record.read_bytes().count(b"\n") - before))


def test_a_measured_cost_is_the_kl_of_the_model_with_that_group_converted(
    model: Path, text: Path, tmp_path: Path
) -> None:
    plan, calls = measured(model, text, tmp_path / "m.jsonl")
    assert len(calls) == 2 * len(plan.groups)
    group = next(g for g in plan.groups if g.id.endswith("layers.1.mlp.down_proj"))
    ignore = tuple(m.module for g in plan.groups if g is not group for m in g.members)
    prepared = prepare(
        model, options=RecipeOptions(format="nvfp4", ignore=ignore, objective="none"), out=tmp_path / "one"
    )
    try:
        convert(prepared)
    finally:
        prepared.close()
    tokens = torch.tensor(json.loads(text.read_text())["input_ids"])
    scores = score(load_model(tmp_path / "one", activations="none"), tokens, window=32, reference=load_model(model))
    assert scores.kl is not None
    assert plan.costs[(group.id, "nvfp4")] == pytest.approx(float(scores.kl.double().mean()), rel=1e-4, abs=5e-8)


@pytest.mark.slow
def test_an_interrupted_measurement_continues(model: Path, text: Path, tmp_path: Path) -> None:
    record = tmp_path / "m.jsonl"
    whole, calls = measured(model, text, record)
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:4]) + lines[4][:10])  # torn in the middle of a line
    again, rest = measured(model, text, record)
    assert len(rest) == len(calls) - 3
    assert again.costs == whole.costs
    _, none = measured(model, text, record, bits=8.0)  # another budget needs no new measurement
    assert none == []


def test_measurements_of_another_run_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    record = tmp_path / "m.jsonl"
    for content, says in (
        ('{"version": 1, "model": "other"}\n', "another model, text or window"),
        ("no json\n", "is no record of measurements, or damaged; move it away"),
        ('{"version": 1}\n{"group": 3}\n', "is no record of measurements, or damaged"),
    ):
        record.write_text(content)
        with pytest.raises(UsageError, match=says):
            measured(model, text, record)
        assert record.read_text() == content


def test_experts_are_found_in_merged_parameters() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 8, 4))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 4, 6))

    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = Experts()
    stack = model.mlp.experts.gate_up_proj
    for leaf, w in (("gate_proj", stack[2, :4]), ("up_proj", stack[2, 4:]), ("w3", stack[2, 1::2])):
        name = f"mlp.experts.2.{leaf}.weight"
        place = find_place(model, Member(name, (4, 4), Slice(name)), w.detach().clone())
        assert place.data_ptr() == w.data_ptr()
    transposed = model.mlp.experts.down_proj[1].t().detach().clone()
    name = "mlp.experts.1.down_proj.weight"
    assert torch.equal(find_place(model, Member(name, (6, 4), Slice(name)), transposed), transposed)


@pytest.mark.slow
@pytest.mark.shared
def test_transformers_runs_what_a_plan_wrote(shared_dir: Path, tmp_path: Path) -> None:
    """Logits of the mixed checkpoint read by transformers alone, and by our own decode."""
    from transformers import AutoModelForCausalLM

    source = shared_dir / "assets" / "models" / "bench-4m" / "hf"
    plan = plan_mixed(source, Budget(bits=7.2), formats=("nvfp4", "mxfp8a16", "fp8_dynamic", "keep"))
    write_recipe(plan, tmp_path / "recipe.yaml")
    assert len(set(plan.chosen.values())) > 1
    prepared = prepare(source, recipe_path=tmp_path / "recipe.yaml", out=tmp_path / "out")
    try:
        convert(prepared)
    finally:
        prepared.close()
    ids = torch.arange(5, 69)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = load_model(tmp_path / "out", dtype="float32")
    with torch.inference_mode():
        a, b = theirs(ids).logits, ours(ids).logits
    with Source.open(tmp_path / "out") as ckpt:
        assert len({stored.scheme.name for stored in ckpt.stored.values()}) > 1
    assert torch.allclose(a, b, atol=2e-2 * float(b.abs().max()))
