"""Tiny checkpoints of other tools, with every form of list that they write: consistent ones, and each with one thing
wrong. Written by hand: nothing of the package's writers is in them.

A case is a layout, a form of its list, what is kept (a part of a model), and what is wrong. `Case.make` writes it;
`Case.wrong` are the modules of which `verify` must name one, none for a consistent checkpoint.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import tiny

Tensors = dict[str, torch.Tensor]
Described = dict[str, Any]
SIZE, GROUP = 128, 128  # of every matrix, whole blocks of every layout; of GPTQ's and AWQ's groups
LEAVES = (
    *(f"self_attn.{leaf}_proj" for leaf in "qkvo"),
    *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")),
)
EXPERTS = tuple(f"mlp.experts.{expert}.{leaf}_proj" for expert in range(2) for leaf in ("gate", "up", "down"))
PLAIN = re.compile(r"embed|norm|(^|\.)gate$|router|lm_head")  # of which a vendor quantizes nothing


# --- Models: the modules of linear layers, all SIZE x SIZE


def modules(kind: str) -> list[str]:
    """The linear layers of a model: "dense", "moe", "vl" (a language model within another) or "mtp"."""
    root = "model.language_model." if kind == "vl" else "model."
    leaves = (*LEAVES[:4], "mlp.gate", *EXPERTS) if kind == "moe" else LEAVES
    found = [f"{root}layers.{layer}.{leaf}" for layer in range(2) for leaf in leaves]
    found += [f"model.visual.blocks.0.{leaf}" for leaf in ("attn.qkv", "mlp.linear_fc1")] if kind == "vl" else []
    found += [f"mtp.layers.0.{leaf}" for leaf in LEAVES] if kind == "mtp" else []
    return [*found, "lm_head"]


def config_of(kind: str, *, tied: bool = False) -> Described:
    """Its config.json; it names no class, whose norms these models do without."""
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    config = {**tiny.LLAMA_CONFIG, **sizes, "vocab_size": SIZE}
    del config["architectures"]
    if kind == "moe":
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": SIZE}
        config |= {"model_type": "qwen3_moe", **experts}
    if kind == "vl":
        config = {
            "model_type": "some_vl",
            "tie_word_embeddings": tied,
            "text_config": {**config, "model_type": "some_text"},
            "vision_config": {"hidden_size": SIZE, "depth": 1},
        }
    return config


# --- Layouts: the tensors of a quantized weight, and the description without its list


def _codes(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x21, dtype=torch.uint8)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5).to(torch.float8_e4m3fn)


def _words(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x33333333, dtype=torch.int32)


def ct_nvfp4(m: str) -> Tensors:
    scales = {f"{m}.weight_scale": _fp8(SIZE, SIZE // 16), f"{m}.weight_global_scale": torch.tensor([64.0])}
    return {f"{m}.weight_packed": _codes(SIZE, SIZE // 2), **scales}


def ct_fp8(m: str) -> Tensors:
    return {f"{m}.weight": _fp8(SIZE, SIZE), f"{m}.weight_scale": torch.ones(SIZE, 1).bfloat16()}


def ct_int4(m: str) -> Tensors:
    scales = {f"{m}.weight_scale": torch.ones(SIZE, 1).half(), f"{m}.weight_shape": torch.tensor([SIZE, SIZE])}
    return {f"{m}.weight_packed": _words(SIZE, SIZE // 8), **scales}


def modelopt_nvfp4(m: str) -> Tensors:
    scales = {f"{m}.weight_scale": _fp8(SIZE, SIZE // 16), f"{m}.weight_scale_2": torch.tensor(0.015625)}
    return {f"{m}.weight": _codes(SIZE, SIZE // 2), **scales, f"{m}.input_scale": torch.tensor(0.01)}


def modelopt_fp8(m: str) -> Tensors:
    scales = {f"{m}.weight_scale": torch.tensor(0.5), f"{m}.input_scale": torch.tensor(0.01)}
    return {f"{m}.weight": _fp8(SIZE, SIZE), **scales}


def deepseek(m: str) -> Tensors:
    return {f"{m}.weight": _fp8(SIZE, SIZE), f"{m}.weight_scale_inv": torch.ones(1, 1)}


def mxfp8(m: str) -> Tensors:
    scales = torch.full((SIZE, SIZE // 32), 127, dtype=torch.uint8)
    return {f"{m}.weight": _fp8(SIZE, SIZE), f"{m}.weight_scale_inv": scales}


def awq(m: str) -> Tensors:
    return {
        f"{m}.qweight": _words(SIZE, SIZE // 8),
        f"{m}.qzeros": _words(SIZE // GROUP, SIZE // 8),
        f"{m}.scales": torch.full((SIZE // GROUP, SIZE), 0.01).half(),
    }


def gptq(m: str) -> Tensors:
    return {
        f"{m}.qweight": _words(SIZE // 8, SIZE),
        f"{m}.qzeros": _words(SIZE // GROUP, SIZE // 8),
        f"{m}.scales": torch.full((SIZE // GROUP, SIZE), 0.01).half(),
        f"{m}.g_idx": (torch.arange(SIZE) // GROUP).int(),
    }


def quark(m: str) -> Tensors:
    return {
        f"{m}.weight": _codes(SIZE, SIZE // 2),
        f"{m}.weight_scale": torch.full((SIZE, SIZE // 32), 127, dtype=torch.uint8),
    }


def _group(form: str, weights: Described, targets: list[str] | None = None) -> Described:
    arguments = {"symmetric": True, "dynamic": False, "type": "float", **weights}
    return {"targets": targets or ["Linear"], "weights": arguments, "format": form}


NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def _compressed(form: str, weights: Described, inputs: Described | None = None) -> Described:
    group = _group(form, weights) | ({} if inputs is None else {"input_activations": inputs})
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def _quark() -> Described:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": {"dtype": "fp4", "is_dynamic": True}},
        "layer_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }


@dataclass(frozen=True)
class Layout:
    """A layout: the tensors of a weight, its description, the key of its list and the forms that entries of it have."""

    store: Callable[[str], Tensors]
    described: Described
    key: str
    forms: tuple[str, ...]


WILD = ("exact", "wildcard", "inner wildcard", "parent")
FP8_LISTS = ("exact", "parent", "component", "expression of transformers", "fused")
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.44.0"}}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MX = {**BLOCKS, "quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}
PACKED = {"bits": 4, "group_size": GROUP}
GPTQ = {"quant_method": "gptq", **PACKED, "desc_act": False, "sym": True, "lm_head": False}
LAYOUTS: dict[str, Layout] = {
    "ct-nvfp4": Layout(ct_nvfp4, _compressed("nvfp4-pack-quantized", NVFP4), "ignore", ("exact", "re", "re$", "fused")),
    "ct-fp8": Layout(ct_fp8, _compressed("float-quantized", CHANNEL, TOKEN), "ignore", ("exact", "re", "re$", "fused")),
    "ct-int4": Layout(ct_int4, _compressed("pack-quantized", INT4), "ignore", ("exact", "re", "re$", "fused")),
    "mo-nvfp4": Layout(modelopt_nvfp4, {**MODELOPT, "quant_algo": "NVFP4"}, "ignore", (*WILD, "component", "fused")),
    "mo-fp8": Layout(modelopt_fp8, {**MODELOPT, "quant_algo": "FP8"}, "ignore", (*WILD, "component", "fused")),
    "deepseek": Layout(deepseek, BLOCKS, "modules_to_not_convert", FP8_LISTS),
    "deepseek, ignored_layers": Layout(deepseek, BLOCKS, "ignored_layers", FP8_LISTS),
    "mxfp8": Layout(mxfp8, MX, "modules_to_not_convert", FP8_LISTS),
    "awq": Layout(
        awq,
        {"quant_method": "awq", **PACKED, "zero_point": True, "version": "gemm"},
        "modules_to_not_convert",
        ("exact", "parent", "component", "part"),
    ),
    "gptq": Layout(gptq, {**GPTQ, "checkpoint_format": "gptq"}, "dynamic", ("re", "re$")),
    "gptq v2": Layout(gptq, {**GPTQ, "checkpoint_format": "gptq_v2"}, "dynamic", ("re", "re$")),
    "quark": Layout(quark, _quark(), "exclude", ("exact", "re", "re$", "wildcard", "inner wildcard")),
}

# --- What is kept, and how a list says it


@dataclass(frozen=True)
class Part:
    """Modules of a model that a vendor keeps: those whose names match, and their names in each form of a list."""

    kind: str
    pattern: str
    forms: Mapping[str, list[str]]


def _parts() -> dict[str, Part]:
    two = range(2)
    return {
        "a layer": Part(
            "dense",
            r"model\.layers\.0\.",
            {
                "re": [r".*layers\.0\..*"],
                "re$": [r"^model\.layers\.0\.(self_attn|mlp)\.\w+$"],
                "wildcard": ["model.layers.0.*"],
                "inner wildcard": ["*layers.0.*"],
                "parent": ["model.layers.0"],
                "component": ["layers.0"],
                "part": ["layers.0."],
                "expression of transformers": [r"model\.layers\.0"],
            },
        ),
        "attention": Part(
            "dense",
            r".*self_attn\.",
            {
                "re": [r".*self_attn.*"],
                "re$": [r".*\.self_attn\.[qkvo]_proj$"],
                "wildcard": ["model.layers.*.self_attn*"],
                "inner wildcard": ["*self_attn*"],
                "parent": [f"model.layers.{layer}.self_attn" for layer in two],
                "component": ["self_attn"],
                "part": ["self_att"],
                "expression of transformers": ["model.layers.*.self_attn"],
            },
        ),
        "q, k and v": Part(
            "dense",
            r".*\.[qkv]_proj$",
            {
                "re": [r".*[qkv]_proj.*"],
                "re$": [r".*self_attn\.(q|k|v)_proj$"],
                "wildcard": ["model.layers.?.self_attn.[qkv]_proj"],
                "inner wildcard": ["*.[qkv]_proj"],
                "component": ["q_proj", "k_proj", "v_proj"],
                "part": ["q_pro", "k_pro", "v_pro"],
                "expression of transformers": [".*[qkv]_proj"],
                "fused": [f"model.layers.{layer}.self_attn.qkv_proj" for layer in two],
            },
        ),
        "gate and up": Part(
            "dense",
            r".*\.(gate|up)_proj$",
            {
                "re": [r".*(gate|up)_proj"],
                "re$": [r".*mlp\.(gate|up)_proj$"],
                "inner wildcard": ["*gate_proj", "*up_proj"],
                "component": ["gate_proj", "up_proj"],
                "part": ["gate_proj", "up_proj"],
                "fused": [f"model.layers.{layer}.mlp.gate_up_proj" for layer in two],
            },
        ),
        "one leaf": Part(
            "dense",
            r".*\.down_proj$",
            {
                "re": [r".*down_proj"],
                "re$": [r".*\.mlp\.down_proj$"],
                "wildcard": ["model.layers.*.mlp.down_proj"],
                "inner wildcard": ["*down_proj"],
                "component": ["down_proj"],
                "part": ["down_proj"],
                "expression of transformers": ["model.layers.*.down_proj"],
            },
        ),
        "experts of a layer": Part(
            "moe",
            r"model\.layers\.1\.mlp\.experts\.",
            {
                "re": [r".*layers\.1\.mlp\.experts.*"],
                "re$": [r"^model\.layers\.1\.mlp\.experts\.\d+\.\w+_proj$"],
                "wildcard": ["model.layers.1.mlp.experts*"],
                "inner wildcard": ["*layers.1.mlp.experts.*"],
                "parent": ["model.layers.1.mlp.experts"],
                "component": ["layers.1.mlp.experts"],
                "part": ["1.mlp.experts"],
                "expression of transformers": [r"model\.layers\.1\.mlp\.experts"],
                "fused": ["model.layers.1.mlp.experts"],
            },
        ),
        "a layer within another model": Part(
            "vl",
            r"model\.language_model\.layers\.0\.",
            {
                "re": [r".*language_model.*layers\.0\..*"],
                "re$": [r"model\.language_model\.layers\.0\.(self_attn|mlp)\.\w+$"],
                "wildcard": ["model.language_model.layers.0.*"],
                "inner wildcard": ["*layers.0.*"],
                "parent": ["language_model.model.layers.0"],
                "component": ["layers.0"],
                "part": ["layers.0."],
                "expression of transformers": [r"model\.language_model\.layers\.0"],
            },
        ),
        "drafting layer": Part(
            "mtp",
            r"mtp\.",
            {
                "re": [r"mtp.*"],
                "re$": [r"^mtp\.layers\.\d+\.(self_attn|mlp)\.\w+$"],
                "wildcard": ["mtp*"],
                "inner wildcard": ["*mtp.*"],
                "parent": ["mtp"],
                "component": ["mtp"],
                "part": ["mtp."],
                "expression of transformers": ["mtp.*"],
            },
        ),
    }


PARTS = _parts()


def _entries(form: str, part: Part | None, kept: list[str], layout: str) -> list[str]:
    """A list for the modules ``kept`` that are ``part`` and others that every vendor keeps, those by their names."""
    if part is None or form == "exact":
        found, rest = [], kept
    else:
        found = part.forms[form]
        rest = [name for name in kept if not re.match(part.pattern, name)]
    marks = {"gptq": "-:", "gptq v2": "-:"}
    mark = marks.get(layout, "re:" if form.startswith("re") else "")
    exact = [f"-:^{re.escape(name)}$" for name in rest] if layout in marks else rest
    return [*exact, *(mark + entry for entry in found)]


@dataclass(frozen=True)
class Case:
    """One checkpoint. ``kept`` and the modules that are ``listed`` as kept; ``place``: where it is described."""

    name: str
    layout: str
    kind: str
    kept: frozenset[str]
    described: Described
    wrong: tuple[str, ...] = ()
    place: str = "quantization_config"
    tied: bool = False
    second: Described | None = field(default=None)
    extra: Callable[[], Tensors] = dict

    def make(self, folder: Path) -> Path:
        """Writes it."""
        tensors: Tensors = {"model.embed_tokens.weight": torch.ones(96, SIZE).bfloat16()}
        for module in modules(self.kind):
            if module == "lm_head" and self.tied:
                continue
            stored = LAYOUTS[self.layout].store(module)
            tensors |= {f"{module}.weight": torch.ones(SIZE, SIZE).bfloat16()} if module in self.kept else stored
        config = config_of(self.kind, tied=self.tied)
        folder.mkdir(parents=True)
        if self.place == "text_config":
            config["text_config"] = {**config.get("text_config", {}), "quantization_config": self.described}
        elif self.place == "hf_quant_config.json":
            self._second(folder, self.described)
        elif self.place:
            config[self.place] = self.described
        if self.second is not None:
            self._second(folder, self.second)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors | self.extra(), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def _second(self, folder: Path, described: Described) -> None:
        """hf_quant_config.json as ModelOpt writes it."""
        inner = {"quant_algo": described["quant_algo"], "kv_cache_quant_algo": None}
        inner |= {"exclude_modules": described["ignore"]} if "ignore" in described else {}
        inner |= {key: described[key] for key in ("group_size", "quantized_layers") if key in described}
        content = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))


def always_kept(kind: str) -> list[str]:
    """What every vendor keeps: the head, routers, the vision tower."""
    return [name for name in modules(kind) if PLAIN.search(name) or "visual" in name]


def with_list(layout: str, entries: list[str] | None) -> Described:
    """The description with a list of these entries; without its key for None."""
    described, key = LAYOUTS[layout].described, LAYOUTS[layout].key
    if entries is None:
        return described
    return {**described, key: {entry: {} for entry in entries} if key == "dynamic" else entries}


def list_cases() -> Iterator[Case]:
    """Every layout, form of list and part of a model: consistent; with a listed weight stored; with a kept one that
    nothing lists."""
    for layout, about in LAYOUTS.items():
        for what, part in PARTS.items():
            for form in about.forms:
                if form != "exact" and form not in part.forms:
                    continue
                if form == "fused" and layout in ("deepseek, ignored_layers", "mxfp8"):
                    continue
                base, every = always_kept(part.kind), modules(part.kind)
                chosen = [name for name in every if re.match(part.pattern, name)]
                entries = _entries(form, part, [*base, *chosen], layout)
                listed, kept = with_list(layout, entries), frozenset([*base, *chosen])
                name = f"{layout}: {what} by {form}"
                yield Case(f"{name}, consistent", layout, part.kind, kept, listed)
                for one in (chosen[0], chosen[-1]):
                    yield Case(f"{name}, {one} stored", layout, part.kind, kept - {one}, listed, (one,))
                yield Case(f"{name}, all stored", layout, part.kind, frozenset(base), listed, tuple(chosen))
                bare = with_list(layout, _entries("exact", None, base, layout))
                yield Case(f"{name}, unlisted", layout, part.kind, kept, bare, tuple(chosen))


def head_cases() -> Iterator[Case]:
    """Heads: kept, listed or not, with every kind of empty list; tied; stored quantized."""
    head = frozenset({"lm_head"})
    for layout, about in LAYOUTS.items():
        empty: dict[str, Described] = {"missing": with_list(layout, None), "null": {**about.described, about.key: None}}
        rule = "-:^lm_head$" if about.key == "dynamic" else "lm_head"
        named = with_list(layout, [rule])
        yield Case(f"{layout}: head kept and listed", layout, "dense", head, named)
        for what, described in {**empty, "empty": with_list(layout, [])}.items():
            yield Case(f"{layout}: tied, list {what}", layout, "dense", head, described, tied=True)
            wrong = ("lm_head",) if layout.startswith("ct-") else ()
            yield Case(f"{layout}: head kept, list {what}", layout, "dense", head, described, wrong)
            down = "model.layers.1.mlp.down_proj"
            yield Case(f"{layout}: a layer kept, list {what}", layout, "dense", head | {down}, described, (down,))
        yield Case(f"{layout}: head stored and listed", layout, "dense", frozenset(), named, ("lm_head",))
        said = {"lm_head": True} if layout.startswith(("gptq", "awq")) else {}
        plain = {} if said else with_list(layout, [])
        yield Case(f"{layout}: head stored", layout, "dense", frozenset(), {**about.described, **plain, **said})
        if said:
            yield Case(f"{layout}: head stored, not said", layout, "dense", frozenset(), about.described, ("lm_head",))


def place_cases() -> Iterator[Case]:
    """Where a description may stand, alone and contradicting a second one."""
    head, down = frozenset({"lm_head"}), "model.layers.1.mlp.down_proj"
    for layout in LAYOUTS:
        rule = "-:^lm_head$" if layout.startswith("gptq") else "lm_head"
        named = with_list(layout, [rule])
        for place in ("compression_config", "text_config"):
            yield Case(f"{layout}: described in {place}", layout, "dense", head, named, place=place)
            wrong = Case(f"{layout}: kept, in {place}", layout, "dense", head | {down}, named, (down,), place=place)
            yield wrong
    for layout in ("mo-nvfp4", "mo-fp8"):
        for entries in (["lm_head"], ["lm_head*"], ["*lm_head"]):
            named, file = with_list(layout, entries), "hf_quant_config.json"
            yield Case(f"{layout}: {file} alone, {entries}", layout, "dense", head, named, place=file)
            yield Case(
                f"{layout}: both, {entries}", layout, "dense", head, with_list(layout, ["lm_head"]), second=named
            )
        missing = with_list(layout, None)
        yield Case(f"{layout}: {file} alone, no list", layout, "dense", head, missing, place=file)
        yield Case(f"{layout}: {file} alone, kept", layout, "dense", head | {down}, named, (down,), place=file)
        more = with_list(layout, ["lm_head", down])
        yield Case(f"{layout}: {file} alone, stored", layout, "dense", head, more, (down,), place=file)
        yield Case(f"{layout}: second lists more", layout, "dense", head, named, (down,), second=more)
        yield Case(f"{layout}: second lists less", layout, "dense", head | {down}, more, (down,), second=named)
        unsaid = {key: value for key, value in named.items() if key != "quant_method"}
        yield Case(f"{layout}: known by its producer", layout, "dense", head, unsaid)
        inner = {"quant_method": "modelopt", "quantization": {**named, "exclude_modules": ["lm_head"]}}
        yield Case(f"{layout}: its second file within config.json", layout, "dense", head, inner)


def other_cases() -> Iterator[Case]:
    """What one layout alone has: groups and classes, mixed precision, blocks, rules of more bits, stacks."""
    head, down = frozenset({"lm_head"}), "model.layers.1.mlp.down_proj"
    attention = frozenset(name for name in modules("dense") if "self_attn" in name)
    one = LAYOUTS["ct-nvfp4"].described

    def groups(*targets: str, ignore: list[str]) -> Described:
        return {**one, "config_groups": {"g": _group("nvfp4-pack-quantized", NVFP4, list(targets))}, "ignore": ignore}

    mlp = groups("re:.*mlp.*", ignore=[])
    yield Case("ct-nvfp4: targets by expression", "ct-nvfp4", "dense", head | attention, mlp)
    yield Case("ct-nvfp4: targets by expression, kept", "ct-nvfp4", "dense", head | attention | {down}, mlp, (down,))
    names = sorted(set(modules("dense")) - attention - head)
    exact = groups(*names, ignore=[])
    yield Case("ct-nvfp4: targets by name", "ct-nvfp4", "dense", head | attention, exact)
    yield Case("ct-nvfp4: targets by name, kept", "ct-nvfp4", "dense", head | attention | {down}, exact, (down,))
    less = groups(*[name for name in names if name != down], ignore=[])
    yield Case("ct-nvfp4: targets by name, one missing", "ct-nvfp4", "dense", head | attention, less, (down,))
    every = groups("Linear", ignore=["Linear"])
    yield Case("ct-nvfp4: all linear layers ignored", "ct-nvfp4", "dense", head, every, tuple(modules("dense")))
    strange = groups("Linear", ignore=["lm_head", "no.such.module", "re:.*absent.*"])
    yield Case("ct-nvfp4: entries that match nothing", "ct-nvfp4", "dense", head, strange)
    parent = groups("Linear", ignore=["lm_head", "model.layers.1.mlp"])
    yield Case("ct-nvfp4: a parent is no entry", "ct-nvfp4", "dense", head | {down}, parent, (down,))
    inert = {**one["config_groups"]["group_0"], "weights": None, "targets": ["re:.*self_attn.*"]}
    cache = {**mlp, "config_groups": {**mlp["config_groups"], "kv": inert}}
    yield Case("ct-nvfp4: a group without weights", "ct-nvfp4", "dense", head | attention, cache)

    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    mixed = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    yield Case("mo-nvfp4: mixed", "mo-nvfp4", "dense", head | attention, mixed)
    yield Case("mo-nvfp4: mixed, kept", "mo-nvfp4", "dense", head | attention | {down}, mixed, (down,))
    q = "model.layers.0.self_attn.q_proj"
    yield Case("mo-nvfp4: mixed, unlisted", "mo-nvfp4", "dense", head | attention - {q}, mixed, (q,))
    both = {**mixed, "ignore": ["*down_proj"]}
    yield Case("mo-nvfp4: mixed, listed and excluded", "mo-nvfp4", "dense", head | attention, both, (down, names[0]))
    yield Case("mo-nvfp4: mixed, hf alone", "mo-nvfp4", "dense", head | attention, mixed, place="hf_quant_config.json")

    inside = {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]}
    blocks = {**LAYOUTS["gptq"].described, **inside}
    yield Case("gptq: modules in blocks", "gptq", "dense", head | attention, blocks)
    yield Case("gptq: modules in blocks, kept", "gptq", "dense", head | attention | {down}, blocks, (down,))
    yield Case("gptq: modules in blocks, stored", "gptq", "dense", head | attention - {q}, blocks, (q,))
    for rule in (r"+:.*down_proj", r".*down_proj"):
        same = {**LAYOUTS["gptq"].described, "dynamic": {rule: {"bits": 4, "desc_act": False}}}
        yield Case(f"gptq: {rule} of 4 bits", "gptq", "dense", head, same)
        first = {**same, "dynamic": {**same["dynamic"], r"-:.*mlp.*": {}}}
        wrong = tuple(name for name in names if "down_proj" not in name)
        yield Case(f"gptq: {rule} before -:", "gptq", "dense", head | frozenset(wrong), first)
        yield Case(f"gptq: {rule} before -:, stored", "gptq", "dense", head, first, wrong)

    spec = {"weight": None, "input_tensors": None}
    plain = {**LAYOUTS["quark"].described, "exclude": ["lm_head"], "layer_quant_config": {"*self_attn*": spec}}
    yield Case("quark: layers without weights", "quark", "dense", head | attention, plain)
    yield Case("quark: layers without weights, stored", "quark", "dense", head | attention - {q}, plain, (q,))

    def stacks() -> Tensors:
        name = "model.layers.0.mlp.experts"
        parts = ("gate_up_proj", "down_proj")
        return {f"{name}.{part}": torch.ones(2, SIZE, SIZE).bfloat16() for part in parts}

    for layout, entry in {
        "ct-fp8": r"re:.*mlp\.experts\..*",
        "mo-fp8": "model.layers.0.mlp.experts*",
        "deepseek": "model.layers.0.mlp.experts",
    }.items():
        listed, bare = (with_list(layout, entries) for entries in (["lm_head", entry], ["lm_head"]))
        wrong = ("model.layers.0.mlp.experts",)
        yield Case(f"{layout}: kept stacks", layout, "dense", head, listed, extra=stacks)
        yield Case(f"{layout}: kept stacks, unlisted", layout, "dense", head, bare, wrong, extra=stacks)


def gptoss_cases() -> Iterator[tuple[str, Described, tuple[str, ...], frozenset[str]]]:
    """gpt-oss' layout: (name, description, wrong modules, layers whose stacks of experts are kept)."""
    usual = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    one = "model.layers.1.mlp.experts"
    for what, entry in {
        "by name": one,
        "by expression": r"model\.layers\.1\.mlp\.experts",
        "by layer": "model.layers.1",
        "by wildcard": "model.layers.1.*",
    }.items():
        listed = {"quant_method": "mxfp4", "modules_to_not_convert": [*usual, entry]}
        yield f"gptoss: {what}, consistent", listed, (), frozenset({"1"})
        yield f"gptoss: {what}, stored", listed, (one,), frozenset()
    for what, entries in {"usual": usual, "null": None, "empty": []}.items():
        described = {"quant_method": "mxfp4", "modules_to_not_convert": entries}
        yield f"gptoss: {what}", described, (), frozenset()
        yield f"gptoss: {what}, kept", described, (one,), frozenset({"1"})


def make_gptoss(folder: Path, described: Described, kept: frozenset[str]) -> Path:
    """A gpt-oss of two layers; the stacks of the layers ``kept`` are bfloat16."""
    tensors: Tensors = {"model.embed_tokens.weight": torch.ones(96, SIZE).bfloat16()}
    for layer in range(2):
        base = f"model.layers.{layer}"
        for leaf in "qkvo":
            tensors[f"{base}.self_attn.{leaf}_proj.weight"] = torch.ones(SIZE, SIZE).bfloat16()
        tensors[f"{base}.mlp.router.weight"] = torch.ones(2, SIZE).bfloat16()
        for leaf, rows in (("gate_up_proj", 2 * SIZE), ("down_proj", SIZE)):
            name = f"{base}.mlp.experts.{leaf}"
            tensors[f"{name}_bias"] = torch.zeros(2, rows).bfloat16()
            if str(layer) in kept:
                tensors[name] = torch.ones(2, SIZE, rows).bfloat16()
                continue
            tensors[f"{name}_blocks"] = torch.full((2, rows, SIZE // 32, 16), 0x21, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((2, rows, SIZE // 32), 127, dtype=torch.uint8)
    tensors["lm_head.weight"] = torch.ones(96, SIZE).bfloat16()
    config = config_of("dense") | {"model_type": "gpt_oss"}
    config |= {"num_local_experts": 2, "num_experts_per_tok": 1, "quantization_config": described}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def all_cases() -> dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]]:
    """name -> (what writes it into a folder, the modules of which verify must name one)."""
    found: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {}
    for cases in (list_cases(), head_cases(), place_cases(), other_cases()):
        for case in cases:
            assert case.name not in found, case.name
            found[case.name] = case.make, case.wrong
    for name, described, wrong, kept in gptoss_cases():
        found[name] = _gptoss(described, kept), wrong
    return found


def _gptoss(described: Described, kept: frozenset[str]) -> Callable[[Path], Path]:
    return lambda folder: make_gptoss(folder, described, kept)
