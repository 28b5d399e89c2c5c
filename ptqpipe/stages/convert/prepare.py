"""A conversion decided from headers: the fate of every tensor, every byte's place, statistics and codes checked.

Reads no weight and writes nothing. Must not know how units are quantized.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ptqpipe._version import __version__
from ptqpipe.checkpoint.source import check_disjoint, resolve_source
from ptqpipe.containers import Container, get_container
from ptqpipe.errors import UsageError
from ptqpipe.options import ALGORITHMS
from ptqpipe.plan import Plan, check_ignored, make_plan
from ptqpipe.recipe import Recipe, RecipeOptions, build_recipe
from ptqpipe.rounding import Rounding
from ptqpipe.search import get_search
from ptqpipe.source import Source
from ptqpipe.stages.common import kv_cache
from ptqpipe.stages.common.biases import corrected_biases, with_reasons
from ptqpipe.stages.common.identity import check_model, name_of
from ptqpipe.stages.common.input_scales import LARGEST, InputScales
from ptqpipe.stages.common.jobs import (
    run_id_of,
)
from ptqpipe.stages.common.moments import (
    open_statistics,
)
from ptqpipe.stages.common.outputs import (
    Outputs,
    check_readable,
    check_supported,
    make_outputs,
)
from ptqpipe.stages.convert.codes import check_codes, recipe_of_codes
from ptqpipe.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion that is decided to the byte and has read no weight. A context manager; or call ``close``."""

    source_path: Path
    out: Path
    recipe: Recipe
    plan: Plan
    outputs: Outputs
    source: Source
    container: Container
    run_parts: Mapping[str, str]
    input_scales: InputScales
    statistics: Statistics | None = None
    rounding: Rounding | None = None

    @property
    def run_id(self) -> str:
        """Identifies source, recipe, layout and version: a run resumes only itself."""
        return run_id_of(self.run_parts)

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files of the source, of the statistics and of learned codes."""
        for opened in (self.source, self.statistics, self.rounding):
            if opened is not None:
                opened.close()


def best_with(
    options: RecipeOptions, *, stats: Path | None, recipe_path: Path | None, rounding: Path | None = None
) -> RecipeOptions:
    """The options with the best that statistics allow, where neither they nor a recipe, a file's or that of learned
    codes, say it: GPTQ where the full moments are there, else nearest codes at weighted scales."""
    if stats is None or recipe_path is not None or rounding is not None:
        return options
    if options.algorithm is None and options.weighting is None:
        with Statistics.open(stats) as statistics:
            usable = [name for name, row in ALGORITHMS.items() if not row.moment or statistics.has_any(row.moment)]
        options = options.but(algorithm=usable[-1])
    if options.algorithm == "rtn" and options.weighting is None and options.search in (None, "exact", "brute_force"):
        options = options.but(weighting="diagonal")
    return options


def check_used(options: RecipeOptions, recipe: Recipe, *, statistics: bool) -> None:
    """UsageError for an option that is given and would change no byte, since nothing of the recipe asks for it."""
    read = {name for rule in recipe.rules if rule.scheme is not None for name in ALGORITHMS[rule.algorithm].options}
    own = {name: key for key, row in ALGORITHMS.items() for name in row.options}
    static = any(scheme.activation in LARGEST for scheme in recipe.schemes())
    low_rank = any(rule.low_rank for rule in recipe.rules)
    kinds = "a format with static activation scales, such as nvfp4_w4a4"
    for option, given, used, needs in (
        *((f"--{n}", options.given.get(n), n in read, f"algorithm {own[n]}; give --stats") for n in own),
        ("--low-rank-dtype", options.low_rank_dtype, low_rank, "a low-rank part; give --low-rank"),
        ("--input-scale", options.input_scale, static and statistics, f"--stats and {kinds}"),
        ("--headroom", options.headroom, static and statistics, f"--stats and {kinds}"),
        ("--input-amax", options.input_amax, static and not statistics, f"{kinds}, without --stats"),
    ):
        if given is not None and not used:
            raise UsageError(f"{option} {given} would change nothing: it is for {needs}; or leave it out")


def prepare(
    model: str | Path,
    *,
    options: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    out: Path | None = None,
    stats: Path | None = None,
    rounding: Path | None = None,
) -> Prepared:
    """Everything that can be decided from headers. Raises before any weight is read; writes nothing.

    stats     a folder of `ptqpipe calibrate`
    rounding  one of `ptqpipe tune`: its codes are written as they are, by the recipe that they were learned for unless
              a recipe file is given; what contradicts it is a UsageError
    """
    options = options or RecipeOptions()
    with ExitStack() as opened:
        learned = None if rounding is None else opened.enter_context(Rounding.open(rounding))
        own = None if learned is None else recipe_of_codes(learned, options if recipe_path is None else RecipeOptions())
        recipe = build_recipe(options, path=recipe_path, codes=own)
        check_used(options, recipe, statistics=stats is not None)
        for rule in recipe.rules:
            get_search(rule.search)
        container_name = recipe.container_name
        container = get_container(container_name)
        check_supported(container, recipe)
        path = resolve_source(str(model))
        source = opened.enter_context(Source.open(path))
        source.reader.check_links()
        source.check_requantizable()
        recipe = recipe.for_model(source.reader.config)
        plan = make_plan(source.tensors, source.reader.config, recipe=recipe, abilities=container.ABILITIES)
        check_ignored(plan, options.ignore)
        plan = with_reasons(plan, corrected_biases(plan, source, recipe))
        outputs = make_outputs(plan, source, container, container_name=container_name, recipe=recipe)
        check_readable(outputs, plan, source, container)
        check_rounding(learned, source, plan)
        statistics = open_statistics(stats, source, plan, recipe=recipe, learned=learned)
        if statistics is not None:
            opened.enter_context(statistics)
        if learned is not None:
            check_codes(learned, source, plan, recipe=recipe, options=options, statistics=statistics)
        kv_cache.check_statistics(dict(job.cache for job in outputs.jobs if job.cache is not None), statistics)
        target = out if out is not None else default_out(path, recipe)
        check_disjoint(path, target)
        parts = {
            "source": source.reader.fingerprint(),
            "recipe": recipe.digest,
            "layout": outputs.layout.digest,
            "version": __version__,
        }
        if statistics is not None:
            parts["statistics"] = statistics.digest
        if learned is not None:
            parts["rounding"] = learned.digest
        scales = InputScales(recipe, statistics)
        opened.pop_all()  # from here on `Prepared.close` closes them
        return Prepared(path, target, recipe, plan, outputs, source, container, parts, scales, statistics, learned)


def check_rounding(found: Rounding | None, source: Source, plan: Plan) -> None:
    """Learned codes against model and plan. UsageError where they are another model's, or lack a weight."""
    if found is None:
        return
    check_model(found, source)
    for unit in plan.units:
        if unit.scheme.low_rank is not None:
            raise UsageError(f"{found.path} has codes that were learned without a low-rank part; leave low_rank out")
        keys = [member.key for member in unit.members]
        missing = [key for key in keys if not found.has(key)]
        if missing and len(missing) < len(keys):
            raise UsageError(f"{found.path} has no codes of '{missing[0]}', but of what shares its scale; tune again")
    if not any(found.has(member.key) for unit in plan.units for member in unit.members):
        raise UsageError(f"{found.path} has codes of no weight that the recipe quantizes; tune with the same recipe")


def default_out(path: Path, recipe: Recipe) -> Path:
    """``<model>-NVFP4A16`` in the working directory; ``-MIXED`` for several schemes."""
    schemes = recipe.schemes()
    return Path(f"{name_of(path)}-{schemes[0].suffix if len(schemes) == 1 else 'MIXED'}")
