"""Decides a conversion from headers: the fate of every tensor, every byte's place, statistics and codes checked.

Learned codes are good for one plan: the same weights in the same formats and fused groups, and inputs quantized at the
same static scales. rounding.json holds the recipe that says all of it; whoever gives codes alone gets that recipe.
Reads no weight and writes nothing.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ptqpipe._version import __version__
from ptqpipe.checkpoint import check_disjoint, resolve_source
from ptqpipe.conversion.call_recipe import default_out, recipe_of_call, with_searches
from ptqpipe.conversion.check_codes import check_codes, check_rounding
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.input_moments import open_statistics
from ptqpipe.conversion.input_scales import InputScales
from ptqpipe.conversion.kv_cache import WriteCacheScales, check_cached
from ptqpipe.conversion.planned_outputs import check_read_back, container_of, outputs_of
from ptqpipe.conversion.source_doubts import check_mtp, doubts_of
from ptqpipe.models.source import Source
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.plan import check_ignored
from ptqpipe.run.machine import without_collections


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
    reader     the program that will load the result (``reader``): a weight that it gets wrong is a UsageError
    requantize quantize weights again that are stored below 8 bits even where that only adds error
    collected  for what finds the moments that choosing codes reads as it goes, or later: `ptqpipe tune`, `pipeline`
    dry        nothing will be converted, so that the source need not stay as it is now
    """
    options = options or RecipeOptions()
    with ExitStack() as opened:
        learned = None if codes is None else opened.enter_context(LearnedCodes.open(codes))
        recipe = recipe_of_call(options, recipe_path, learned, statistics=stats is not None or collected)
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
        check_mtp(outputs, source)
        notes = doubts_of(source, reader)
        if reader is not None:
            outputs.check_reader(reader, source.reader.config)
        files, name = outputs.configs(source, version=__version__), outputs.container_name
        check_read_back(outputs.container, files, outputs.layout, outputs.targets, container_name=name)
        if learned is not None:
            check_rounding(learned, source, outputs.plan)
        statistics = open_statistics(
            stats, source, outputs.plan, recipe=outputs.recipe, learned=learned, collected=collected
        )
        if statistics is not None:
            opened.enter_context(statistics)
        if learned is not None:
            check_codes(learned, source, outputs.plan, recipe=outputs.recipe, options=options, statistics=statistics)
        if statistics is not None or not collected:
            check_cached([job.module for job in outputs.jobs if isinstance(job, WriteCacheScales)], statistics)
        target = out if out is not None else default_out(source.reader.path, outputs.recipe)
        check_disjoint(source.reader.path, target)
        if not dry:
            source.reader.fingerprint()  # now, so that a source that changes before it is converted is found
        scales = InputScales(outputs.recipe, statistics)
        opened.pop_all()  # from here on `Conversion.close` closes them
    decided = Conversion(target, source, outputs.layout, outputs.jobs, outputs, scales, statistics, learned)
    return replace(decided, doubts=notes)
