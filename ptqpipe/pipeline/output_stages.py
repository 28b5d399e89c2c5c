"""The stages that choose formats and codes, and write the output."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import FOLDING_FILE, Mode, Paths, has_begun, read_json_object, run_id_of
from ptqpipe.conversion import command as conversion
from ptqpipe.conversion.call_recipe import best_with
from ptqpipe.conversion.job import named_source
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import AlreadyComplete
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.budget.command import Budget, plan_mixed, write_recipe
from ptqpipe.pipeline.run_plan import Pipeline
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.quantization.learned_codes import CODES_FILE
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import RecipeOptions


def plan_stage(run: Pipeline) -> None:
    target = run.folder / "recipe.yaml"
    if not target.exists():
        _write_plan(run, target)
    run.ledger.add(target)


def _write_plan(run: Pipeline, target: Path) -> None:
    formats = validate.formats_for(run.work.reader, run.work.formats)
    budget = Budget.parse(str(run.work.budget))
    follows = run.preset is not None and bool(run.preset.method)
    plan = plan_mixed(
        run.path,
        budget,
        formats=formats,
        sensitivity=run.stats,
        machine=run.machine,
        container=run.recipe.container,
        follows=follows,
        rotations=build_recipe(run.recipe).rotations,
        requantize=run.work.requantize,
    )
    if follows:
        plan = replace(plan, content=_without_algorithm(plan.content))
    write_recipe(plan, target)


def tune_stage(run: Pipeline) -> None:
    assert run.preset is not None
    target = run.folder / "codes"
    with suppress(AlreadyComplete):
        done = tune(
            run.floats,
            run.texts,
            target,
            recipe=run.recipe,
            recipe_path=run.recipe_file,
            stats=run.stats if run.static else None,
            options=TuneOptions(**run.windows(), text_field=run.field_of_rows, method=run.preset.method),
            mode="resume",
            machine=run.computing,
        )
        run.notes += done.notes
    run.ledger.add(target / CODES_FILE)


def convert_stage(run: Pipeline) -> None:
    codes = run.folder / "codes" if run.preset is not None and run.preset.method else None
    stats = run.stats if codes is None or run.static else None
    path = run.recipe_file if codes is None else None
    where: dict[str, Any] = {"recipe_path": path, "stats": stats, "codes": codes}
    options = RecipeOptions() if codes is not None else best_with(run.recipe, **where)
    paths = Paths.of(run.out)
    mode: Mode = "overwrite" if run.ledger.replaces(paths.out) and not has_begun(paths) else "resume"
    where["requantize"] = run.work.requantize
    with prepare(run.floats, options=options, out=run.out, **where) as prepared:
        job = prepared.with_record_entries(_record_entries(run), consumes=run.work.work_dir is None)
        conversion.convert(job, mode=mode, machine=run.machine)


def _record_entries(run: Pipeline) -> dict[str, Any]:
    """What the record says of this run; nothing where it is the one of a plain conversion."""
    if run.preset is None and run.work.budget is None:
        return {}
    identity = {"quality": run.work.quality or "best", "run": run_id_of(run.identity)}
    entry: dict[str, Any] = {"pipeline": {**identity, "budget": run.work.budget}}
    without = [] if run.preset is None else list(run.preset.without)
    foldings: list[dict[str, Any]] = []
    if run.floats != run.path:
        folded = read_json_object(run.floats / FOLDING_FILE)
        foldings = folded["foldings"]
        done = {folding["transform"] for folding in foldings}
        with Source.open(run.path) as source:
            names = ",".join(name for name in folded["transforms"] if name in done)
            entry["transformed"] = {"transform": names, "from": named_source(source), "foldings": foldings}
    without += run.gainless(foldings)
    entry["pipeline"] |= {"untie": True} if run.work.untie else {}
    entry["pipeline"] |= {"without": without} if without else {}
    return entry


def _without_algorithm(content: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{k: v for k, v in rule.items() if k not in ("algorithm", "objective")} for rule in content["rules"]]
    return {**content, "rules": rules}
