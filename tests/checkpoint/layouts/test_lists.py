"""Claims about lists of what is kept: `Lists` takes an entry as the reader's own function does.

compressed-tensors and transformers are asked themselves; vLLM, SGLang and GPTQModel have their rules written out here.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from compressed_tensors.utils.match import match_name
from transformers.quantizers.quantizers_utils import should_convert_module

from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.checkpoint.layouts._lists import Lists, called, wholes
from ptqpipe.errors import CheckpointError

MODULES = [
    *(f"model.layers.{layer}.self_attn.{leaf}_proj" for layer in (0, 1, 10) for leaf in "qkvo"),
    *(f"model.layers.{layer}.mlp.{leaf}_proj" for layer in (0, 1, 10) for leaf in ("gate", "up", "down")),
    *(f"model.layers.2.mlp.experts.{expert}.{leaf}_proj" for expert in (0, 11) for leaf in ("up", "down")),
    "model.layers.2.mlp.gate",
    "model.layers.2.mlp.shared_expert_gate",
    "lm_head",
]
ENTRIES = [
    *(
        "lm_head",
        "model.layers.1",
        "model.layers.1.",
        "layers.1",
        "model.layers.0.mlp.gate",
        "mlp.gate",
        "gate",
        "proj",
    ),
    *("self_attn", "model.layers.*.self_attn", "model.layers.0.*", "*down_proj", "*.mlp.*", "down_proj", "q_proj"),
    *(
        r"re:.*layers\.1\..*",
        "re:.*gate",
        "re:.*gate$",
        "re:model.layers.1",
        "re:lm_head",
        r"re:.*experts\.\d+\.up_proj$",
    ),
    *("model.layers.0.self_attn.qkv_proj", "model.layers.2.mlp.experts", "model.layers.2.mlp.experts.0.up_proj"),
    *("Linear", "", "model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp", "expert"),
]


def described(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def lists(container: str, entry: str) -> Lists:
    """The lists of a layout with one entry."""
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "compressed_tensors": ("compressed-tensors", {"ignore": [entry]}),
        "modelopt": ("modelopt", {"quant_algo": "NVFP4", "ignore": [entry]}),
        "deepseek_fp8": ("fp8", {"modules_to_not_convert": [entry]}),
        "awq": ("awq", {"modules_to_not_convert": [entry], "lm_head": True}),
        "quark": ("quark", {"exclude": [entry], "global_quant_config": {"weight": {"dtype": "fp4"}}}),
    }
    method, more = configs[container]
    return get_container(container).lists(described(method, **more))


def by_compressed_tensors(entry: str, name: str) -> bool:
    return match_name(name, entry) or entry in ("Linear", "LinearBase")


def by_transformers(entry: str, name: str) -> bool:
    try:
        return not should_convert_module(name, [entry])
    except re.error:
        return False  # transformers stops: no other reader takes the entry for an expression


def by_sglang(entry: str, name: str) -> bool:
    """Of FP8: whole components."""
    return f".{entry.rstrip('.')}." in f".{name}."


def by_glob(entry: str, name: str) -> bool:
    """ModelOpt's and TensorRT-LLM's."""
    pieces = {"*": ".*", "?": "."}
    return re.fullmatch("".join(pieces.get(letter, re.escape(letter)) for letter in entry), name) is not None


RULES: dict[str, Sequence[Callable[[str, str], bool]]] = {
    "compressed_tensors": (by_compressed_tensors,),
    "modelopt": (by_glob, by_sglang),
    "deepseek_fp8": (by_transformers, by_sglang),
    "awq": (lambda entry, name: entry in name, by_transformers),
    "quark": (lambda entry, name: match_name(name, entry), by_glob),
}


@pytest.mark.parametrize("container", RULES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_excludes_what_one_of_the_readers_takes_for_excluded(container: str, entry: str) -> None:
    found = lists(container, entry)
    for module in MODULES:
        names = called(module)
        wanted = entry != "" and any(rule(entry, name) for rule in RULES[container] for name in names)
        wanted = wanted or (container != "awq" and entry in wholes(names))
        assert (found.excluding(module) is not None) == wanted, module


@pytest.mark.parametrize("container", RULES)
def test_a_list_of_all_entries_excludes_what_one_of_them_does(container: str) -> None:
    """The names that are taken for alike are so."""
    entries = [entry for entry in ENTRIES if entry not in ("", "proj", "gate", "expert")]
    key = {"compressed_tensors": "ignore", "modelopt": "ignore", "quark": "exclude"}.get(
        container, "modules_to_not_convert"
    )
    method = {"compressed_tensors": "compressed-tensors", "deepseek_fp8": "fp8"}.get(container, container)
    more = {"global_quant_config": {"weight": {"dtype": "fp4"}}, "quant_algo": "NVFP4", "lm_head": True}
    for leave in entries:
        some = [entry for entry in entries if entry != leave and entry != "Linear"]
        every = get_container(container).lists(described(method, **more, **{key: some}))
        alone = [lists(container, entry) for entry in some]
        for module in MODULES:
            assert (every.excluding(module) is None) == all(one.excluding(module) is None for one in alone), module


def test_the_first_rule_of_gptq_decides() -> None:
    rules = {r"+:.*\.1\..*down": {"bits": 8}, r"-:.*down_proj": {}, r".*up": {"bits": 8}}
    found = get_container("gptq").lists(described("gptq", bits=4, dynamic=rules))
    kept = [module for module in MODULES if found.excluding(module)]
    assert kept == [m for m in MODULES if m == "lm_head" or (m.endswith("down_proj") and ".1." not in m)]
    assert found.excluding("lm_head") == "says lm_head None"


def test_what_vllm_takes_for_excluded_by_a_part_of_a_component_is_told_apart() -> None:
    found = lists("modelopt", "model.layers.1")
    assert found.excluding("model.layers.10.mlp.up_proj") is None
    assert list(found.within(MODULES)) == [("model.layers.1", "model.layers.10.self_attn.q_proj")]


@pytest.mark.parametrize("value", ["lm_head", {"lm_head": 1}, [1], 3])
@pytest.mark.parametrize(
    ("container", "method", "key"),
    [
        ("compressed_tensors", "compressed-tensors", "ignore"),
        ("modelopt", "modelopt", "ignore"),
        ("modelopt", "modelopt", "exclude_modules"),
        ("deepseek_fp8", "fp8", "modules_to_not_convert"),
        ("deepseek_fp8", "fp8", "ignored_layers"),
        ("mxfp8_hf", "mxfp8", "ignored_layers"),
        ("gptoss_mxfp4", "mxfp4", "modules_to_not_convert"),
        ("awq", "awq", "modules_to_not_convert"),
        ("quark", "quark", "exclude"),
    ],
)
def test_what_is_no_list_of_names_is_refused(container: str, method: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} in config.json must be a list of strings"):
        get_container(container).lists(described(method, **{key: value}))


@pytest.mark.parametrize("rules", [["-:a"], "-:a", {"+:model.*": 3}])
def test_rules_that_are_none_are_refused(rules: Any) -> None:
    names = {"model.layers.0.mlp.up_proj.qweight": ("I32", (16, 128))}
    with pytest.raises(CheckpointError, match="dynamic"):
        get_container("gptq").stored_weights(described("gptq", bits=4, dynamic=rules), names)


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"in config\.json cannot be matched with"):
        lists("compressed_tensors", "re:(").excluding("model.layers.0.self_attn.q_proj")
