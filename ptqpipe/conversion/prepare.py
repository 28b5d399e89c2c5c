"""Decides a conversion from headers: the fate of every tensor, every byte's place, statistics and codes checked.

Learned codes are good for one plan: the same weights in the same formats and fused groups, and inputs quantized at the
same static scales. rounding.json holds the recipe that says all of it; whoever gives codes alone gets that recipe.
Reads no weight and writes nothing. Must not know how units are quantized.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import check_disjoint, name_of, resolve_source
from ptqpipe.checkpoint.adapter import ADAPTER_CONFIG
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.conversion import (
    InputScales,
    Outputs,
    WriteCacheScales,
    check_cached,
    check_model,
    check_read_back,
    container_of,
    open_statistics,
    outputs_of,
)
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.errors import CheckpointError, RecipeError, UsageError
from ptqpipe.models.families import doubts, is_known, issues_of
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.learned_codes import CODES_FILE, TRAINED_REASON, LearnedCodes
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import ALGORITHMS, AUTO, CodeOptions, RecipeOptions
from ptqpipe.recipe.plan import Plan, check_ignored, make_plan
from ptqpipe.recipe.recipe import Recipe, matches
from ptqpipe.run.machine import without_collections
from ptqpipe.runtime.expected import unlike_model

_AGAIN = "leave out what differs, or tune again with the same --format, --recipe, --container and --ignore"


def best_with(
    options: RecipeOptions, *, stats: Path | None, recipe_path: Path | None, codes: Path | None = None
) -> RecipeOptions:
    """The options with the best that statistics allow, where neither they nor a recipe, a file's or that of learned
    codes, say it: GPTQ where the full moments are there, else nearest codes at weighted scales."""
    if stats is None or recipe_path is not None or codes is not None:
        return options
    if options.algorithm is None and options.weighting is None:
        with Statistics.open(stats) as statistics:
            usable = [name for name, row in ALGORITHMS.items() if not row.moment or statistics.has_any(row.moment)]
        options = options.but(algorithm=usable[-1])
    if (
        options.algorithm == "rtn"
        and options.weighting is None
        and options.search in (None, AUTO, "exact", "brute_force")
    ):
        options = options.but(weighting="diagonal")
    return options


def with_searches(recipe: Recipe, *, data: bool) -> Recipe:
    """The recipe, its searches checked. ``data``: its codes are found with data that the rules do not speak of, which
    start from the exact scales unless a rule names others.

    UsageError for a search that is unknown, or that a rule has no use for.
    """
    rules = []
    for rule in recipe.rules:
        checked = replace(rule, search="exact") if data and rule.search == AUTO else rule
        get_search("exact" if checked.search == AUTO else checked.search)
        scheme = checked.scheme
        if checked.search == "enlarged" and scheme is not None and (checked.calibrated or data or scheme.fmt.one_scale):
            why = (
                f"{scheme.fmt.name} has one scale for all" if scheme.fmt.one_scale else "the data say what errors cost"
            )
            raise UsageError(f"--search enlarged is for nearest codes without data, and {why}; leave it out")
        rules.append(checked)
    return replace(recipe, rules=tuple(rules))


def check_used(options: RecipeOptions, recipe: Recipe, *, statistics: bool) -> None:
    """UsageError for an option that is given and would change no byte, since nothing of the recipe asks for it."""
    read = {name for rule in recipe.rules if rule.scheme is not None for name in ALGORITHMS[rule.algorithm].options}
    own = {name: key for key, row in ALGORITHMS.items() for name in row.options}
    static = any(scheme.needs_input_global_scale for scheme in recipe.schemes())
    kinds = "a format with static activation scales, such as nvfp4_w4a4"
    for option, given, used, needs in (
        *((f"--{n}", options.given.get(n), n in read, f"algorithm {own[n]}; give --stats") for n in own),
        ("--input-scale", options.input_scale, static and statistics, f"--stats and {kinds}"),
        ("--headroom", options.headroom, static and statistics, f"--stats and {kinds}"),
        ("--input-amax", options.input_amax, static and not statistics, f"{kinds}, without --stats"),
    ):
        if given is not None and not used:
            raise UsageError(f"{option} {given} would change nothing: it needs {needs}; otherwise leave it out")


@without_collections()
def prepare(
    model: str | Path,
    *,
    options: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    out: Path | None = None,
    stats: Path | None = None,
    codes: Path | None = None,
    collected: bool = False,
    reader: str | None = None,
    requantize: bool = False,
    dry: bool = False,
) -> Conversion:
    """Everything that can be decided from headers. Raises before any weight is read; writes nothing.

    stats      a folder of `ptqpipe calibrate`
    codes      a folder of `ptqpipe tune`: its codes are written as they are, by the recipe that they were learned for
               unless a recipe file is given; what contradicts it is a UsageError
    reader     the program that will load the result (``--for``): a weight that it gets wrong is a UsageError
    requantize quantize weights again that are stored below 8 bits even where that only adds error
    collected  for what finds the moments that choosing codes reads as it goes, or later: `ptqpipe tune`, `pipeline`
    dry        nothing will be converted, so that the source need not stay as it is now
    """
    options = options or RecipeOptions()
    with ExitStack() as opened:
        learned = None if codes is None else opened.enter_context(LearnedCodes.open(codes))
        recipe = _recipe(options, recipe_path, learned, statistics=stats is not None or collected)
        recipe = with_searches(recipe, data=collected or learned is not None)
        container_of(recipe, recipe.container_name)  # before anything is downloaded
        source = opened.enter_context(Source.open(resolve_source(str(model))))
        source.reader.check_links()
        trained = () if learned is None else learned.trained.keys()
        outputs = outputs_of(source, recipe.for_model(source.reader.config), trained=trained)
        if not requantize:
            units = outputs.plan.units
            source.check_requantizable({m.source.tensor: u.scheme.fmt for u in units for m in u.members})
        check_ignored(outputs.plan, options.ignore)
        _check_mtp(outputs, source)
        said = _doubts_of(source, reader)
        if reader is not None:
            outputs.check_reader(reader, source.reader.config)
        files, name = outputs.configs(source, version=__version__), outputs.container_name
        check_read_back(outputs.container, files, outputs.layout, outputs.targets, container_name=name)
        if learned is not None:
            _check_model_of_codes(learned, source, outputs.plan)
        statistics = open_statistics(
            stats, source, outputs.plan, recipe=outputs.recipe, learned=learned, collected=collected
        )
        if statistics is not None:
            opened.enter_context(statistics)
        if learned is not None:
            _check_codes(learned, source, outputs.plan, recipe=outputs.recipe, options=options, statistics=statistics)
        if statistics is not None or not collected:
            check_cached([job.module for job in outputs.jobs if isinstance(job, WriteCacheScales)], statistics)
        target = out if out is not None else default_out(source.reader.path, outputs.recipe)
        check_disjoint(source.reader.path, target)
        if not dry:
            source.reader.fingerprint()  # now, so that a source that changes before it is converted is found
        scales = InputScales(outputs.recipe, statistics)
        opened.pop_all()  # from here on `Conversion.close` closes them
    decided = Conversion(target, source, outputs.layout, outputs.jobs, outputs, scales, statistics, learned)
    return replace(decided, doubts=said)


def _doubts_of(source: Source, reader: str | None) -> tuple[str, ...]:
    """What is to be said of a source: that its family has no row, and where its config.json and its tensors are not of
    one model. CheckpointError for the latter where a program is named that shall load the result."""
    config = source.reader.config
    if not source.reader.has_config:
        return ()
    unlike = unlike_model(source)
    if "model_type" not in config:
        unlike = [
            "config.json has no 'model_type', which says what class the weights are of; take the config.json that "
            "was published with them"
        ]
    if unlike and reader is not None:
        raise CheckpointError(f"--for {reader}: {unlike[0]}; {reader} would not load what is made of it")
    unknown = []
    if not is_known(config):
        whose = "" if reader is None else f"; --for {reader} cannot tell whether {reader} takes them quantized"
        unknown.append(
            f"the table of families has no row for model_type {config.get('model_type')!r}: names and shapes alone "
            f"decide what stays unquantized{whose}; look at the list of what is kept, and add to it with --ignore"
        )
    if (source.reader.path / ADAPTER_CONFIG).is_file():
        unknown.append(
            f"{ADAPTER_CONFIG} lies beside the model: what its adapter adds to the weights is left out; merge it first "
            "if it shall count"
        )
    return (*unknown, *unlike, *doubts(config, source.tensors))


def _recipe(options: RecipeOptions, path: Path | None, codes: LearnedCodes | None, *, statistics: bool) -> Recipe:
    """The recipe of the options and a recipe file, or that of the codes where there is none."""
    own = None if codes is None else recipe_of_codes(codes, options if path is None else RecipeOptions())
    recipe = build_recipe(options, path=path, codes=own)
    check_used(options, recipe, statistics=statistics)
    return recipe


def _check_mtp(outputs: Outputs, source: Source) -> None:
    """UsageError where multi-token prediction layers are to be quantized and there is nothing of them."""
    issues = [issue for issue in issues_of(source.reader.config) if issue.mtp]
    patterns = [issue.keep.pattern for issue in issues]
    units = (unit for unit in outputs.plan.units if unit.rule.match in patterns)
    if outputs.recipe.mtp == "keep" or next(units, None) is not None:
        return
    given, path = f"--mtp {outputs.recipe.mtp}", source.reader.path
    if any(matches(pattern, module) for pattern in patterns for module in outputs.plan.modules):
        raise UsageError(
            f"{given} would change nothing: what it could quantize is kept for other reasons; leave it out"
        )
    counted = next((issue.counted_by for issue in issues if issue.counted_by), None)
    if counted is not None:
        raise UsageError(
            f"{given}: {path} has no tensor of the layers that {counted} in its config.json counts; add the files with "
            "them from where the model was published, or leave it out"
        )
    raise UsageError(f"{given}: {path} has no multi-token prediction layer; leave it out")


def _check_model_of_codes(found: LearnedCodes, source: Source, plan: Plan) -> None:
    """Learned codes against model and plan. UsageError where they are another model's, or lack a weight."""
    check_model(found, source)
    for unit in plan.units:
        keys = [member.key for member in unit.members]
        missing = [key for key in keys if not found.has(key)]
        if missing and len(missing) < len(keys):
            raise UsageError(f"{found.path} has no codes of '{missing[0]}', but of what shares its scale; tune again")
    kept = {entry.name: entry.reason for entry in plan.kept}
    for name in found.trained:
        if kept.get(name) != TRAINED_REASON:
            raise UsageError(
                f"{found.path} was tuned with --train, which changed '{name}', and this recipe does not keep it as it "
                "was kept there; give the recipe of tune, or tune again"
            )
    if not any(found.has(member.key) for unit in plan.units for member in unit.members):
        raise UsageError(f"{found.path} has codes of no weight that the recipe quantizes; tune with the same recipe")


def default_out(path: Path, recipe: Recipe) -> Path:
    """``<model>-NVFP4A16`` in the working directory; ``-MIXED`` for several schemes."""
    schemes = recipe.schemes()
    return Path(f"{name_of(path)}-{schemes[0].suffix if len(schemes) == 1 else 'MIXED'}")


def recipe_of_codes(codes: LearnedCodes, options: RecipeOptions) -> Recipe:
    """The recipe that codes were learned for, which applies where the call gives no recipe file.

    CheckpointError where rounding.json has none that this version knows; UsageError where ``options`` name another
    format.
    """
    described = codes.content.get("recipe")
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{codes.path / CODES_FILE} has no recipe, so what its codes mean is lost; tune again")
    try:
        recipe = Recipe.from_json(described)
    except RecipeError as error:
        raise CheckpointError(f"{codes.path / CODES_FILE}: {error}; tune again") from None
    names = [scheme.name for scheme in recipe.schemes()]
    if options.scheme is not None and [get_scheme(options.scheme).name] != names:
        raise UsageError(
            f"--format {options.scheme} contradicts {codes.path}, which holds codes for {', '.join(names)}; leave "
            "--format out, or tune with the same --format"
        )
    return recipe


def _check_codes(
    codes: LearnedCodes,
    source: Source,
    plan: Plan,
    *,
    recipe: Recipe,
    options: RecipeOptions,
    statistics: Statistics | None,
) -> None:
    """UsageError, in one line, for what of a call contradicts the codes that it is to write.

    plan, recipe  those of the call
    """
    _check_plan(codes, source, plan, recipe)
    if any(unit.scheme.needs_input_global_scale and codes.has(unit.members[0].key) for unit in plan.units):
        _check_input_scales(codes, recipe, statistics)
    if all(codes.has(member.key) for unit in plan.units for member in unit.members):
        for name in (option.name for option in fields(CodeOptions)):
            given = options.given.get(name)
            if given is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} {given} would change nothing: {codes.path} has the codes of every "
                    "weight; leave it out"
                )


def _check_plan(codes: LearnedCodes, source: Source, plan: Plan, recipe: Recipe) -> None:
    """The call's plan against the codes' own; a weight without codes may be kept on request."""
    own = recipe_of_codes(codes, RecipeOptions())
    if own == recipe:
        wanted = _fates(plan)
    else:
        capabilities = get_container(own.container_name).CAPABILITIES
        wanted = _fates(make_plan(source.tensors, source.reader.config, recipe=own, capabilities=capabilities))
    fates = _fates(plan)
    for key in dict.fromkeys([*codes.content["weights"], *wanted, *fates]):
        was, now = wanted.get(key), fates.get(key)
        if (now is None and not codes.has(key)) or (now is not None and now == was):
            continue
        before, after = ("kept" if fate is None else f"in {fate[0]}" for fate in (was, now))
        if before == after:
            before, after = "quantized", "kept" if now is None else "in another fused group"
        raise UsageError(f"{codes.path} was tuned with '{key}' {before}, this call has it {after}; {_AGAIN}")


_Fate = tuple[str, tuple[str, ...]]


def _fates(plan: Plan) -> dict[str, _Fate]:
    """Key of every quantized weight -> its scheme, and the keys of its unit."""
    units = [(unit.scheme.label, tuple(m.key for m in unit.members)) for unit in plan.units]
    return {key: (label, keys) for label, keys in units for key in keys}


def _check_input_scales(codes: LearnedCodes, recipe: Recipe, statistics: Statistics | None) -> None:
    """Codes were learned behind inputs at static scales: those must be the ones that are written."""
    made_with = codes.content.get("statistics")
    given = None if statistics is None else statistics.digest
    if made_with != given:
        if made_with is None:
            raise UsageError(
                f"{codes.path} was tuned without statistics, its input scales are constant; leave --stats out, or tune "
                "again with the same --stats"
            )
        held = "no --stats are given" if statistics is None else f"{statistics.path} holds others ({given:.16})"
        raise UsageError(
            f"{codes.path} was tuned with the input scales of statistics {str(made_with)[:16]}, {held}; give the "
            "--stats that tune had"
        )
    own = recipe_of_codes(codes, RecipeOptions())
    for name in ("input_amax",) if given is None else ("input_scale", "headroom"):
        was, now = getattr(own, name), getattr(recipe, name)
        if was != now:
            said = "the format's own" if was is None else was
            what = f"no {name} in the recipe" if now is None else f"--{name.replace('_', '-')} {now}"
            raise UsageError(
                f"{what} contradicts {codes.path}, which was tuned with {said}; leave it out, or tune again with a "
                "recipe that says so"
            )
