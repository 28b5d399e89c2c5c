"""Claims about config groups: a module has the scheme that compressed-tensors would give it."""

import pytest

from ptqpipe.checkpoint.layouts import _config_groups
from ptqpipe.checkpoint.layouts._config_groups import resolver

GROUPS = [
    (["Linear"], "class"),
    ([r"re:.*\.mlp\..*", "model.layers.0.mlp.up_proj"], "mlp"),
    ([r"re:.*\.experts\..*", "lm_head"], "experts"),
]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", "class"),
        ("model.layers.1.mlp.down_proj", "mlp"),
        ("model.layers.0.mlp.up_proj", "mlp"),
        ("lm_head", "experts"),  # by its name, before any class
        ("model.layers.0.mlp.experts.1.up_proj", "experts"),  # of two expressions the first in alphabetical order
    ],
)
def test_names_come_before_expressions_and_those_before_classes(module: str, expected: str) -> None:
    assert resolver(GROUPS)(module) == expected


def test_a_word_without_a_dot_is_a_class_only_if_it_is_written_like_one() -> None:
    assert resolver([(["lm_head"], "head")])("model.layers.0.self_attn.q_proj") is None
    assert resolver([(["LlamaLinear"], "class")])("model.layers.0.self_attn.q_proj") == "class"
    assert resolver([(["Linear"], True)], classes=False)("model.layers.0.self_attn.q_proj") is None


def test_expressions_are_tried_for_modules_without_a_name_of_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So thousands of exact names cost nothing: no list is searched or sorted for a module."""
    tried: list[str] = []
    monkeypatch.setattr(_config_groups, "matches", lambda target, module: bool(tried.append(module)))
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(2000)]
    find = resolver([(names, "named"), (["re:.*other"], "other")])
    assert {find(name) for name in names} == {"named"}
    assert tried == []
    assert find("model.norm") is None
    assert tried == ["model.norm"]
