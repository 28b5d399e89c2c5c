"""Recipes from YAML files and from the options of a call. Unknown keys are errors.

The recipes that have a name are the files of ``recipes/`` at the top of the repository, which a wheel holds as
``ptqpipe/recipes``: `named_recipes` is the one place that knows where they are.

A file says a field of `Rule` or `Recipe` by its name, with the field's type: a new field is readable without a word
here. Only what a file writes otherwise has its own lines: the version, ``format``, the keep list and the fuse table.

Each option of a call that was given overrides the recipe (`build_recipe`).
"""

import json
import os.path
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ptqpipe.checkpoint.regular_file import MAX_RECIPE_BYTES, read_regular_text
from ptqpipe.errors import PtqError, RecipeError, UsageError, arg, did_you_mean, one_line, read_failure
from ptqpipe.models.families import DEFAULT_KEEP, Keep
from ptqpipe.numerics.schemes import SCHEMES, get_scheme
from ptqpipe.recipe.options import ALGORITHMS, AUTO, RecipeOptions
from ptqpipe.recipe.recipe import BY_RECIPE, FORMER_NAMES, IGNORED, Recipe, Rule

_PACKAGE = Path(__file__).parents[1]
GROUPS = {"models": "For a series of models", "methods": "For any model"}
"""Folder in recipes/ -> its title in lists."""

_MOST_MERGED, _MOST_KEYS = 16, 1000  # mappings that one merges, and keys that it then has

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200


class _MergesTooMuch(yaml.MarkedYAMLError):
    """A mapping that merges so many keys that a short file would take minutes."""


class _Loader(yaml.SafeLoader):
    """YAML forbids a key twice in one mapping; PyYAML would take the last one and drop the others silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, each key once; those that ``<<`` merges are overridden as YAML says."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise RecipeError(f"{_shown(key.value)} (line {line})")
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Bounded: by ``<<`` a few lines merge to millions of keys."""
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        if any(isinstance(value, yaml.SequenceNode) and len(value.value) > _MOST_MERGED for value in merged):
            raise _MergesTooMuch(problem_mark=node.start_mark)
        super().flatten_mapping(node)
        if merged and len(node.value) > _MOST_KEYS:
            raise _MergesTooMuch(problem_mark=node.start_mark)


def _shown(value: object) -> str:
    """Any value in a few words: aliases let a short file describe a list of billions."""
    return _SHORT.repr(value)


def named_recipes(package: Path = _PACKAGE) -> dict[str, Path]:
    """The recipes that come with ptqpipe, name -> file, group by group.

    RecipeError for an installation without them. ``package``: the folder of ptqpipe's own modules.
    """
    places = [package / "recipes"]
    if (package.parent / "pyproject.toml").is_file():  # a checkout; beside an installed package lie other packages
        places.append(package.parent / "recipes")
    recipes = {
        path.stem: path for place in places for group in GROUPS for path in sorted(place.glob(f"{group}/*.yaml"))
    }
    if not recipes:
        raise RecipeError(f"{places[-1]} has no recipes; install ptqpipe again, or name a YAML file")
    return recipes


def named_recipe(name: str) -> Path:
    """The file of a recipe that comes with ptqpipe; ``-``, ``.`` and ``_`` are alike. UsageError with near names."""
    recipes = named_recipes()
    file = recipes.get(_key(name))
    if file is None:
        raise UsageError(f"unknown recipe {name!r}; {_near(name)}")
    return file


def _key(name: str) -> str:
    return re.sub(r"[-.]", "_", name.lower())


def _near(name: str) -> str:
    near = get_close_matches(_key(Path(name).stem if name.endswith(".yaml") else name), named_recipes())
    if not near:
        return "name a YAML file, or a recipe that `ptqpipe recipes` lists"
    return f"did you mean {' or '.join(near)}? `ptqpipe recipes` lists all"


def _file_of(path: Path) -> Path:
    """The file that ``path`` means: a bare name is that of a recipe that comes with ptqpipe, or of a file here.

    RecipeError where it is both.
    """
    if len(path.parts) != 1 or path.suffix == ".yaml":
        return path
    here = os.path.exists(path)  # False for a name that no file can have
    try:
        named = named_recipes().get(_key(path.name))
    except RecipeError:
        if here:
            return path
        raise
    if here and named is not None:
        kind = "folder" if path.is_dir() else "file"
        raise RecipeError(
            f"{path} is a recipe of ptqpipe and a {kind} in the working directory; give ./{path} for the {kind}, "
            f"{named} for the recipe"
        )
    return named or path


def load_recipe(path: Path) -> Recipe:
    """Reads and validates a recipe: a file, or one that comes with ptqpipe by its name.

    RecipeError names the file and the key that is wrong, or the nearest names.
    """
    file = _file_of(path)
    try:
        raw = yaml.load(read_regular_text(file, limit=MAX_RECIPE_BYTES), Loader=_Loader)
    except FileNotFoundError:
        remedy = f"{path} is a format: give {arg('format', path)}" if _key(str(path)) in SCHEMES else _near(path.name)
        raise RecipeError(f"recipe {path} does not exist; {remedy}") from None
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {read_failure(error)}") from None
    except RecipeError as error:  # of `_Loader`
        raise RecipeError(f"recipe {path} has the key {error} twice; give it once") from None
    except _MergesTooMuch as error:
        number = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        most = f"{_MOST_MERGED} mappings or {_MOST_KEYS} keys"
        raise RecipeError(f"recipe {path} merges more than {most} by << at line {number}; write them out") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except RecursionError:
        raise RecipeError(f"recipe {path} nests too deep; `ptqpipe recipes NAME` prints an example") from None
    except yaml.YAMLError as error:
        where, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        line += f": {one_line(problem, limit=100)}" if problem else ""
        raise RecipeError(f"recipe {path} is not YAML{line}; `ptqpipe recipes NAME` prints an example") from None
    try:
        return parse_recipe(raw)
    except PtqError as error:
        raise RecipeError(f"recipe {path}: {error}") from None


def parse_recipe(raw: Any) -> Recipe:
    """A recipe from parsed YAML; RecipeError for unknown keys, wrong types and contradictions."""
    own, plain = ("rules", "keep", "fuse", "description"), get_type_hints(Recipe)
    top = _mapping(raw, "the recipe", {"version", *plain})
    if "version" not in top:
        raise RecipeError("the recipe has no version; write version: 1")
    if top["version"] != 1 or top["version"] is True:
        raise RecipeError(f"version is {_shown(top['version'])}, expected 1")
    rules = tuple(_rule(item, index) for index, item in enumerate(_list(top.get("rules"), "rules")))
    values = {key: _value(top[key], key, kind) for key, kind in plain.items() if key in top and key not in own}
    values["description"] = _optional(top.get("description"), "description", str) or ""
    if "keep" in top:
        extra = tuple(Keep(_text(item, "keep"), BY_RECIPE) for item in _list(top["keep"], "keep"))
        values["keep"] = extra + DEFAULT_KEEP
    if "fuse" in top:
        groups = (_list(group, "fuse") for group in _list(top["fuse"], "fuse"))
        values["fuse"] = tuple(tuple(_text(leaf, "fuse") for leaf in group) for group in groups)
    return Recipe(rules, **values)


def _rule(item: Any, index: int) -> Rule:
    where = f"rules[{index}]"
    plain = {name: kind for name, kind in get_type_hints(Rule).items() if name not in ("match", "scheme")}
    if isinstance(item, Mapping) and "low_rank" in item:  # of recipes that earlier versions had
        raise RecipeError(
            f"{where}.low_rank: this ptqpipe has no low-rank parts; leave low_rank and low_rank_dtype out"
        )
    raw = _mapping(item, where, {"match", "format", *plain})
    if "match" not in raw or "format" not in raw:
        raise RecipeError(f"{where} needs both match and format")
    name = _text(raw["format"], f"{where}.format")
    scheme = None if name.lower() == "keep" else get_scheme(name)
    algorithm = ALGORITHMS.get(str(raw.get("algorithm")))
    values: dict[str, Any] = {} if algorithm is None else {"objective": algorithm.objective}
    values |= {key: _value(raw[key], f"{where}.{key}", kind) for key, kind in plain.items() if key in raw}
    return Rule(_text(raw["match"], f"{where}.match"), scheme, **values)


def _value(raw: Any, where: str, kind: Any) -> Any:
    return _READERS[kind](raw, where)


def _mapping(raw: Any, where: str, allowed: set[str]) -> Mapping[str, Any]:
    if raw is None:
        raise RecipeError(f"{where} is empty; `ptqpipe recipes NAME` prints an example")
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{where} must be a mapping of keys, got {type(raw).__name__}")
    unknown = [str(key) for key in raw if key not in allowed]
    if unknown:
        renamed = FORMER_NAMES.get(unknown[0])
        remedy = f"it is called {renamed} now" if renamed else did_you_mean(unknown[0], sorted(allowed), listed=True)
        raise RecipeError(f"{where} has the unknown key {unknown[0]!r}; {remedy}")
    return raw


def _list(raw: Any, where: str) -> Sequence[Any]:
    if not isinstance(raw, list) or not raw:
        raise RecipeError(f"{where} must be a non-empty list, got {_shown(raw)}")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise RecipeError(f"{where} must be text that is not empty, got {_shown(raw)}")
    return raw


def _number(raw: Any, where: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise RecipeError(f"{where} must be a number, got {_shown(raw)}")
    try:
        return float(raw)
    except OverflowError:
        raise RecipeError(f"{where} is a number of {len(str(abs(raw)))} digits, expected one below 1e308") from None


def _whole(raw: Any, where: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise RecipeError(f"{where} must be a whole number, got {_shown(raw)}")
    return raw


def _flag(raw: Any, where: str) -> bool:
    if not isinstance(raw, bool):
        raise RecipeError(f"{where} must be true or false, got {_shown(raw)}")
    return raw


def _optional(raw: Any, where: str, kind: type) -> Any:
    if raw is not None and (not isinstance(raw, kind) or isinstance(raw, bool)):
        raise RecipeError(f"{where} must be of type {kind.__name__}, got {_shown(raw)}")
    return raw


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    str | None: lambda raw, where: _optional(raw, where, str),
    int | None: lambda raw, where: _optional(raw, where, int),
    float | None: lambda raw, where: None if raw is None else _number(raw, where),
}


def build_recipe(options: RecipeOptions, *, path: Path | None = None, codes: Recipe | None = None) -> Recipe:
    """The recipe of a file with the options applied, or of the options alone (``nvfp4`` when no format is given).

    codes  the recipe of learned codes that are to be written, used where no file is given; the caller has checked that
           ``options`` name no other format
    """
    if path is not None and options.format is not None:
        raise RecipeError(
            f"{arg('format', options.format)} and {arg('recipe', path)} contradict each other; give one of them"
        )
    if path is not None:
        recipe = load_recipe(path)
    elif codes is not None:
        recipe = codes
    else:
        recipe = Recipe((Rule("*", get_scheme("nvfp4" if options.format is None else options.format)),))
    return replace(
        recipe,
        rules=tuple(_with_options(rule, options) for rule in recipe.rules),
        keep=tuple(Keep(pattern, IGNORED) for pattern in options.ignore) + recipe.keep,
        **_overrides(options, Recipe),
    )


def _with_options(rule: Rule, options: RecipeOptions) -> Rule:
    """The rule with the options applied; an algorithm brings its usual weighting unless rule or call give one."""
    values = _overrides(options, Rule)
    if "algorithm" in options.stated and options.algorithm in ALGORITHMS and rule.objective == AUTO:
        values.setdefault("objective", ALGORITHMS[options.algorithm].objective)
    return replace(rule, **values)


def _overrides(options: RecipeOptions, kind: type[Rule] | type[Recipe]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in options.overrides.items() if name in names}


# Writes recipes from programs: expressions that match a set of modules exactly, and the YAML text.


_NUMBER = re.compile(r"\d+")
_Template = tuple[str | None, ...]
"""The pieces of a module's name as expressions; None stands for the number of the layer."""


def exact_patterns(modules: Sequence[str]) -> list[str]:
    """Anchored ``re:`` patterns that match exactly these modules (and every expert beside a listed one)."""
    layers: dict[_Template, dict[str, None]] = defaultdict(dict)
    for module in modules:
        template, layer = _template(module)
        layers[template][layer] = None
    leaves: dict[tuple[_Template, tuple[str, ...]], list[str]] = defaultdict(list)
    for (*head, leaf), numbers in layers.items():
        leaves[(tuple(head), tuple(numbers))].append(str(leaf))
    patterns = []
    for (parents, of_layers), of_parent in leaves.items():
        pieces = [_alternatives(of_layers) if piece is None else piece for piece in parents]
        patterns.append("re:" + r"\.".join([*pieces, _alternatives(of_parent)]) + "$")
    return patterns


def _template(module: str) -> tuple[_Template, str]:
    """A module's name with any expert, and the number of its layer, "" for none: the first number inside the name."""
    names = module.split(".")
    pieces: list[str | None] = []
    layer = ""
    for place, name in enumerate(names):
        inside = _NUMBER.fullmatch(name) is not None and 0 < place < len(names) - 1
        if inside and names[place - 1] == "experts":
            pieces.append(r"\d+")
        elif inside and not layer:
            layer = name
            pieces.append(None)
        else:
            pieces.append(re.escape(name))
    return tuple(pieces), layer


def _alternatives(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"(?:{'|'.join(expressions)})"


def recipe_text(content: Mapping[str, Any]) -> str:
    """A recipe as YAML, in the style of the recipes that have a name. JSON's strings are YAML's double-quoted ones."""
    lines = [f"version: {content['version']}", f"description: {_quoted(content['description'])}"]
    lines += [f"container: {content['container']}"] if "container" in content else []
    lines.append("rules:")
    for rule in content["rules"]:
        more = [f"    {key}: {value}" for key, value in rule.items() if key != "match"]
        lines += [f"  - match: {_quoted(rule['match'])}", *more]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
