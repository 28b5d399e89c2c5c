"""Every family whose norms the table knows: factors on all of its edges at once, and rotations, leave transformers' own
model of it what it was."""

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import UsageError
from ptqpipe.models.families import Norms
from ptqpipe.models.families.table import FAMILIES
from ptqpipe.models.folding import Structure, find_structure, move_factors, rotate_residual, rotate_values
from ptqpipe.models.folding.structure import Norm
from ptqpipe.models.folding.tensors import Op, apply
from ptqpipe.run.machine import Machine
from tests import families

# norm, latent, value and up edges, where they are not those of two layers like Llama's; experts have more of the last.
EDGES: dict[str, tuple[int, int, int, int]] = {
    "deepseek_v3": (4, 4, 0, 6), "deepseek_v32": (4, 4, 0, 6), "glm_moe_dsa": (4, 4, 0, 6), "minicpm3": (4, 4, 0, 2),
    "youtu": (4, 4, 0, 2), "arcee": (4, 0, 2, 0), "starcoder2": (4, 0, 2, 0), "jais2": (4, 0, 2, 0),
    "apertus": (4, 0, 2, 0), "phi": (2, 0, 2, 0), "exaone4": (0, 0, 2, 2), "olmo2": (0, 0, 2, 2),
    "olmo3": (0, 0, 2, 2), "flex_olmo": (0, 0, 2, 8), "cohere": (2, 0, 2, 2), "cohere2": (2, 0, 2, 2),
    "cohere2_moe": (2, 0, 2, 8), "gpt2": (24, 0, 12, 0), "persimmon": (4, 0, 0, 0), "cosmos3_edge": (4, 0, 2, 0),
    "gemma4": (8, 0, 0, 4), "kimi_k25": (4, 4, 0, 2),
}  # fmt: skip
# Of two layers one has attention.
# Layers as gemma4's, of which transformers makes none so small.
AS_GEMMA4 = ("gemma4_text", "gemma4_unified", "gemma4_unified_text")
STATES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def kinds() -> list[tuple[str, Norms]]:
    """Model types with their norms; of images and text, the type of the whole."""
    found: dict[str, Norms] = {}
    for family in FAMILIES:
        for name in family.types if family.norms is not None else ():
            if name in (*AS_GEMMA4, "kimi_k2"):  # the latter is code on the hub, with the layers of deepseek_v3
                continue
            whole = name.removesuffix("_text")
            alone = transformers.CONFIG_MAPPING[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            assert family.norms is not None
            found[name if alone or whole not in transformers.CONFIG_MAPPING else whole] = family.norms
    return [*found.items(), ("kimi_k25", Norms())]  # a deepseek_v3 with a tower


KINDS = kinds()


def make(folder: Path, kind: str) -> Path:
    """A random model in float64, whose norms and biases are not trivial."""
    torch.manual_seed(0)
    config = families.make_config(kind)
    config.get_text_config().pad_token_id = 0
    model = auto(config).from_config(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise)
    model.save_pretrained(folder)
    return folder


def auto(config: Any) -> Any:
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def loaded(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    repeats = config.model_type != "unlimited_ocr"  # whose eager attention wants as many keys as queries
    plain = {"attn_implementation": "eager" if repeats else "sdpa", "experts_implementation": "eager"}
    return auto(config).from_pretrained(folder, dtype=torch.float64, **plain).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(3))
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def structure_of(folder: Path) -> Structure:
    shapes = {name: ("F64", tuple(t.shape)) for name, t in load_file(folder / "model.safetensors").items()}
    return find_structure(shapes, json.loads((folder / "config.json").read_text()))


def moved(folder: Path, out: Path, structure: Structure) -> Counter[str]:
    """Writes the model with random factors on every edge; how many edges of each kind there are."""
    generator, ops = torch.Generator().manual_seed(9), defaultdict[str, list[Op]](list)
    edges = [edge for edge in structure.edges if edge.kind != "final"]
    for edge in edges:
        for name, op in move_factors(edge, torch.rand(edge.channels, generator=generator, dtype=torch.float64) + 0.5):
            ops[name].append(op)
    tensors = load_file(folder / "model.safetensors")
    for name, found in ops.items():
        t = tensors[name]
        planes = [apply(plane, found, expert=e) for e, plane in enumerate(t)] if t.dim() == 3 else []
        tensors[name] = torch.stack(planes) if planes else apply(t, found)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return Counter(edge.kind for edge in edges)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "norms"), KINDS, ids=[kind for kind, _ in KINDS])
def test_the_model_stays_what_it_was(tmp_path: Path, kind: str, norms: Norms) -> None:
    source = make(tmp_path / "source", kind)
    model, structure = loaded(source), structure_of(source)
    before = logits(model)
    assert norms.layer_norm == ignores_a_shift(model, structure)
    kinds_of_edges = moved(source, tmp_path / "moved", structure)
    found = tuple(kinds_of_edges[name] for name in ("norm", "latent", "value", "up"))
    expected = EDGES.get(kind, (4, 0, 1 if kind in STATES else 2, max(2, found[3])))
    assert found == expected
    after = logits(loaded(tmp_path / "moved"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))  # parts are float32
    tensors = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for name in rotations(structure):
        options = TransformOptions(transforms=name, rotation_size=16, untie=True, dtype="fp32")
        transform(source, tmp_path / name, options=options, machine=Machine(workers=1))
        after = logits(loaded(tmp_path / name))
        torch.testing.assert_close(after, before, rtol=0, atol=3e-4 * float(before.abs().max()))


def rotations(structure: Structure) -> list[str]:
    """Those that are not refused, and change something."""
    found = ["rotate_values"] if any(edge.kind == "value" for edge in structure.edges) else []
    if structure.model_type in STATES:  # whose attention has a gate
        with pytest.raises(UsageError, match="a gate multiplies each channel"):
            rotate_values.check(structure, 16, untie=True)
        found = []
    elif not found:
        with pytest.raises(UsageError, match="no value projection into which"):
            rotate_values.check(structure, 16, untie=True)
    try:
        rotate_residual.check(structure, 16, untie=True)
    except UsageError:
        return found
    return ["rotate_residual", *found]


def ignores_a_shift(model: Any, structure: Structure) -> bool:
    """Whether the norms of the residual stream subtract the mean."""
    norm = next(edge.producer for edge in structure.edges if edge.kind in ("norm", "final"))
    assert isinstance(norm, Norm)
    name = norm.weight.removesuffix(".weight").removeprefix("model.").removeprefix("language_model.")
    name = name.replace("model.blocks.", "layers.")
    modules = (module for each, module in model.named_modules() if f".{each}".endswith(f".{name}"))
    module = next(found for found in modules if found.weight.shape == (structure.hidden,))  # towers have some, too
    x = torch.randn(4, structure.hidden, dtype=torch.float64)
    return torch.allclose(module(x), module(x + 3), atol=1e-4)


def test_where_no_factor_may_move_the_reason_is_said() -> None:
    config = {"model_type": "inkling2", "text_config": {"model_type": "inkling2_text"}}
    with pytest.raises(UsageError, match="factors may not move in inkling2_text: its layers also read what earlier"):
        find_structure({}, config)


@pytest.mark.parametrize("kind", ["deepseek_v3", "granitemoe", "phi3", "qwen3_vl_moe"])
def test_statistics_know_every_weight_that_an_edge_names(tmp_path: Path, kind: str) -> None:
    source, data = families.make_model(tmp_path / kind, kind), families.write_windows(tmp_path / "data.jsonl")
    options = CalibrateOptions(samples=4, seqlen=16, holdout=0, moments=("diagonal",))
    done = calibrate(source, [str(data)], tmp_path / "stats", options=options, machine=Machine(workers=1))
    assert done is not None
    wanted = [m for edge in structure_of(source).edges for m in edge.consumers if m.quantized]
    assert wanted
    assert not [m.modules for m in wanted if not {*m.modules} & {*done.content["modules"]}]
