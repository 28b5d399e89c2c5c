"""The commands that prepare a conversion, as functions of the same names.

Each takes the command's options as keywords, with underscores for dashes, and returns a `Result`. Models are paths or
names on the hub.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ptqpipe.api.calibration_data import Data, data_names
from ptqpipe.api.calls import command, machine_of, names_in, options_from
from ptqpipe.api.result import Result, of_folder
from ptqpipe.calibration import command as calibrate_stage, own_text as generate_stage, summary as calibrate_text
from ptqpipe.calibration.options import CalibrateCommand, CalibrateOptions, GenerateCommand, GenerateOptions
from ptqpipe.errors import PtqWarning
from ptqpipe.pipeline.budget import command as plan_stage, plan_summary as plan_text
from ptqpipe.pipeline.options import PlanCommand
from ptqpipe.pipeline.tune import command as tune_stage, tune_summary as tune_text
from ptqpipe.pipeline.tune.options import TuneCommand
from ptqpipe.run.quantities import disk_size, number


@command(CalibrateCommand, progress=True)
def calibrate(model: str | Path, data: Data, out: str | Path, **options: Any) -> Result:
    """Collects statistics of a model's linear inputs in a folder, for ``convert(stats=...)``.

    data     files, data sets by name, texts, token ids, a ``datasets`` object or a DataLoader: see docs/python.md
    options  as ``ptqpipe calibrate`` has them: ``samples``, ``seqlen``, ``seed``, ``text_field``, ``moments``,
             ``dtype``, ``holdout``, and those of the machine

    ``record`` is the content of stats.json. Raises UsageError for data that do not fit the model.

    >>> ptqpipe.calibrate("MODEL", "TEXT.txt", "STATS", samples=8, seqlen=64)
    <calibrate STATS: modules 22, samples 8 of 64 tokens, held out 1, time ... s>
    """
    with data_names(data) as names:
        chosen = options_from(CalibrateCommand, options, model=str(model), data=tuple(names), out=out)
        done = calibrate_stage.calibrate(
            model,
            names,
            chosen.out,
            options=chosen.part(CalibrateOptions),
            mode=chosen.mode,
            machine=machine_of(chosen, options.get("progress"), waits=False),
            warn=lambda line: warnings.warn(line, PtqWarning, stacklevel=6),
        )
    assert done is not None  # rank 0 always has a result
    read = done.content["data"]
    facts = {
        "modules": str(len(done.content["modules"])),
        "samples": f"{read['samples']} of {read['seqlen']} tokens",
        "held out": str(read["held_out"]),
    }
    return of_folder("calibrate", done, calibrate_text.render, facts)


@command(GenerateCommand, progress=True)
def generate(
    model: str | Path,
    out: str | Path,
    *,
    temperature: float | Iterable[float | int] = 1.0,
    length: int | Iterable[int] = (),
    prompts: Data = None,
    **options: Any,
) -> Result:
    """Lets a model write its own calibration text: rows of token ids, which `calibrate` and `tune` take as data.

    out          file to write, .jsonl
    temperature  of the draws; windows take turns in several
    length       tokens of a text, of which several fill a window, or several such numbers; none: a window
    prompts      rows that texts begin with, as `calibrate` takes data
    options      as ``ptqpipe generate`` has them: ``samples``, ``seqlen``, ``seed``, ``dtype``, ``overwrite``, and
                 those of the machine

    >>> ptqpipe.generate("MODEL", "OWN.jsonl", samples=8, seqlen=32)
    <generate OWN.jsonl: windows 8 of 32 tokens, held out 1, time ... s>
    """
    own = {"model": str(model), "out": out, "temperature": names_in(temperature), "length": names_in(length)}
    with data_names(prompts) as names:
        chosen = options_from(GenerateCommand, options, prompts=tuple(names), **own)
        done = generate_stage.generate(
            model,
            chosen.out,
            options=chosen.part(GenerateOptions),
            overwrite=chosen.overwrite,
            machine=machine_of(chosen, options.get("progress"), waits=False),
        )
    content = done.content
    facts = {"windows": f"{content['samples']} of {content['seqlen']} tokens", "held out": str(content["held_out"])}
    return of_folder("generate", done, lambda done: f"{done.out}: {facts}", facts)


@command(TuneCommand, progress=True)
def tune(
    model: str | Path,
    data: Data,
    out: str | Path,
    *,
    format: str | None = None,
    recipe: str | Path | None = None,
    stats: str | Path | None = None,
    ignore: Iterable[str] = (),
    **options: Any,
) -> Result:
    """Learns how a model's weights are rounded, into a folder of codes for ``convert(codes=...)``.

    data     as `calibrate` takes them
    options  as ``ptqpipe tune`` has them: ``samples``, ``seqlen``, ``seed``, ``text_field``, ``method``, ``metric``,
             ``feedback``, ``train``, ``steps``, ``container``, and those of the machine

    ``record`` is the content of rounding.json.

    >>> ptqpipe.tune("MODEL", "TEXT.txt", "CODES", samples=8, seqlen=64)
    <tune CODES: method gptq, weights 21, decoder layers improved ... of 3, time ... s>
    """
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    named = {"model": str(model), "out": out, "format": format, "recipe": recipe, "stats": stats, "ignore": patterns}
    with data_names(data) as names:
        chosen = options_from(TuneCommand, options, data=tuple(names), **named)
        done = tune_stage.tune(
            model,
            names,
            chosen.out,
            recipe=chosen.recipe_options,
            recipe_path=chosen.recipe,
            stats=chosen.stats,
            options=chosen,
            mode=chosen.mode,
            machine=machine_of(chosen, options.get("progress"), waits=False),
        )
    blocks = done.content["blocks"].values()
    facts = {
        "method": str(done.content["method"]),
        "weights": str(len(done.content["weights"])),
        "decoder layers improved": f"{sum(bool(block['kept']) for block in blocks)} of {len(blocks)}",
    }
    return of_folder("tune", done, tune_text.render, facts)


@command(PlanCommand, progress=True)
def plan(
    model: str | Path,
    budget: str,
    out: str | Path,
    *,
    formats: str | Iterable[str] | None = None,
    stats: str | Path | None = None,
    measure: str | Path | None = None,
    **options: Any,
) -> Result:
    """Chooses a format for every layer under a budget, and writes the recipe for ``convert(recipe=...)``.

    budget   bits per weight, or the size of all weights on disk: "4.75bits", "9GB"
    formats  to choose from; None: the usual ones, as far as ``reader`` runs them
    stats    folder of `calibrate`: the output error of a layer is its sensitivity. measure: a text on which the KL
             divergence of each layer is measured instead, with ``seqlen`` and ``max_tokens``
    options  ``reader``, the program that will load the result, and those of the machine

    ``record`` is what ``ptqpipe plan --json`` prints.

    >>> ptqpipe.plan("MODEL", "5bits", "mixed.yaml", stats="STATS")
    <plan mixed.yaml: bits per weight ..., formats ..., size ... MB>
    """
    named = {"budget": budget, "out": out, "formats": formats, "stats": stats, "measure": measure}
    chosen = options_from(PlanCommand, options, model=str(model), **named)
    outcome = plan_stage.plan(chosen, machine=machine_of(chosen, options.get("progress")))
    counts = outcome.counts(outcome.solution)
    facts = {
        "bits per weight": number(outcome.bits(outcome.solution), 3),
        "formats": " ".join(f"{count}x{name}" for name, count in counts.items()),
        "size": disk_size(outcome.file_bytes),
    }
    record = plan_text.to_json(outcome)
    return Result("plan", outcome, path=chosen.out, record=record, facts=facts, text=lambda: plan_text.render(outcome))
