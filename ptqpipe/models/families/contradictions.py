"""Where a config.json and the tensors beside it cannot both be right: found before anything is written.

Readers that follow the config leave such a model half filled, or stop; a quantized copy would carry that on. What may
be meant so (a part of a model) is said and not refused.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ptqpipe.errors import CheckpointError

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOWERS = frozenset({"visual", "vision_tower", "vision_model"})
_TOWER_KEYS = ("vis", "vit", "image", "img", "tower")
_LAYER = re.compile(r".*?(^|\.)layers\.\d+(?=\.)")
_ADAPTER = re.compile(r"\.((lora|hada|lokr|ia3|oft|boft|vera)_|modules_to_save\.|original_module\.)", re.IGNORECASE)
_MERGE = (
    "merge it where the model was trained (peft: model.merge_and_unload().save_pretrained('merged')), and give the "
    "merged folder"
)
# The layers of the language model, under what transformers calls it. Layouts of other programs, by names that only they
# have.
_DECODER = re.compile(r"((?:language_model\.|model\.|transformer\.|backbone\.|gpt_neox\.)*(?:layers|h))\.(\d+)\.")
_LAYOUTS = (
    (re.compile(r"(layers\.\d+\.attention\.(wq|wk|wv|wo|wkv_b|wq_a)|tok_embeddings)\."), "Meta's and Mistral's own"),
    (re.compile(r"(blk\.\d+\.|token_embd\.)"), "GGUF's"),
    (re.compile(r"(.*\.)?decoder\.layers\.\d+\.self_attention\.linear_(qkv|proj)\."), "Megatron's"),
    (re.compile(r"transformer\.h\.\d+\.attn\.attn\."), "litgpt's"),
)
# Types of decoders that differ in norms and biases alone, and transformers' class of each.
_PLAIN = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_PLAIN |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OF_MISTRAL = {"mistral_large3", "mistral_large4", "mistral_large4_text"}  # transformers' names of these are Mistral's
_TOWER_NAMES = ("tower", "vision_model", "vision_encoder")  # keys of a text that names the tower's own model


def check_experts(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where a layer has too few or too many experts.

    config  of the model, as it stands in its files
    names   of all tensors
    """
    experts: dict[str, set[int]] = {}
    for name in names:
        parent, separator, rest = name.partition(".experts.")
        number = rest.partition(".")[0]
        if separator and number.isdecimal():
            experts.setdefault(f"{parent}.experts", set()).add(int(number))
    counts = {key: count for part in _parts(config) for key, count in part.items() if key in _COUNTS}
    for module, numbers in experts.items():
        _check_experts(module, numbers, {key: count for key, count in counts.items() if type(count) is int})


def check_tower(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where there is a vision tower and no config of one."""
    tower = next((name for name in names if not _TOWERS.isdisjoint(name.split("."))), "")
    nested = isinstance(config.get("text_config"), Mapping)
    if tower and nested and not _describes_tower(config):
        raise CheckpointError(
            f"config.json has a text_config and no vision_config, but the files hold a vision tower ({tower!r}); take "
            "the config.json that belongs to them, or remove the tower's tensors"
        )


def check_unmerged(names: Iterable[str]) -> None:
    """CheckpointError, in one line, where an adapter lies beside the weights that it is of, as peft keeps a model that
    it trains."""
    unique = set(names)
    wrapped = [name for name in unique if ".base_layer." in name]
    adapters = [name for name in unique if _ADAPTER.search(name)] if wrapped else []
    for name in wrapped:
        parent = name.rpartition(".base_layer.")[0]
        adapter = next((other for other in adapters if other.startswith(f"{parent}.")), None)
        if adapter is not None:
            raise CheckpointError(f"{adapter!r} is of an adapter that is not merged into {name!r}; {_MERGE}")


def _check_experts(module: str, numbers: set[int], counts: Mapping[str, int]) -> None:
    last = max(numbers)
    absent = next((number for number in range(last + 1) if number not in numbers), None)
    if absent is None and (not counts or len(numbers) in counts.values()):
        return
    said = " or ".join(f"{key} {count}" for key, count in counts.items())
    says = f", and config.json says {said}" if counts else ""
    lacks = last + 1 if absent is None and len(numbers) < max(counts.values()) else absent
    which = "" if lacks is None else f" (there is no {module}.{lacks})"
    raise CheckpointError(
        f"{module} has {len(numbers)} experts{which}{says}; download the model again, or correct its config.json"
    )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def too_few_layers(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A complaint about fewer layers in the files than in the config, or "". Counted over all lists of layers, since
    some families have several."""
    counts = [part.get("num_hidden_layers") for part in _parts(config)]
    count = next((value for value in counts if type(value) is int), 0)
    layers = {match[0] for match in map(_LAYER.match, shapes) if match}
    if not layers or len(layers) >= count:
        return ""
    return (
        f"config.json says num_hidden_layers {count}, but the files have {len(layers)}; readers stop: download what is "
        "missing, or correct the number"
    )


def too_many_layers(config: Mapping[str, Any], names: Iterable[str], further: Collection[int]) -> str:
    """A complaint about layers behind the last that the config counts, or "".

    names    without those of multi-token prediction layers
    further  numbers of such that the config does not count
    """
    counts = [part.get("num_hidden_layers") for part in _parts(config)]
    said = [value for value in counts if type(value) is int]
    keys = _keys(config)
    if not said or any("nextn" in key or "mtp" in key for key in keys):
        return ""
    numbered = {(match[1], int(match[2])) for match in map(_DECODER.match, names) if match and len(match[2]) < 7}
    late = sorted((number, layers) for layers, number in numbered if number >= max(said) and number not in further)
    if not late:
        return ""
    return (
        f"config.json says num_hidden_layers {max(said)}, but the files have {late[0][1]}.{late[0][0]}; readers stop, "
        "or leave it out: take the config.json that belongs to them, or correct the number"
    )


def unmerged(names: Collection[str]) -> str:
    """A complaint about an adapter's tensors beside its base weights, or ""."""
    for name in names:
        match = _ADAPTER.search(name)
        if match is not None and (weight := f"{name[: match.start()]}.weight") in names:
            return f"{name!r} is of an adapter that is not merged into {weight!r}, and readers leave it out; {_MERGE}"
    return ""


def another_layout(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """A complaint about tensor names of another program's layout, or ""."""
    own = {str(part.get("model_type")) for part in _parts(config)} & _OF_MISTRAL
    for name in () if own else names:
        for pattern, whose in _LAYOUTS:
            if pattern.match(name):
                return (
                    f"{name!r} is a name of {whose} layout, and readers of its config.json look for others; take "
                    "the model in transformers' layout, or convert it to that first"
                )
    return ""


def is_plain_decoder(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether these are all tensors of the Llama-like decoder that a config describes, and nothing else: then no other
    library need say so. False where it may be another model, too."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    numbers = [config.get(key) for key in keys]
    numbers += [config.get("num_key_value_heads") or numbers[2]]
    sizes = [n for n in numbers if isinstance(n, int) and 0 < n < 10**7]
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _PLAIN or len(sizes) < len(numbers):
        return False
    if config.get("architectures") not in (None, [_PLAIN[kind]]):
        return False
    hidden, inner, heads, count, vocabulary, groups = sizes
    head = config.get("head_dim") or hidden // heads
    wanted: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
    }
    wanted |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (groups * head, hidden))
    wanted |= {"mlp.down_proj": (hidden, inner), **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))}
    wanted |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    if kind == "qwen3":
        wanted |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head,))
    if kind == "qwen2":
        wanted |= {f"self_attn.{x}_proj.bias": wanted[f"self_attn.{x}_proj"][:1] for x in "qkv"}
    layer = {name if name.endswith("bias") else f"{name}.weight": shape for name, shape in wanted.items()}
    if count * len(layer) > len(shapes):
        return False
    model = {f"model.layers.{n}.{name}": shape for n in range(count) for name, shape in layer.items()}
    model |= {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if "lm_head.weight" in shapes or not config.get("tie_word_embeddings"):
        model["lm_head.weight"] = (vocabulary, hidden)
    return model == {name: shape for name, (_, shape) in shapes.items()}


def another_width(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A complaint about an embedding whose width is no number of the config, or ""."""
    numbers = {value for part in _parts(config) for value in part.values() if type(value) is int}
    for name, (_, shape) in shapes.items():
        if name.endswith("embed_tokens.weight") and len(shape) == 2 and "hidden_size" in _keys(config):
            if shape[1] in numbers:
                return ""
            return (
                f"{name!r} is {shape[0]}x{shape[1]}, and no number of config.json is {shape[1]}; readers stop: one of "
                "the two is of another model"
            )
    return ""


def _keys(config: Mapping[str, Any]) -> set[str]:
    return {key for part in _parts(config) for key in part}


def _describes_tower(config: Mapping[str, Any]) -> bool:
    for key, value in config.items():
        if isinstance(value, Mapping) and any(word in key for word in _TOWER_KEYS):
            return True
        if isinstance(value, str) and any(key.endswith(name) for name in _TOWER_NAMES):
            return True
    return False
