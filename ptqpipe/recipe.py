"""Recipes: a YAML file (or the options of the command line) in, validated frozen dataclasses out.

A recipe decides bytes: which weights are quantized to what, by which search, spelled by which container. It must not
know machines (workers, devices, memory). The first rule that matches a module's name wins; a module that no rule
matches, or that the keep list names, keeps its bytes. Unknown keys are errors.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ptqpipe.errors import PtqError, RecipeError
from ptqpipe.schemes import LOW_RANK_DTYPES, LowRank, Scheme, get_scheme

GLOBAL_SCALE_MODES = ("search", "absmax")
INPUT_SCALES = ("absmax", "percentile", "mse")
KV_CACHES = ("none", "fp8", "fp8_per_head")
ALGORITHMS = ("rtn", "gptq")
WEIGHTINGS = ("none", "diagonal", "block")
ORDERS = ("static", "none")
SCALE_MODES = ("auto", "first", "entry")

# The reason of a pattern that the caller gave beside the recipe: it overrides the recipe's word, exact names included.
IGNORED = "ignored on request"

# Modules that stay as they are unless a rule of the recipe names them: their error is the most expensive (heads,
# embeddings, routers decide discretely), or readers do not look for quantized weights there (towers, MTP heads).
DEFAULT_KEEP: tuple[tuple[str, str], ...] = (
    (r"re:(.*\.)?(lm_head|output_head|embed_out)$", "language-model head"),
    (r"re:.*(embed|\bwte\b|\bwpe\b|shared_head)", "embedding"),
    (r"re:.*norm\d*$", "norm"),
    (r"re:.*(\.|_)(gate|router|shared_expert_gate|e_score_correction)$", "router"),
    (r"re:.*router(\.|$)", "router"),
    (
        r"re:(.*\.)?(visual|vision_tower|vision_model|vision_encoder|image_newline|vision_embed_tokens)(\.|$)",
        "vision tower",
    ),
    (
        r"re:(.*\.)?(audio_tower|audio_model|audio_encoder|speech_encoder|talker|token2wav|code2wav)(\.|$)",
        "audio tower",
    ),
    (
        r"re:(.*\.)?(multi_modal_projector|mm_projector|connector|aligner|merger|projector)(\.|$)",
        "multimodal projector",
    ),
    (r"re:(.*\.)?mtp(\.|_|$)", "multi-token-prediction head"),
    (r"re:.*conv1d$", "short convolution"),
)

# Weights that runtimes fuse into one matrix and therefore give one global scale: leaf names below one parent.
DEFAULT_FUSE: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("wq_a", "wkv_a"),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose name matches ``match`` get ``scheme`` (None: keep), with the search and global-scale mode.

    With calibration statistics:

    algorithm  "rtn" (nearest codes) or "gptq" (error feedback)
    weighting  what the block scales minimize: "none", "diagonal" (E[x^2] by column) or "block" (16x16 moments)
    damping    gptq: share of the mean diagonal that is added to the moment
    order      gptq: columns by their second moment, the largest first ("static"), or as they are ("none")
    scales     gptq: block scales "first", at block "entry", or "auto" (at entry unless they are powers of two)
    refine     gptq: sweeps of coordinate descent over scales and codes afterwards

    low_rank        rank of the product of two thin matrices that makes up for the error of the codes; 0: none
    low_rank_dtype  what these are stored in: "bf16" or "fp8"
    """

    match: str
    scheme: Scheme | None
    search: str = "exact"
    global_scale: str = "search"
    algorithm: str = "rtn"
    weighting: str = "none"
    damping: float = 0.01
    order: str = "static"
    scales: str = "auto"
    refine: int = 3
    low_rank: int = 0
    low_rank_dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_pattern(self.match)
        if self.global_scale not in GLOBAL_SCALE_MODES:
            raise RecipeError(f"global_scale {self.global_scale!r} is unknown; use {' or '.join(GLOBAL_SCALE_MODES)}")
        for name, value, known in (
            ("algorithm", self.algorithm, ALGORITHMS),
            ("weighting", self.weighting, WEIGHTINGS),
            ("order", self.order, ORDERS),
            ("scales", self.scales, SCALE_MODES),
            ("low_rank_dtype", self.low_rank_dtype, LOW_RANK_DTYPES),
        ):
            if value not in known:
                raise RecipeError(f"{name} {value!r} is unknown; use {', '.join(known)}")
        if not 0.0 <= self.damping <= 10.0:
            raise RecipeError(f"damping {self.damping} is out of range; use 0 to 10 (the usual is 0.01)")
        if not 0 <= self.refine <= 1000:
            raise RecipeError(f"refine {self.refine} is out of range; use 0 to 1000 sweeps")
        if not 0 <= self.low_rank <= 4096:
            raise RecipeError(f"low_rank {self.low_rank} is out of range; use 0 to 4096 (the usual is 16 to 64)")

    @property
    def stored_scheme(self) -> Scheme | None:
        """The scheme with the low-rank part: what containers store."""
        if self.scheme is None or not self.low_rank:
            return self.scheme
        return replace(self.scheme, low_rank=LowRank(self.low_rank, self.low_rank_dtype))

    @property
    def calibrated(self) -> bool:
        """Whether quantizing needs statistics of the inputs."""
        return self.scheme is not None and (self.algorithm != "rtn" or self.weighting != "none")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a converted checkpoint.

    rules         the first that matches a module wins
    keep          (pattern, reason): kept whatever the later rules say, unless a rule names the module exactly; the
                  reason ``IGNORED`` yields to no rule
    fuse          leaf names that share one scheme and one global scale below one parent
    container     on-disk layout; None takes the default of the schemes
    input_amax    for static activation scales without calibration: the largest activation that must not clip
    input_scale   for static activation scales with statistics: "absmax", "percentile" (99.99 %) or "mse"
    headroom      what that activation is multiplied by, for those that calibration did not see
    bias_correction  with statistics: biases make up for the mean error of their weights
    kv_cache      scales of an FP8 cache from statistics: "none", "fp8" (one a layer), "fp8_per_head"
    shard_bytes   None: chosen from the total size
    """

    rules: tuple[Rule, ...]
    keep: tuple[tuple[str, str], ...] = DEFAULT_KEEP
    fuse: tuple[tuple[str, ...], ...] = DEFAULT_FUSE
    container: str | None = None
    input_amax: float = 336.0
    input_scale: str = "absmax"
    headroom: float = 1.0
    kv_cache: str = "none"
    bias_correction: bool = False
    shard_bytes: int | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not self.rules:
            raise RecipeError("a recipe needs at least one rule")
        for pattern, _ in self.keep:
            check_pattern(pattern)
        leaves = [leaf for group in self.fuse for leaf in group]
        if len(leaves) != len(set(leaves)):
            twice = next(leaf for leaf in leaves if leaves.count(leaf) > 1)
            raise RecipeError(f"fuse names {twice!r} in two groups; a weight can share one global scale only")
        if not 0.0 < self.input_amax < 1e30:
            raise RecipeError(f"input_amax {self.input_amax} must be a positive number")
        if not 0.1 <= self.headroom <= 1000.0:
            raise RecipeError(f"headroom {self.headroom} is out of range; use 0.1 to 1000 (1: none)")
        for name, value, known in (
            ("input_scale", self.input_scale, INPUT_SCALES),
            ("kv_cache", self.kv_cache, KV_CACHES),
        ):
            if value not in known:
                raise RecipeError(f"{name} {value!r} is unknown; use {', '.join(known)}")

    def rule_for(self, module: str) -> tuple[Rule | None, str]:
        """(the rule that quantizes ``module``, "") or (None, why it is kept)."""
        kept = next((reason for pattern, reason in self.keep if matches(pattern, module)), None)
        if kept == IGNORED:
            return None, kept
        for rule in self.rules:
            if matches(rule.match, module) and (kept is None or rule.match == module):
                return (rule, "") if rule.scheme is not None else (None, f"kept by the recipe ({rule.match})")
        return None, kept or "no rule of the recipe matches"

    def schemes(self) -> tuple[Scheme, ...]:
        """The distinct schemes of the rules, in their order."""
        stored = (rule.stored_scheme for rule in self.rules)
        return tuple(dict.fromkeys(scheme for scheme in stored if scheme is not None))


def check_pattern(pattern: str) -> None:
    """RecipeError for an empty pattern or a regular expression that does not compile."""
    if not pattern:
        raise RecipeError("an empty pattern matches nothing; give a module name, a glob, or re:<regex>")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise RecipeError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def matches(pattern: str, module: str) -> bool:
    """Whether ``pattern`` names ``module``: exactly, as a glob (``*``), or ``re:`` matched from the name's start."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module or ("*" in pattern and fnmatch.fnmatchcase(module, pattern))


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """What the command line may say about bytes; each given option overrides the recipe's word."""

    scheme: str | None = None
    container: str | None = None
    search: str | None = None
    global_scale: str | None = None
    ignore: tuple[str, ...] = ()
    input_amax: float | None = None
    shard_bytes: int | None = None
    algorithm: str | None = None
    weighting: str | None = None
    damping: float | None = None
    refine: int | None = None
    input_scale: str | None = None
    headroom: float | None = None
    kv_cache: str | None = None
    bias_correction: bool | None = None
    low_rank: int | None = None
    low_rank_dtype: str | None = None


def build_recipe(options: RecipeOptions, *, path: Path | None = None) -> Recipe:
    """The recipe of a file with the options applied, or of the options alone (``nvfp4`` when no format is given)."""
    if path is not None and options.scheme is not None:
        raise RecipeError(f"--format {options.scheme} and --recipe {path} contradict each other; give one of them")
    if path is not None:
        recipe = load_recipe(path)
    else:
        recipe = Recipe((Rule("*", get_scheme("nvfp4" if options.scheme is None else options.scheme)),))
    rules = tuple(
        replace(
            rule,
            search=rule.search if options.search is None else options.search,
            global_scale=rule.global_scale if options.global_scale is None else options.global_scale,
            algorithm=rule.algorithm if options.algorithm is None else options.algorithm,
            weighting=_weighting(rule, options),
            damping=rule.damping if options.damping is None else options.damping,
            refine=rule.refine if options.refine is None else options.refine,
            low_rank=rule.low_rank if options.low_rank is None else options.low_rank,
            low_rank_dtype=rule.low_rank_dtype if options.low_rank_dtype is None else options.low_rank_dtype,
        )
        for rule in recipe.rules
    )
    return replace(
        recipe,
        rules=rules,
        keep=tuple((pattern, IGNORED) for pattern in options.ignore) + recipe.keep,
        container=recipe.container if options.container is None else options.container,
        input_amax=options.input_amax if options.input_amax is not None else recipe.input_amax,
        input_scale=recipe.input_scale if options.input_scale is None else options.input_scale,
        headroom=recipe.headroom if options.headroom is None else options.headroom,
        kv_cache=recipe.kv_cache if options.kv_cache is None else options.kv_cache,
        bias_correction=recipe.bias_correction if options.bias_correction is None else options.bias_correction,
        shard_bytes=options.shard_bytes if options.shard_bytes is not None else recipe.shard_bytes,
    )


def _weighting(rule: Rule, options: RecipeOptions) -> str:
    """What the scales minimize: as asked, else gptq goes with the diagonal."""
    if options.weighting is not None:
        return options.weighting
    return "diagonal" if options.algorithm == "gptq" and rule.weighting == "none" else rule.weighting


def load_recipe(path: Path) -> Recipe:
    """Reads and validates a recipe file. RecipeError names the file and the key that is wrong."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise RecipeError(f"recipe {path} is not YAML{line}; see recipes/ for examples") from None
    try:
        return parse_recipe(raw)
    except PtqError as error:
        raise RecipeError(f"recipe {path}: {error}") from None


def parse_recipe(raw: Any) -> Recipe:
    """A recipe from parsed YAML; RecipeError for unknown keys, wrong types and contradictions."""
    known = {"version", "description", "rules", "keep", "fuse", "container", "shard_bytes"}
    top = _mapping(raw, "the recipe", known | {"input_amax", "input_scale", "headroom", "kv_cache", "bias_correction"})
    if top.get("version") != 1:
        raise RecipeError(f"version is {top.get('version')!r}, expected 1")
    rules = tuple(_rule(item, index) for index, item in enumerate(_list(top.get("rules"), "rules")))
    recipe = Recipe(
        rules,
        container=_optional(top, "container", str),
        shard_bytes=_optional(top, "shard_bytes", int),
        description=_optional(top, "description", str) or "",
    )
    if "keep" in top:
        extra = tuple((_text(item, "keep"), "kept by the recipe") for item in _list(top["keep"], "keep"))
        recipe = replace(recipe, keep=extra + DEFAULT_KEEP)
    if "fuse" in top:
        groups = tuple(tuple(_text(leaf, "fuse") for leaf in _list(g, "fuse")) for g in _list(top["fuse"], "fuse"))
        recipe = replace(recipe, fuse=groups)
    if "input_amax" in top:
        recipe = replace(recipe, input_amax=_number(top["input_amax"], "input_amax"))
    if "headroom" in top:
        recipe = replace(recipe, headroom=_number(top["headroom"], "headroom"))
    chosen: dict[str, Any] = {key: _text(top[key], key) for key in ("input_scale", "kv_cache") if key in top}
    recipe = replace(recipe, **chosen, bias_correction=_optional_flag(top, "bias_correction"))
    return recipe


def _rule(item: Any, index: int) -> Rule:
    where = f"rules[{index}]"
    texts = ("search", "global_scale", "algorithm", "weighting", "order", "scales", "low_rank_dtype")
    wholes = ("refine", "low_rank")
    raw = _mapping(item, where, {"match", "format", *texts, *wholes, "damping"})
    if "match" not in raw or "format" not in raw:
        raise RecipeError(f"{where} needs both match and format")
    name = _text(raw["format"], f"{where}.format")
    scheme = None if name.lower() == "keep" else get_scheme(name)
    rule = Rule(_text(raw["match"], f"{where}.match"), scheme)
    given: dict[str, Any] = {"weighting": "diagonal"} if raw.get("algorithm") == "gptq" else {}
    given |= {key: _text(raw[key], f"{where}.{key}") for key in texts if key in raw}
    given |= {key: _whole(raw[key], f"{where}.{key}") for key in wholes if key in raw}
    if "damping" in raw:
        given["damping"] = _number(raw["damping"], f"{where}.damping")
    return replace(rule, **given)


def _mapping(raw: Any, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{where} must be a mapping of keys, got {type(raw).__name__}")
    unknown = [str(key) for key in raw if key not in known]
    if unknown:
        raise RecipeError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return raw


def _list(raw: Any, where: str) -> Sequence[Any]:
    if not isinstance(raw, list) or not raw:
        raise RecipeError(f"{where} must be a non-empty list, got {raw!r}")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise RecipeError(f"{where} must be text, got {raw!r}")
    return raw


def _number(raw: Any, where: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise RecipeError(f"{where} must be a number, got {raw!r}")
    return float(raw)


def _whole(raw: Any, where: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise RecipeError(f"{where} must be a whole number, got {raw!r}")
    return raw


def _optional_flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise RecipeError(f"{key} must be true or false, got {value!r}")
    return value


def _optional(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    value = raw.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RecipeError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value
