"""Claims about names that patterns do not tell apart: deciding for one of them decides for all."""

import pytest

from ptqpipe.checkpoint.patterns import alike
from ptqpipe.models.families import COMMON, FAMILIES
from ptqpipe.recipe.recipe import matches

NAMES = [
    f"{start}layers.{layer}.{part}"
    for start in ("", "model.", "model.language_model.")
    for layer in (0, 6, 7, 61, 617)
    for part in (
        "self_attn.q_proj", "mlp.experts.3.up_proj", "mlp.experts.61.up_proj", "eh_proj", "norm1", "mixer.conv1d",
        "self_attn.indexer.wk", "mlp.gate", "mamba.in_proj", "altup_projections.0", "mlp1.61", "fc1_latent_proj",
    )
]  # fmt: skip
BUILT_IN = [issue.keep.pattern.replace("{layers}", "61|62") for issues in (COMMON, *(f.issues for f in FAMILIES))
            for issue in issues]  # fmt: skip
OWN = ["*", "*.3.*", "model.layers.6.mlp.gate", "*layers.61*", "re:.*\\.6[01]?\\.", "re:.*layers\\.\\d\\.", "re:a|1\\."]


@pytest.mark.parametrize("patterns", [BUILT_IN, *([pattern] for pattern in OWN), [*BUILT_IN, *OWN]])
def test_what_a_pattern_says_of_a_name_it_says_of_its_kind(patterns: list[str]) -> None:
    kind = alike(patterns)
    for name in NAMES:
        for pattern in patterns:
            assert matches(pattern, name) == matches(pattern, kind(name)), (pattern, name, kind(name))


def test_a_model_of_many_experts_has_few_kinds_of_names() -> None:
    kind = alike(BUILT_IN)
    assert (
        len({kind(f"model.layers.{i}.mlp.experts.{e}.up_proj") for i in range(61) for e in range(256)}) == 3
    )  # 61, 62, others
