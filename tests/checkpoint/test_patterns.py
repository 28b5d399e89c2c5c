"""Claims: expressions of files match as Python's re does, and none of them is matched for ever.

The oracle is re.match, on published and on random expressions; what re cannot finish is held against results by hand.
"""

import random
import re

import pytest

from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.checkpoint.patterns import Expression
from ptqpipe.errors import CheckpointError, RecipeError
from ptqpipe.models.families import DEFAULT_KEEP
from ptqpipe.recipe.recipe import check_pattern, matches

NAME = "model.language_model.layers.12.mlp.experts.101.gate_proj"
# Of published checkpoints' ignore lists and recipes, and what our own containers write.
PUBLISHED = [pattern.removeprefix("re:") for pattern, *_ in DEFAULT_KEEP] + [
    r".*lm_head",
    r".*self_attn.*",
    r".*\.mlp\.gate$",
    r".*mlp.experts.*.(gate|up|gate_up|down)_proj$",
    r"^(?!.*experts).*$",
    r"^(?!.*(?:router|shared)).*experts\.\d+\.(?:gate|up)_proj$",
    r"(?i)model\.LAYERS\..*(?<!up)_proj",
    r"model\.layers\.\d+\.mlp\.experts\.\d+\..*",
    r"(\w+\.)*experts\..*",
    r"^(.*\.)?layers\.(0|1|12|13)\.mlp\.experts\.(" + "|".join(map(str, range(256))) + r")\.(gate_proj|up_proj)$",
    r"visual.*|model\.visual\..*",
    r"",
]
NAMES = [
    NAME,
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.3.mlp.gate",
    "",
    "a\nb",
]
NAMES += ["model.visual.blocks.0.attn.qkv", "model.layers.13.mlp.experts.25.up_proj", "model.layers.1.mlp.router"]
# Each of them keeps re.match busy for longer than anyone waits, on names of 30 to 60 letters.
ENDLESS = [r"(.*)*(.*)*(.*)*!$", r"(a|a)*b", r"(?=(?:a|aa)+$)(a|aa)*b", r"a?" * 40 + "a" * 61, r"(.*?,){30}P"]
ENDLESS += [r"^(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*" * 500 + "x"]
TOO_LONG = "(?:a|a)" * 40 + "b"  # and this one the package regex as well


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_expressions_mean_what_re_says(pattern: str) -> None:
    expression = Expression(pattern)
    assert [expression.match(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


def random_expression(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(16) if depth else 0
    if kind < 5:
        return rng.choice(["a", "b", "ab", "c", ".", "[ab]", "[^a]", r"\.", r"\d", r"\w", "1", "A"])
    if kind < 8:
        return random_expression(rng, depth - 1) + random_expression(rng, depth - 1)
    inner = random_expression(rng, depth - 1)
    if kind < 10:
        return f"({inner}|{random_expression(rng, depth - 1)}{rng.choice(['', '|'])})"
    if kind < 13:
        repeat = rng.choice(["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,3}?", "{2,}"])
        return f"({rng.choice(['', '?:', '?i:'])}{inner}){repeat}"
    if kind == 13:
        return rng.choice(["a", "b", ".", "[ab]", r"\w"]) + rng.choice(["*", "+", "?", "*?", "{2}", "{1,2}"])
    if kind == 14:
        return f"({rng.choice(['?=', '?!'])}{inner})"
    return rng.choice(["^", "$", r"\b", r"\B", "(?<=a)", "(?<!b)", r"(?<=a.)", r"(?<![ab]c)"])


def test_random_expressions_mean_what_re_says() -> None:
    rng, outcomes = random.Random(0), {True: 0, False: 0}
    for _ in range(2000):
        text = random_expression(rng, 4)
        expression, oracle = Expression(text), re.compile(text)
        for name in ("a", "ab", "aab.b1", "abcabc", "A1b.aB", "a.b.c", "aaaaaaaa"):
            wanted = oracle.match(name) is not None
            assert expression.match(name) is wanted, (text, name)
            outcomes[wanted] += 1
    assert min(outcomes.values()) > 2000


@pytest.mark.parametrize("pattern", ENDLESS)
def test_what_re_never_finishes_is_matched(pattern: str) -> None:
    assert not Expression(pattern).match("a" * 60)


@pytest.mark.slow
def test_what_takes_too_long_is_refused_for_the_name() -> None:
    expression = Expression(TOO_LONG)
    with pytest.raises(ValueError, match="takes too long on a name of 60 letters"):
        expression.match("a" * 60)
    assert not expression.match("c")


class Timed:
    """Stands for a compiled expression whose matches take what ``spent`` lists: seconds of this thread, and whether the
    timeout fires."""

    def __init__(self, spent: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.spent = 0.0, spent
        monkeypatch.setattr("ptqpipe.checkpoint.patterns.time.thread_time", lambda: self.clock)

    def match(self, name: str, *, timeout: float) -> None:
        seconds, fires = self.spent.pop(0)
        self.clock += seconds
        if fires:
            raise TimeoutError


def test_many_names_that_each_take_almost_too_long_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    expression = Expression("a")
    expression._pattern = Timed([(0.4, False)] * 3, monkeypatch)
    assert not expression.match("b")
    assert not expression.match("b")
    with pytest.raises(ValueError, match="takes too long on a name of 1 letters"):
        expression.match("b")


def test_time_that_other_threads_and_processes_take_makes_no_expression_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expression = Expression("a")
    expression._pattern = Timed([(1e-6, True)] * 50 + [(1e-6, False)], monkeypatch)
    assert not expression.match("b")
    expression._pattern = Timed([(0.3, True)] * 4, monkeypatch)
    with pytest.raises(ValueError, match="takes too long"):
        expression.match("b")


@pytest.mark.parametrize("pattern", ["(a{10000}){10000}", "((a{0,1000}){0,1000}){0,1000}b", "a{999}" * 200])
def test_what_would_take_too_long_to_compile_is_one_line(pattern: str) -> None:
    with pytest.raises(ValueError, match="more than 100000 repeats"):
        Expression(pattern)


@pytest.mark.parametrize("pattern", ["(", "(" * 5000 + ")" * 5000, "a{99999999999999999999}", "a" * 40_000, "[b-a]"])
def test_what_is_no_expression_is_one_line(pattern: str) -> None:
    with pytest.raises(ValueError) as error:
        Expression(pattern)
    assert "\n" not in str(error.value)
    with pytest.raises(RecipeError, match="is not a regular expression"):
        check_pattern(f"re:{pattern}")


@pytest.mark.slow
def test_a_recipe_with_an_endless_expression_names_its_modules() -> None:
    assert not matches("re:(.*)*(.*)*(.*)*!$", NAME)
    with pytest.raises(RecipeError, match=r"pattern 're:.*' cannot be matched with 'aaa.*: it takes too long"):
        matches(f"re:{TOO_LONG}", "a" * 60)


def test_globs_take_no_longer_with_more_stars() -> None:
    assert not matches("*a" * 200 + "*b", "a" * 2000)


def test_a_config_with_an_endless_expression_is_read() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["re:(.*)*(.*)*(.*)*!$", "re:.*_proj$"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            }
        },
        "ignore": ["re:(.*)*(.*)*(.*)*!$"],
    }
    module = "a" * 60 + "_proj"
    names = {f"{module}.weight": ("F8_E4M3", (4, 8)), f"{module}.weight_scale": ("BF16", (4, 1))}
    container = get_container("compressed_tensors")
    assert list(container.stored_weights({"quantization_config": quantization}, names)) == [f"{module}.weight"]
    quantization["ignore"] = [f"re:{TOO_LONG}"]
    with pytest.raises(CheckpointError, match=r"in config.json cannot be matched with 'aaa.*: it takes too long"):
        container.stored_weights({"quantization_config": quantization}, names)


def test_counts_side_by_side_add_up() -> None:
    name = "model.layers.7.x"
    assert Expression(r"model\.layers\.\d{1,200}\.\w{1,600}").match(name)
    assert Expression("|".join(rf"model\.layers\.{n}\d{{0,2}}\.x" for n in range(40))).match(name)
    assert Expression(r"[{9999}]{2}(a{3}){2}|model").match(name)
