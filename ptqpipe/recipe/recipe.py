"""What a recipe is: rules, the modules that stay as they are, the weights that share a scale; and its JSON.

A recipe decides bytes, and must not know where it came from (file.py). The first rule that matches a
module's name wins; a module that no rule matches, or that the keep list names, keeps its bytes. The record of a
conversion holds the recipe as JSON, from which `ptqpipe verify` makes it again.
"""

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ptqpipe.checkpoint.patterns import alike, expression
from ptqpipe.errors import PtqError, RecipeError, UsageError, one_line
from ptqpipe.models.families import DEFAULT_FUSE, DEFAULT_KEEP, Keep, ReaderIssue, fuse_of, issues_of
from ptqpipe.numerics.schemes import MIXED, ROTATION_BLOCKS, Activation, Scheme, get_scheme
from ptqpipe.recipe.options import INPUT_AMAX, CheckpointOptions, CodeOptions, check_options

# The reason of a pattern that the caller gave beside the recipe: it overrides the recipe's word, exact names included.
IGNORED = "ignored on request"
# The reason of a pattern in the recipe's own keep list.
BY_RECIPE = "kept by the recipe"

# What earlier versions wrote into a rule without a low-rank part. It stays in the digest, so that their runs resume and
# their records are still those of their runs.
_NO_LOW_RANK = {"low_rank": 0, "low_rank_dtype": "bf16"}

# Names of options in the JSON of records, and in recipe files of earlier versions, that are not those of the fields.
FORMER_NAMES = {
    "search": "scale_search",
    "weighting": "objective",
    "refine": "refine_passes",
    "shard_bytes": "shard_size",
}
_IN_JSON = {name: former for former, name in FORMER_NAMES.items()}

Named = frozenset[tuple[str, str]]
"""Pairs of a rule's pattern and the pattern of a default keep rule that it wins over; see `Recipe.named`."""


@dataclass(frozen=True, slots=True)
class Rule(CodeOptions):
    """How the modules whose name matches ``match`` are quantized: to ``scheme`` (None: kept), by these options."""

    match: str
    scheme: Scheme | None

    def __post_init__(self) -> None:
        check_pattern(self.match)
        check_options(self)

    @property
    def calibrated(self) -> bool:
        return self.scheme is not None and bool(self.moments)

    def to_json(self) -> dict[str, Any]:
        """The fields, the scheme by its name ("keep" for none)."""
        scheme = "keep" if self.scheme is None else self.scheme.name
        return {"match": self.match, "scheme": scheme, **_values(self, CodeOptions)}

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> "Rule":
        """The inverse of `to_json`. TypeError or LookupError for a field that no rule has, or that every rule needs."""
        name, described = described["scheme"], _by_field(described)
        return Rule(**{**described, "scheme": None if name == "keep" else get_scheme(name)})


@dataclass(frozen=True, slots=True)
class Recipe(CheckpointOptions):
    """Everything that decides the bytes of a converted checkpoint: the options of the whole, and rules for its parts.

    rules         the first that matches a module wins
    keep          kept whatever the rules say, unless a rule names the module exactly, or matches nothing in the model
                  but what such a pattern keeps (`named`); the reason ``IGNORED`` yields to no rule
    fuse          leaf names that share one scheme and one global scale below one parent
    description   text for people, which decides nothing
    """

    rules: tuple[Rule, ...]
    keep: tuple[Keep, ...] = DEFAULT_KEEP
    fuse: tuple[tuple[str, ...], ...] = DEFAULT_FUSE
    description: str = ""

    def __post_init__(self) -> None:
        if not self.rules:
            raise RecipeError("a recipe needs at least one rule")
        for keep in self.keep:
            check_pattern(keep.pattern)
        leaves = [leaf for group in self.fuse for leaf in group]
        if len(leaves) != len(set(leaves)):
            twice = next(leaf for leaf in leaves if leaves.count(leaf) > 1)
            raise RecipeError(f"fuse names {twice!r} in two groups; a weight can share one global scale only")
        if self.input_amax is not None and not 0.0 < self.input_amax < 1e30:
            raise RecipeError(f"input_amax {self.input_amax} is out of range; use a number above 0 and below 1e30")
        check_options(self)

    @property
    def rotations(self) -> dict[str, int]:
        """Role -> columns that are rotated together, as `rotate` says. RecipeError where it is no such list."""
        blocks: dict[str, int] = {}
        for item in (self.rotate or "").split(",") if self.rotate is not None else ():
            role, colon, block = item.strip().rpartition(":")
            if not colon or not role or "." in role or role in blocks or block not in map(str, ROTATION_BLOCKS):
                raise RecipeError(
                    f"rotate {_shown(self.rotate or '')} is no list of ROLE:BLOCK, each role once; write down_proj:64, "
                    f"with a block of {', '.join(map(str, ROTATION_BLOCKS))}"
                )
            blocks[role] = int(block)
        return blocks

    def largest_input(self, activation: Activation) -> float:
        """The activation that must not clip where no statistics say what one layer has; ``activation`` is static."""
        return INPUT_AMAX[activation] if self.input_amax is None else self.input_amax

    def for_model(self, config: Mapping[str, Any]) -> "Recipe":
        """The recipe with what is known of the family of this config.json: what it keeps, layers by number, and what
        its readers make one matrix of, unless the recipe has its own table of that; with ``mtp``, a rule in front for
        the multi-token prediction layers, which wins over what keeps them as a whole (`named`)."""
        issues = [issue for issue in issues_of(config) if issue.by_default]
        defaults = (issue.keep for issue in issues)
        fuse = fuse_of(config) if self.fuse == DEFAULT_FUSE else self.fuse
        rules = self._mtp_rules([issue.keep.pattern for issue in issues if issue.mtp])
        return replace(
            self,
            rules=(*(rule for rule in rules if rule not in self.rules), *self.rules),
            keep=(*(keep for keep in defaults if keep not in self.keep), *self.keep),
            fuse=fuse,
        )

    def _mtp_rules(self, patterns: Sequence[str]) -> list[Rule]:
        """Rules for these modules in the format that ``mtp`` means: the recipe's own of that name, else the one that
        most readers run; none where it is to keep them."""
        if self.mtp == "keep":
            return []
        usual = {"fp8": "fp8_block" if self.container == "deepseek_fp8" else "fp8_dynamic"}
        own = (rule.scheme for rule in self.rules if rule.scheme is not None)
        scheme = next((x for x in own if x.name.startswith(self.mtp)), None)
        scheme = scheme or get_scheme(usual.get(self.mtp, self.mtp))
        return [replace(self.rules[0], match=pattern, scheme=scheme) for pattern in patterns]

    def named(self, modules: Iterable[str]) -> Named:
        """(rule's pattern, keep's pattern) where the rule overrides a default keep: it matches some but not all of the
        model's ``modules``, and only modules that this keep covers. Other defaults still hold: if a rule names a vision
        tower, its embeddings stay unquantized."""
        every = list(modules)
        if all(rule.match == "*" for rule in self.rules):
            return frozenset()
        pairs = set()
        for rule in self.rules:
            meant = [] if rule.scheme is None else [module for module in every if matches(rule.match, module)]
            for keep in self.keep if 0 < len(meant) < len(every) else ():
                default = keep.reason not in (IGNORED, BY_RECIPE)
                if default and all(matches(keep.pattern, module) for module in meant):
                    pairs.add((rule.match, keep.pattern))
        return frozenset(pairs)

    def rule_for(self, module: str, named: Named = frozenset()) -> tuple[Rule | None, str]:
        """(the rule that quantizes ``module``, "") or (None, why it is kept). ``named``: as `named` says of a model."""
        keeps = [keep for keep in self.keep if matches(keep.pattern, module)]
        if any(keep.reason == IGNORED for keep in keeps):
            return None, IGNORED
        against = [keep for keep in keeps if not keep.bits]
        for rule in self.rules:
            if not matches(rule.match, module):
                continue
            against += [keep for keep in keeps if _bits(rule) < keep.bits]
            if rule.match == module or all((rule.match, keep.pattern) in named for keep in against):
                if rule.scheme is None:
                    return None, f"kept by the recipe ({rule.match})"
                block = self.rotations.get(module.rpartition(".")[2], 0)
                return replace(rule, scheme=replace(rule.scheme, rotation=block)) if block else rule, ""
        return None, against[0].reason if against else "no rule of the recipe matches"

    def kind_of(self) -> Callable[[str], str]:
        """A function that gives the modules for which `rule_for` says the same one name, of which it says that."""
        roles = (rf"re:(.*\.)?{re.escape(role)}$" for role in self.rotations)
        return alike([*(rule.match for rule in self.rules), *(keep.pattern for keep in self.keep), *roles])

    def schemes(self) -> tuple[Scheme, ...]:
        """The distinct schemes of the rules, in their order."""
        stored = [rule.scheme for rule in (*self.rules, *self._mtp_rules(["mtp"]))]
        return tuple(dict.fromkeys(scheme for scheme in stored if scheme is not None))

    @property
    def container_name(self) -> str:
        """The container, or the one that the schemes default to; UsageError where they differ."""
        if self.container is not None:
            return self.container.lower().replace("-", "_")
        names = {scheme.container for scheme in self.schemes()}
        if not names:
            raise UsageError("every rule of the recipe keeps; give at least one rule with a format")
        if len(names) == 1:
            return names.pop()
        together = {MIXED.get(name, name) for name in names}
        if len(together) == 1:
            return together.pop()
        raise UsageError(f"the recipe's formats default to different containers ({', '.join(sorted(names))}); name one")

    def to_json(self) -> dict[str, Any]:
        """The fields, with the container that was chosen: everything in it decides bytes."""
        described = {
            "rules": [rule.to_json() for rule in self.rules],
            "keep": [keep if keep.bits else keep[:2] for keep in self.keep],
            "fuse": self.fuse,
            **_values(self, CheckpointOptions),
            "container": self.container_name,
            "description": self.description,
        }
        if self.rotate is None:  # as versions wrote it that did not know the field
            del described["rotate"]
        return json.loads(json.dumps(described))  # type: ignore[no-any-return]  # tuples become lists

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> "Recipe":
        """The inverse of `to_json`. RecipeError unless the recipe describes itself the same again."""
        described = {"mtp": "keep", **described}  # which earlier versions did not say
        try:
            described["rules"] = [_without_low_rank(rule) for rule in described["rules"]]
            content = {"rotate": None, **_by_field(described)}
            values = {field.name: content[field.name] for field in fields(Recipe)}
            values["rules"] = tuple(Rule.from_json(rule) for rule in values["rules"])
            values["keep"] = tuple(Keep(str(keep[0]), str(keep[1]), *map(int, keep[2:])) for keep in values["keep"])
            values["fuse"] = tuple(tuple(map(str, leaves)) for leaves in values["fuse"])
            recipe = Recipe(**values)
            again = recipe.to_json()
        except (PtqError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RecipeError(f"the recipe cannot be read: {type(error).__name__} {error}") from None
        if again != described:
            keys = sorted(again.keys() | described.keys())
            key = next((key for key in keys if again.get(key) != described.get(key)), "?")
            raise RecipeError(
                f"the recipe's {key} is not one that this version writes: a newer one wrote it, or it was changed"
            )
        return recipe

    @property
    def digest(self) -> str:
        """sha256 of the JSON with its keys in order: the identity of a recipe in a run."""
        described = self.to_json()
        described["rules"] = [{**rule, **_NO_LOW_RANK} for rule in described["rules"]]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def check_pattern(pattern: str) -> None:
    """RecipeError for an empty pattern or a regular expression that does not compile."""
    if not pattern:
        raise RecipeError("an empty pattern matches nothing; give a module name, a glob, or re:<regex>")
    if pattern.startswith("re:"):
        try:
            expression(pattern[3:])
        except ValueError as error:
            raise RecipeError(f"pattern {_shown(pattern)} is not a regular expression: {error}") from None


def matches(pattern: str, module: str) -> bool:
    """Whether ``pattern`` names ``module``: exactly, as a glob (``*``), or ``re:`` matched from the name's start.

    RecipeError for an expression that takes too long to match.
    """
    if pattern.startswith("re:"):
        try:
            return expression(pattern[3:]).match(module)
        except ValueError as error:
            raise RecipeError(f"pattern {_shown(pattern)} cannot be matched with {_shown(module)}: {error}") from None
    return pattern == module or ("*" in pattern and fnmatch.fnmatchcase(module, pattern))


def reader_issues(
    config: Mapping[str, Any], quantized: Mapping[str, Scheme], *, container: str, kept: Iterable[str] = ()
) -> Iterator[tuple[ReaderIssue, list[str]]]:
    """The issues about this model that modules run into, each with these modules, in their order.

    quantized  module -> what it is quantized to
    container  the layout, one that other programs read
    kept       modules whose matrices are not quantized
    """
    issues = list(issues_of(config))
    kind = alike([pattern for issue in issues for pattern in (issue.keep.pattern, issue.unless_quantized) if pattern])
    kinds: dict[str, list[str]] = {}
    for name in quantized:
        kinds.setdefault(kind(name), []).append(name)
    for issue in issues:
        if not issue.symptom or (issue.containers and container not in issue.containers):
            continue
        keep, pattern = issue.keep, issue.unless_quantized or issue.keep.pattern
        meant = {name for like, names in kinds.items() if matches(pattern, like) for name in names}
        wrong = [
            name
            for name, scheme in (quantized.items() if meant else ())
            if name in meant
            and scheme.fmt.element.bits < (keep.bits or 99)
            and (not issue.formats or scheme.name in issue.formats)
        ]
        if wrong and issue.unless_quantized:
            wrong = [name for name in kept if matches(keep.pattern, name)]
        if wrong:
            yield issue, wrong


def _without_low_rank(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as an earlier version wrote it, as this one does. RecipeError for one with a low-rank part."""
    if rule.get("low_rank"):
        raise RecipeError(
            f"low_rank is {rule['low_rank']!r:.40}, and this ptqpipe has no low-rank parts; convert again"
        )
    return {key: value for key, value in rule.items() if (key, value) not in _NO_LOW_RANK.items()}


def _bits(rule: Rule) -> float:
    """Bits of a weight's code under a rule; infinite where it keeps."""
    return float("inf") if rule.scheme is None else rule.scheme.fmt.element.bits


def _shown(text: str) -> str:
    return one_line(repr(text), limit=200)


def _values(options: Any, kind: type[CodeOptions] | type[CheckpointOptions]) -> dict[str, Any]:
    return {_IN_JSON.get(field.name, field.name): getattr(options, field.name) for field in fields(kind)}


def _by_field(described: Mapping[str, Any]) -> dict[str, Any]:
    return {FORMER_NAMES.get(key, key): value for key, value in described.items() if key not in _IN_JSON}
