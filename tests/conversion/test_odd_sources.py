"""Claims about sources that are legal and unusual: what is kept keeps its bytes, what is ambiguous is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.cli import main
from ptqpipe.conversion import convert_summary as tables
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import AlreadyComplete, CheckpointError, FormatError, NumericsError, OutputError, UsageError
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from tests import tiny

Q, K, V, OUT = (f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo")


def small(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tiny.llama(layers=1, hidden=32, inner=64), **more}


def converted(tmp_path: Path, tensors: dict[str, torch.Tensor], **options: Any) -> tuple[Path, dict[str, Any]]:
    """The output of a conversion that verify accepts, and its record."""
    config = options.pop("config", None)
    model = tiny.save(tmp_path / "model", tensors, config=config)
    done = ptqpipe.convert(model, out=tmp_path / "out", workers=1, **options)
    report = verify(done.out, source=model, workers=1)
    assert report.ok, [fault.message for fault in report.faults]
    return done.out, dict(done.record)


def test_no_command_copies_what_a_link_leads_to_outside_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0:0")
    packed, _ = converted(tmp_path, small(), format="mxfp8")
    plain, out = tmp_path / "model", tmp_path / "new"
    for folder in (packed, plain):
        (folder / "notes.txt").symlink_to("../secret")
    calls: list[Callable[[], Any]] = [
        lambda: ptqpipe.convert(plain, out=out, format="mxfp8", workers=1),
        lambda: prepare(plain, options=RecipeOptions(format="mxfp8"), out=out),  # as --dry-run
        lambda: relayout(packed, out, container="ptqpipe"),
        lambda: dequantize(packed, out),
        lambda: transform(plain, out, options=TransformOptions(transforms="rotate_values")),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"notes\.txt' is a link that leaves .*, to '\.\./secret'"):
            call()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "secret"]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt", "ptqpipe"])
def test_every_dtype_and_shape_that_is_not_quantized_keeps_its_bytes(tmp_path: Path, container: str) -> None:
    odd = {
        "double.weight": torch.randn(32, 32, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "ids.weight": torch.arange(64).reshape(8, 8),
        "scalar": torch.tensor(1.5),
        "scalar.weight": torch.tensor(-0.0, dtype=torch.bfloat16),
        "empty.weight": torch.zeros(0, 32, dtype=torch.bfloat16),
        "thin.weight": torch.zeros(32, 0, dtype=torch.bfloat16),
        "layers.mlp.experts.down_proj": torch.zeros(0, 32, 16, dtype=torch.bfloat16),
        "conv.weight": torch.randn(4, 3, 5).bfloat16(),
        "nan.running_mean": torch.tensor([float("nan"), float("inf")]),
        f"{OUT}.bias": torch.randn(32).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    out, record = converted(tmp_path, small(**odd), container=container)
    found = load_file(out / "model.safetensors")
    for name, tensor in odd.items():
        assert name in record["kept"]
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_a_kept_matrix_of_another_float_dtype_is_listed_as_not_quantized(tmp_path: Path) -> None:
    """Readers would look for packed weights in a linear layer that the config does not list."""
    out, _ = converted(tmp_path, small(**{"a.weight": torch.randn(32, 32, dtype=torch.float64)}))
    assert "a" in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]


@pytest.mark.parametrize(
    "name",
    [
        "x.y z.weight",
        "größe.层.weight",
        f"layers.0.{'a' * 5000}.weight",
        "tab\tline\n.weight",
        ".weight",
        "(.*)[.weight",
        "a/b.weight",
    ],
)
def test_any_name_is_a_name(tmp_path: Path, name: str) -> None:
    out, record = converted(tmp_path, small(**{name: torch.randn(32, 32).bfloat16()}))
    assert name in record["weights"]
    with prepare(tmp_path / "model", out=tmp_path / "other").source:
        pass
    prepared = prepare(tmp_path / "model", options=RecipeOptions(ignore=("model*",)), out=tmp_path / "other")
    with prepared:
        assert all(line.isprintable() for line in tables.header_text(prepared, Machine()).splitlines())
        assert max(map(len, tables.header_text(prepared, Machine()).splitlines())) < 1000
    assert out.is_dir()


@pytest.mark.parametrize(
    ("name", "container"),
    [
        (f"{Q}.weight_packed", "compressed_tensors"),
        (f"{Q}.weight_scale", "compressed_tensors"),
        ("other.weight_packed", "compressed_tensors"),
        ("model.norm.weight_scale", "compressed_tensors"),
        (f"{Q}.weight_scale", "modelopt"),
        (f"{Q}.weight_scale_2", "modelopt"),
        (f"{Q}.weight_scale", "ptqpipe"),
    ],
)
def test_a_tensor_that_reads_as_a_part_of_a_quantized_weight_is_refused(
    tmp_path: Path, name: str, container: str
) -> None:
    model = tiny.save(tmp_path / "model", small(**{name: torch.zeros(4)}))
    with pytest.raises((CheckpointError, OutputError), match=re.escape(name.rpartition(".")[0])):
        prepare(model, options=RecipeOptions(container=container), out=tmp_path / "out")


def test_tied_embeddings_without_a_head_are_kept_and_named(tmp_path: Path) -> None:
    tensors = small()
    del tensors["lm_head.weight"]
    out, record = converted(tmp_path, tensors, config={**tiny.LLAMA_CONFIG, "tie_word_embeddings": True})
    assert "model.embed_tokens.weight" in record["kept"]
    assert "lm_head" in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]


def test_a_source_without_config_converts_and_files_beside_it_are_carried(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", small())
    (model / "generation_config.json").write_text('{"temperature": 0.7}')
    (model / "code").mkdir()
    (model / "code" / "modeling.py").write_text("pass\n")
    (model / "config.json").unlink()
    out = ptqpipe.convert(model, out=tmp_path / "out", workers=1).out
    for name in ("generation_config.json", "code/modeling.py", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert verify(out, source=model, workers=1).ok


def test_a_fused_group_with_a_missing_member_shares_a_scale_all_the_same(tmp_path: Path) -> None:
    tensors = small()
    del tensors[f"{K}.weight"]
    _, record = converted(tmp_path, tensors)
    assert record["weights"][f"{Q}.weight"]["global_scale"] == record["weights"][f"{V}.weight"]["global_scale"]


def test_a_fused_member_of_a_dtype_that_is_not_quantized_keeps_its_siblings(tmp_path: Path) -> None:
    tensors = small()
    tensors[f"{K}.weight"] = tensors[f"{K}.weight"].double()
    _, record = converted(tmp_path, tensors)
    assert {f"{leaf}.weight" for leaf in (Q, K, V)} <= record["kept"].keys()
    assert "fused with" in record["kept"][f"{Q}.weight"]["reason"]


def test_an_expert_beside_the_stack_that_holds_it_is_refused(tmp_path: Path) -> None:
    tensors = tiny.fused_moe(hidden=32, inner=16)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(16, 32, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="next to the stack"):
        prepare(tiny.save(tmp_path / "model", tensors), out=tmp_path / "out")


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_tensor"])
def test_a_weight_that_its_siblings_scale_would_erase_is_an_error_that_says_how_to_keep_it(
    tmp_path: Path, scheme: str
) -> None:
    tensors = small()
    tensors[f"{Q}.weight"][0, 0] = 3e30
    model = tiny.save(tmp_path / "model", tensors)
    with pytest.raises(NumericsError, match=r"would lose 100% of its energy.*ignore=") as caught:
        ptqpipe.convert(model, format=scheme, out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    remedy = str(caught.value).split('ignore=["')[1].removesuffix('"]')
    assert ptqpipe.convert(
        model, format=scheme, ignore=[remedy], out=tmp_path / "out", overwrite=True, workers=1
    ).out.is_dir()


def test_a_number_beyond_the_format_is_not_called_a_loss_of_energy(tmp_path: Path) -> None:
    tensors = small()
    tensors[f"{OUT}.weight"][0, 0] = 3e38
    model = tiny.save(tmp_path / "model", tensors)
    with pytest.raises(NumericsError, match=f"{OUT}.weight has a number next to the largest of float32"):
        ptqpipe.convert(model, format="mxfp4", out=tmp_path / "out", workers=1)


@pytest.mark.parametrize("container", ["modelopt", "compressed_tensors", "ptqpipe"])
def test_a_tensor_without_a_name_before_its_weight_is_kept_or_refused_in_one_line(
    tmp_path: Path, container: str
) -> None:
    tensors = small(**{".weight": torch.randn(32, 32).to(torch.float64)})
    model = tiny.save(tmp_path / "model", tensors)
    if container == "modelopt":
        with pytest.raises(FormatError, match="a module without a name"):
            ptqpipe.convert(model, format="fp8_dynamic", container=container, out=tmp_path / "out", workers=1)
        return
    ptqpipe.convert(model, format="fp8_dynamic", container=container, out=tmp_path / "out", workers=1)
    assert verify(tmp_path / "out", source=model, workers=1).ok


def test_a_loud_sibling_costs_precision_and_verify_accepts_it(tmp_path: Path) -> None:
    """The reference of verify is abs-max at the scale that the group shares, not at one of its own."""
    tensors = small()
    tensors[f"{Q}.weight"] *= 3e3
    _, record = converted(tmp_path, tensors)
    assert 0.0 < record["weights"][f"{K}.weight"]["relative_mse"] < 0.5


def test_config_text_that_is_not_unicode_survives(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", small(), config={**tiny.LLAMA_CONFIG, "note": "half \ud800 pair"})
    out = ptqpipe.convert(model, out=tmp_path / "out", workers=1).out
    assert json.loads((out / "config.json").read_text())["note"] == "half \ud800 pair"
    assert verify(out, source=model, workers=1).ok


@pytest.mark.parametrize("value", [None, [], {}, 3, "32", [[32]], {"hidden_size": []}])
@pytest.mark.parametrize("key", ["hidden_size", "model_type", "text_config", "dtype", "architectures"])
def test_configs_of_the_wrong_types_are_no_obstacle(tmp_path: Path, key: str, value: object) -> None:
    tensors = tiny.fused_moe(hidden=32, inner=16)
    del tensors["model.layers.0.mlp.experts.gate_up_proj"]  # now hidden_size alone tells the orientation
    config = {**tiny.LLAMA_CONFIG, "hidden_size": 32, key: value}
    with prepare(tiny.save(tmp_path / "model", tensors, config=config), out=tmp_path / "out").source:
        pass


def test_a_finished_run_says_so_when_resumed(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", small())
    ptqpipe.convert(model, out=tmp_path / "out", workers=1)
    before = tiny.bytes_of(tmp_path / "out")
    with pytest.raises(AlreadyComplete, match="already complete"):
        ptqpipe.convert(model, out=tmp_path / "out", resume=True, workers=1)
    assert tiny.bytes_of(tmp_path / "out") == before
    with pytest.raises(OutputError, match="no unfinished run"):
        ptqpipe.convert(model, format="mxfp4", out=tmp_path / "out", resume=True, workers=1)


def test_overwrite_deletes_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.save(tmp_path / "model", small())
    home = tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    (home / "documents" / "thesis.txt").write_text("years")
    (home / "config.json").write_text("{}")  # many things are called so
    with pytest.raises(OutputError, match="no model that overwrite=True may replace"):
        ptqpipe.convert(model, out=home, overwrite=True, workers=1)
    work = ptqpipe.convert(model, out=tmp_path / "work", workers=1).out
    monkeypatch.chdir(work)
    with pytest.raises(OutputError, match="the working folder"):
        ptqpipe.convert(model, out=work, overwrite=True, workers=1)
    assert (home / "documents" / "thesis.txt").read_text() == "years"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "home", "work"}
    monkeypatch.chdir(tmp_path)
    assert ptqpipe.convert(model, format="mxfp4", out=work, overwrite=True, workers=1).out == work


def test_a_folder_that_becomes_precious_while_the_run_goes_on_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(tmp_path / "model", small())
    out = tmp_path / "out"
    prepared = prepare(model, out=out)
    reader = type(prepared.source.reader)
    monkeypatch.setattr(reader, "check_unchanged", lambda self: (out.mkdir(), (out / "thesis.txt").write_text("years")))
    with prepared.source, pytest.raises(OutputError, match="no model"):
        convert(prepared, mode="overwrite")
    assert (out / "thesis.txt").read_text() == "years"


def test_options_of_the_api_that_contradict_or_do_not_exist_are_usage_errors(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", small())
    with pytest.raises(UsageError, match="contradict"):
        ptqpipe.convert(model, out=tmp_path / "out", resume=True, overwrite=True)
    with pytest.raises(UsageError, match="tpu9"):
        ptqpipe.convert(model, out=tmp_path / "out", device="tpu9")
    with pytest.raises(UsageError, match="workers=0"):
        ptqpipe.convert(model, out=tmp_path / "out", workers=0)


def test_patterns_of_a_recipe_that_match_nothing_are_told(tmp_path: Path) -> None:
    """A recipe may be meant for many models, so it says more than this one has."""
    model, recipe = tiny.save(tmp_path / "model", small()), tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nrules:\n- {match: '*.q_porj', format: mxfp4}\n- {match: '*', format: nvfp4}\n"
        "keep: ['*o_proj', 're:.*experts']\n"
    )
    with prepare(model, recipe_path=recipe, out=tmp_path / "out") as prepared:
        assert [line for line in tables.warnings_of(prepared) if "matches no tensor" in line] == [
            "'re:.*experts' of the recipe matches no tensor; is it a typo?",
            "'*.q_porj' of the recipe matches no tensor; did you mean '*.q_proj'?",
        ]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("down_proj", "did you mean '*down_proj'?"),
        ("layers.0.mlp", "did you mean '*layers.0.mlp*'?"),
        ("*.q_porj", "did you mean '*.q_proj'?"),
        ("*self_atn*", "did you mean '*self_attn*'?"),
        ("model.layers.0.self_atn", "did you mean 'model.layers.0.self_attn*'?"),
        ("re:down_proj$", "did you mean 're:.*down_proj$'?"),
        ("xyzzy", "names are like 'model.layers.0.mlp.down_proj'"),
        ("re:xyzzy", "names are like 'model.layers.0.mlp.down_proj'"),
    ],
)
def test_an_ignored_pattern_that_matches_nothing_is_refused_with_the_nearest(
    tmp_path: Path, pattern: str, said: str
) -> None:
    model = tiny.save(tmp_path / "model", small())
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        ptqpipe.convert(model, out=tmp_path / "out", ignore=["*o_proj", pattern])
    assert str(caught.value) == f'ignore=["{pattern}"] matches nothing in the model; {said}'
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_ignored_pattern_may_mean_a_tied_head_or_an_expert_of_a_stack(tmp_path: Path) -> None:
    tensors = tiny.fused_moe()
    del tensors["lm_head.weight"]
    patterns = ["lm_head", "*experts.1.down_proj", "*norm"]
    _, record = converted(tmp_path, tensors, ignore=patterns)
    assert "model.layers.0.mlp.experts.down_proj" in record["kept"]


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--json"]])
def test_a_source_without_config_is_warned_of_once_on_stderr(tmp_path: Path, more: list[str]) -> None:
    model = tiny.save(tmp_path / "model", small())
    said = []
    for _ in range(2):
        done = CliRunner().invoke(
            main, ["convert", str(model), "-o", str(tmp_path / "out"), "-q", "--overwrite", *more]
        )
        assert done.exit_code == 0
        said.append(done)
        (model / "config.json").unlink(missing_ok=True)
    assert [done.stderr.count("has no config.json") for done in said] == [0, 1]
    assert "transformers, vLLM and SGLang cannot load" in said[1].stderr
    assert "has no config.json" not in said[1].stdout
    with pytest.warns(UserWarning, match="has no config.json"):
        ptqpipe.convert(model, out=tmp_path / "api", workers=1)


def test_ignore_wins_over_the_keep_list_and_the_rules_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nrules:\n"
        f"- {{match: {OUT}, format: mxfp4}}\n- {{match: lm_head, format: mxfp4}}\n- {{match: '*', format: mxfp4}}\n"
        "keep: ['*down_proj']\n"
    )
    model = tiny.save(tmp_path / "model", small())
    options = RecipeOptions(ignore=("*o_proj", "*down_proj"))
    prepared = prepare(model, options=options, recipe_path=recipe, out=tmp_path / "out")
    with prepared:
        kept = {kept.name: kept.reason for kept in prepared.outputs.plan.kept}
    assert kept["model.layers.0.mlp.down_proj.weight"] == "ignored on request"
    assert kept[f"{OUT}.weight"] == "ignored on request"
    assert "lm_head.weight" not in kept  # a rule that names a module exactly overrides the default keep list
