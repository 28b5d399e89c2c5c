"""Plans of mixed precision: the choice, the recipe, and its size, on tiny models."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.cli import main
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import OutputError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.numerics.qtensor import squared_error
from ptqpipe.pipeline.budget.command import Budget, MixedPlan, plan_mixed, write_recipe
from ptqpipe.pipeline.budget.plan_units import find_groups, schemes_of
from ptqpipe.quantization.metric import output_error
from ptqpipe.recipe.file import exact_patterns, load_recipe
from ptqpipe.recipe.knapsack import solve
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.recipe import matches
from tests.quantization import inputs
from tests.tiny import LLAMA_CONFIG, Tensors, fused_moe, llama, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mixed") / "model", llama(layers=3, inner=192))


def converted(model: Path, plan: MixedPlan, folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    write_recipe(plan, recipe)
    prepared = prepare(model, recipe_path=recipe, out=folder / "out")
    try:
        convert(prepared)
    finally:
        prepared.close()
    return folder / "out"


def weight_bytes(folder: Path) -> int:
    names = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return sum(path.stat().st_size for path in names)


def test_the_choice_is_the_best_of_all_choices() -> None:
    """Against every combination, on random programs; budgets from nothing but the smallest to everything."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        costs = torch.rand((6, 3), generator=generator, dtype=torch.float64).tolist()
        sizes = (torch.rand((6, 3), generator=generator) * 1000).int().add(1).tolist()
        low, high = sum(map(min, sizes)), sum(map(max, sizes))
        for budget in (low, (2 * low + high) // 3, (low + high) // 2, high):
            found = solve(costs, sizes, budget)
            assert found is not None
            best = min(
                sum(costs[g][o] for g, o in enumerate(choice))
                for choice in itertools.product(range(3), repeat=6)
                if sum(sizes[g][o] for g, o in enumerate(choice)) <= budget
            )
            assert found.nbytes <= budget
            assert found.cost == pytest.approx(best, rel=1e-6)
            assert found.gap <= 1e-6
        assert solve(costs, sizes, low - 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("budget", [Budget(bits=4.6), Budget(bits=6.0), Budget(bits=9.0), Budget(nbytes=300_000)])
def test_the_forecast_is_the_bytes_that_convert_writes(model: Path, tmp_path: Path, budget: Budget) -> None:
    plan = plan_mixed(model, budget)
    out = converted(model, plan, tmp_path)
    assert weight_bytes(out) == plan.file_bytes
    record = json.loads((out / "ptqpipe.json").read_text())
    for group in plan.groups:
        for member in group.members:
            written = record["weights"].get(member.weight, {}).get("scheme", "keep")
            assert written == plan.chosen[group.id]
    if budget.nbytes is not None:
        assert weight_bytes(out) <= budget.nbytes
        tight = plan_mixed(model, Budget(nbytes=plan.file_bytes))  # the budget binds to the byte
        assert tight.file_bytes <= plan.file_bytes
        assert tight.solution.cost <= plan.solution.cost * (1 + 1e-6)
    else:
        with Source.open(out) as ckpt:
            stored = sum(ckpt.reader.entries[p.name].nbytes for s in ckpt.stored.values() for p in s.parts)
            stored += sum(
                ckpt.reader.entries[m.weight].nbytes
                for g in plan.groups
                for m in g.members
                if plan.chosen[g.id] == "keep"
            )
        assert 8 * stored / plan.elements == pytest.approx(plan.bits(plan.solution), rel=1e-12)
        assert plan.bits(plan.solution) <= (budget.bits or 0)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("block", "full"), ()])
@pytest.mark.parametrize("bits", [4.6, 6.0, 9.0])
def test_with_statistics_the_recipe_converts_with_them(bits: float, moments: tuple[str, ...], tmp_path: Path) -> None:
    model = save(tmp_path / "model", llama())
    stats = inputs.write_statistics(tmp_path / "stats", model, inputs.inputs_of_llama(llama()), moments=moments)
    plan = plan_mixed(model, Budget(bits=bits), sensitivity=stats)
    recipe = tmp_path / "recipe.yaml"
    write_recipe(plan, recipe)
    assert recipe.read_text().splitlines()[0].endswith(f"convert model --recipe recipe.yaml --stats {stats.name}")
    with pytest.raises(UsageError, match="needs statistics"):
        prepare(model, recipe_path=recipe, out=tmp_path / "out")
    prepared = prepare(model, recipe_path=recipe, out=tmp_path / "out", stats=stats)
    with prepared:
        convert(prepared)
    assert weight_bytes(tmp_path / "out") == plan.file_bytes
    wanted = ("gptq", "diagonal") if moments else ("rtn", "diagonal")
    for name, entry in json.loads((tmp_path / "out" / "ptqpipe.json").read_text())["weights"].items():
        assert (entry["algorithm"], entry["weighting"]) == wanted, name
        assert entry["versus_rtn"] <= 1.0


def test_more_budget_never_costs_more(model: Path) -> None:
    plan = plan_mixed(model, Budget(bits=5.5))
    assert len(plan.curve) > 5
    costs = [solution.cost for solution in plan.curve]
    assert costs == sorted(costs, reverse=True)
    bits = [plan.bits(solution) for solution in plan.curve]
    assert bits == sorted(bits)
    assert all(solution.gap <= 1e-6 for solution in plan.curve)


def test_a_sensitive_layer_gets_the_bits(tmp_path: Path) -> None:
    """Data-free costs are relative to the role's mean energy: the layer with eight times the weights is the costly."""
    tensors = llama(layers=3)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 8
    plan = plan_mixed(save(tmp_path / "model", tensors), Budget(bits=5.2), formats=("nvfp4", "fp8_dynamic"))
    assert plan.chosen["model.layers.1.mlp.down_proj"] == "fp8_dynamic"
    assert plan.chosen["model.layers.0.mlp.down_proj"] == plan.chosen["model.layers.2.mlp.down_proj"] == "nvfp4"


def test_data_free_costs_are_the_stated_formula(model: Path, tmp_path: Path) -> None:
    """By converting everything to the format and measuring the decode: another path to the same numbers."""
    plan = plan_mixed(model, Budget(bits=6))
    prepared = prepare(model, options=RecipeOptions(objective="none"), out=tmp_path / "out")
    try:
        convert(prepared)
    finally:
        prepared.close()
    with Source.open(tmp_path / "out") as ckpt, Source.open(model) as source:
        for layer in range(3):
            expected = 0.0
            for role in ("gate_proj", "up_proj"):
                name = f"model.layers.{layer}.mlp.{role}.weight"
                energies = [
                    float(source.reader.read(f"model.layers.{i}.mlp.{role}.weight").double().square().sum())
                    for i in range(3)
                ]
                expected += squared_error(ckpt.quantized(name), source.reader.read(name)) / (sum(energies) / 3)
            found = plan.costs[(f"model.layers.{layer}.mlp.gate_proj+up_proj", "nvfp4")]
            assert found == pytest.approx(expected, rel=1e-9)


def test_fused_weights_and_all_experts_of_an_mlp_share_a_scheme(tmp_path: Path) -> None:
    model = save(tmp_path / "model", fused_moe(), config={**LLAMA_CONFIG, "model_type": "qwen3_moe"})
    with Source.open(model) as source:
        groups = find_groups(source, schemes_of(("nvfp4", "fp8_dynamic", "keep")))
    members = {group.id.rpartition(".")[2]: len(group.members) for group in groups}
    assert members == {"q_proj+k_proj+v_proj": 3, "o_proj": 1, "experts": 9}
    for bits in (5.0, 7.0, 10.0):
        plan = plan_mixed(model, Budget(bits=bits))
        (tmp_path / str(bits)).mkdir()
        assert weight_bytes(converted(model, plan, tmp_path / str(bits))) == plan.file_bytes


def test_shapes_that_a_format_does_not_fit_get_another(tmp_path: Path) -> None:
    t = Tensors(4)
    t.add("model.layers.0.mlp.up_proj.weight", 32, 64)
    t.add("model.layers.0.mlp.down_proj.weight", 64, 40)  # neither 16 nor 32 divide 40
    model = save(tmp_path / "model", t.made)
    plan = plan_mixed(model, Budget(bits=8))
    assert plan.chosen["model.layers.0.mlp.down_proj"] == "fp8_dynamic"
    with pytest.raises(UsageError, match=r"40.* fits none of the formats"):
        plan_mixed(model, Budget(bits=8), formats=("nvfp4", "mxfp8a16"))


@pytest.mark.parametrize(
    ("modules", "others"),
    [
        (["model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["model.layers.1.self_attn.q_proj"], ["model.layers.11.self_attn.q_proj", "xmodel.layers.1.self_attn.q_proj"]),
        (["model.layers.2.mlp.experts.7.w1"], ["model.layers.12.mlp.experts.7.w1", "model.layers.2.mlp.w1"]),
        (["lm+head", "a.b"], ["lmmhead", "axb", "lm+head2"]),
    ],
)
def test_patterns_match_their_modules_alone(modules: Sequence[str], others: Sequence[str]) -> None:
    found = exact_patterns(modules)
    assert all(any(matches(pattern, module) for pattern in found) for module in modules)
    assert not any(matches(pattern, module) for pattern in found for module in others)


def test_recipes_survive_names_of_any_characters(tmp_path: Path) -> None:
    t = Tensors(6)
    for layer in range(2):
        t.add(f'model.layers.{layer}.a"b\\d+🙂: #x.up_proj.weight', 32, 64)
        t.add(f"model.layers.{layer}.mlp.up_proj.weight", 32, 64)
    model = save(tmp_path / "model", t.made)
    plan = plan_mixed(model, Budget(bits=6.0), formats=("nvfp4", "fp8_dynamic"))
    assert set(plan.chosen.values()) == {"nvfp4", "fp8_dynamic"}
    assert weight_bytes(converted(model, plan, tmp_path)) == plan.file_bytes


@pytest.mark.slow
def test_recipes_are_compact(tmp_path: Path) -> None:
    tensors = llama(layers=12, hidden=64, inner=64)
    plan = plan_mixed(save(tmp_path / "model", tensors), Budget(bits=5.5))
    assert len(plan.content["rules"]) <= 24
    write_recipe(plan, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml").rules[-1].match == "*"


@pytest.mark.parametrize("moment", ["second_moment", "block_moment", "full_moment"])
def test_weighted_errors_are_the_mean_squared_outputs(moment: str) -> None:
    """E (d x)^2, with what the moment leaves out set to zero; for the full one also as the mean over the samples."""
    generator = torch.Generator().manual_seed(3)
    x, d = torch.randn((64, 32), generator=generator).double(), torch.randn((8, 32), generator=generator)
    full = x.T @ x / len(x)
    blocks = torch.stack([full[i : i + 16, i : i + 16] for i in (0, 16)])
    kept = {"second_moment": torch.diag(full.diag()), "block_moment": torch.block_diag(*blocks), "full_moment": full}
    given = {"second_moment": full.diag(), "block_moment": blocks, "full_moment": full}[moment].float()
    expected = float(torch.einsum("nk,kl,nl->", d.double(), kept[moment], d.double()))
    assert output_error(d, given) == pytest.approx(expected, rel=1e-5)
    if moment == "full_moment":
        assert expected == pytest.approx(float((x @ d.double().T).square().sum() / len(x)), rel=1e-9)


def write_statistics(folder: Path, model: Path) -> Path:
    """Hand-made statistics: second moments that differ from column to column by powers of ten."""
    folder.mkdir()
    modules: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    with Source.open(model) as source:
        fingerprint = source.reader.fingerprint()
        for name, (_, shape) in source.tensors.items():
            if len(shape) != 2 or "layers" not in name:
                continue
            module = name.removesuffix(".weight")
            h = 10.0 ** torch.randn(shape[1], generator=torch.Generator().manual_seed(len(modules)))
            tensors |= {f"{module}.{moment}": h.clone() for moment in ("second_moment", "amax", "mean")}
            modules[module] = {"key": module, "tokens": 10, "measured": True, "quantiles": {}}
    content = {"version": 1, "digest": "0", "model": {"fingerprint": fingerprint}, "modules": modules}
    (folder / "stats.json").write_text(json.dumps(content))
    save_file(tensors, folder / "all.safetensors")
    return folder


def test_costs_with_statistics_are_relative_output_errors(model: Path, tmp_path: Path) -> None:
    """By converting everything to the format and weighting the errors of the decode."""
    stats = write_statistics(tmp_path / "stats", model)
    plan = plan_mixed(model, Budget(bits=6), sensitivity=stats)
    assert "second moment" in plan.meaning
    prepared = prepare(model, options=RecipeOptions(objective="none"), out=tmp_path / "out")
    try:
        convert(prepared)
    finally:
        prepared.close()
    with Source.open(tmp_path / "out") as ckpt, Source.open(model) as source, Statistics.open(stats) as opened:
        name = "model.layers.2.mlp.down_proj"
        w = source.reader.read(f"{name}.weight").double()
        d = ckpt.quantized(f"{name}.weight").dequantize().double() - w
        h = opened.of(name).second_moment.double()
        expected = float((d.square() * h).sum() / (w.square() * h).sum())
    assert plan.costs[(name, "nvfp4")] == pytest.approx(expected, rel=1e-9)
    other = save(tmp_path / "other", llama(seed=5))
    with pytest.raises(UsageError, match=r"belong to another model .*calibrate this one"):
        plan_mixed(other, Budget(bits=6), sensitivity=stats)


def run(arguments: Sequence[str]) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["plan", *arguments])
    return done.exit_code, done.output


@pytest.mark.slow
def test_the_command_writes_a_recipe_that_converts(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    code, output = run([str(model), "--budget", "5bits", "-o", str(out)])
    assert code == 0, output
    assert ", optimal; converts to " in output
    assert "What other budgets would give" in output
    content: Mapping[str, Any] = yaml.safe_load(out.read_text())
    assert content["version"] == 1
    code, output = run([str(model), "--budget", "5bits", "-o", str(out), "--json"])  # its own recipe is replaced
    assert code == 0
    assert json.loads(output)["bits_per_weight"] <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "4bits"], "the smallest possible is 4.250bits"),
        (["--budget", "1kB"], "the smallest possible is "),
        (["--budget", "many"], "neither bits nor bytes"),
        (["--budget", "0bits"], "out of range"),
        (["--budget", "5bits", "--formats", "nvfp4"], "two or more"),
        (["--budget", "5bits", "--formats", "nvfp4,abc"], "unknown format"),
        (["--budget", "5bits", "--formats", "nvfp4,e2m1/8/ue5m3"], "different containers"),
        (["--budget", "99bits"], "out of range"),
        (["--budget", "5bits", "--stats", "nowhere"], "ptqpipe calibrate"),
        (["--budget", "5bits", "--seqlen", "8"], "belong to --measure"),
        (["--budget", "5bits", "--measure", "nowhere.txt"], "does not exist"),
    ],
)
def test_a_bad_call_is_one_line(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    out = tmp_path / "recipe.yaml"
    code, output = run([str(model), *arguments, "-o", str(out)])
    assert code != 0
    assert output.startswith("Error")
    assert len(output.strip().splitlines()) == 1
    assert message in output
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_plan_is_not_replaced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    out.write_text("version: 1\n")
    with pytest.raises(OutputError, match="not a recipe of ptqpipe plan"):
        write_recipe(plan_mixed(model, Budget(bits=5)), out)
    assert out.read_text() == "version: 1\n"
