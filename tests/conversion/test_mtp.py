"""Claims about `convert --mtp`: what of multi-token prediction layers is quantized, and who reads that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.convert_summary import warnings_of
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import UsageError
from ptqpipe.recipe.options import RecipeOptions
from tests import families, tiny

Make = Callable[[str], Path]
EXACT = {"scale_search": "absmax", "global_scale": "absmax", "workers": 1}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes each model once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = families.make_model(tmp_path_factory.mktemp("mtp") / kind, kind, mtp=True)
        return made[kind]

    return of


def fates(out: Path) -> dict[str, str]:
    """Scheme of every quantized weight of a conversion."""
    record = json.loads((out / "ptqpipe.json").read_text())
    return {name: weight["scheme"] for name, weight in record["weights"].items()}


@pytest.mark.parametrize(
    ("kind", "scheme", "mtp", "expected"),
    [
        ("deepseek_v3", "nvfp4", "fp8", "fp8_dynamic"),
        ("deepseek_v3", "fp8_block", "fp8", "fp8_block"),
        ("glm4_moe", "nvfp4_w4a4", "nvfp4", "nvfp4_w4a4"),
        ("qwen3_next", "fp8_dynamic", "nvfp4", "nvfp4"),
    ],
)
def test_experts_and_projections_are_quantized_and_what_joins_the_layer_is_not(
    kind: str, scheme: str, mtp: str, expected: str, make: Make, tmp_path: Path
) -> None:
    done = ptqpipe.convert(make(kind), out=tmp_path / "out", format=scheme, mtp=mtp, **EXACT)
    base = families.mtp_base(kind)
    found = {name.removeprefix(base): scheme for name, scheme in fates(done.out).items() if name.startswith(base)}
    if scheme != "fp8_block":  # the tiny experts have fewer columns than a block
        assert found["mlp.experts.3.down_proj.weight"] == expected
    assert found["self_attn.o_proj.weight"] == expected
    names = " ".join(found)
    assert not [part for part in ("eh_proj", "fc", "shared_head", "embed", "norm", "gate.weight") if part in names]
    assert ("kv_b_proj" in names) is (expected == "fp8_dynamic")  # at 8 bits readers take it apart
    report = verify(done.out, source=make(kind), workers=1)
    assert report.ok, [fault.message for fault in report.faults]


def test_sglang_builds_the_layer_unquantized_beside_modelopt(make: Make, tmp_path: Path) -> None:
    for kind, mtp in (("deepseek_v3", "fp8"), ("qwen3_next", "nvfp4")):
        options = RecipeOptions("nvfp4_w4a4", container="modelopt", mtp=mtp)
        with pytest.raises(UsageError, match=r"reader=.sglang.: .*SGLang builds it unquantized beside"):
            prepare(make(kind), options=options, out=tmp_path / "out", reader="sglang")
        if mtp == "nvfp4":
            prepare(make(kind), options=options, out=tmp_path / "out", reader="vllm").close()
            continue
        # Of ModelOpt's layout vLLM makes no experts with a scale of each row (get_quant_method of its modelopt.py).
        with pytest.raises(UsageError, match=r"vllm runs no experts in fp8_dynamic from modelopt"):
            prepare(make(kind), options=options, out=tmp_path / "out", reader="vllm")


def test_the_rule_of_the_layer_is_no_typo_of_the_recipe(make: Make, tmp_path: Path) -> None:
    with prepare(make("glm4_moe"), options=RecipeOptions("fp8", mtp="fp8"), out=tmp_path / "out") as work:
        assert not [line for line in warnings_of(work) if "matches no tensor" in line]


def test_models_without_the_layer_are_refused_in_one_line(make: Make, tmp_path: Path) -> None:
    options = RecipeOptions("nvfp4", mtp="fp8")
    with pytest.raises(UsageError, match=r"mtp=.fp8.: .* has no multi-token prediction layer; leave it out"):
        prepare(tiny.save(tmp_path / "llama", tiny.llama()), options=options, out=tmp_path / "out")
    without = families.make_model(tmp_path / "dropped", "glm4_moe")  # as transformers saves it
    with pytest.raises(UsageError, match=r"no tensor of the layers that num_nextn_predict_layers in its config.json"):
        prepare(without, options=options, out=tmp_path / "out")
    everything = RecipeOptions("nvfp4", ("model.layers.2.*",), mtp="fp8")
    with pytest.raises(UsageError, match=r"mtp=.fp8. would change nothing"):
        prepare(make("glm4_moe"), options=everything, out=tmp_path / "out")
