"""The commands that prepare a conversion or write a checkpoint, as functions of the same names.

Each takes the command's options as keywords, with underscores for dashes, and returns a `Result`. Checkpoints and
models are paths or names on the hub.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ptqpipe.api.calibration_data import Data, data_names
from ptqpipe.api.calls import command, machine_of, names_in, options_from, watched
from ptqpipe.api.result import Result
from ptqpipe.calibration import command as calibrate_stage, own_text as generate_stage, summary as calibrate_text
from ptqpipe.calibration.options import CalibrateCommand, CalibrateOptions, GenerateCommand, GenerateOptions
from ptqpipe.checkpoint import Finished
from ptqpipe.conversion import command as convert_stage
from ptqpipe.conversion.call_recipe import best_with
from ptqpipe.conversion.convert_summary import converted_text, missing_config
from ptqpipe.conversion.job import WriteResult
from ptqpipe.conversion.options import TransformCommand, TransformOptions
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.push import also_complete, check_push, push
from ptqpipe.conversion.transform import command as transform_stage
from ptqpipe.errors import PtqWarning
from ptqpipe.pipeline import messages as pipeline_text
from ptqpipe.pipeline.budget import command as plan_stage, plan_summary as plan_text
from ptqpipe.pipeline.command import PipelineResult, pipeline
from ptqpipe.pipeline.options import ConvertCommand, PlanCommand
from ptqpipe.pipeline.tune import command as tune_stage, tune_summary as tune_text
from ptqpipe.pipeline.tune.tune_options import TuneCommand
from ptqpipe.pipeline.validate import check_alone, for_reader
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import disk_size, number


@command(ConvertCommand, progress=True)
def convert(
    model: str | Path,
    *,
    format: str | None = None,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    stats: str | Path | None = None,
    codes: str | Path | None = None,
    ignore: Iterable[str] = (),
    data: Data = None,
    **options: Any,
) -> Result:
    """Quantizes a model to a checkpoint; the arguments mean what the options of ``ptqpipe convert`` mean.

    out      folder to write; None: ``<model>-<FORMAT>`` in the working folder
    data     what the model is calibrated on, in the same run: files, data sets by name, "self" for text that the model
             writes, texts, token ids, a ``datasets`` object or a DataLoader
    options  every option of ``ptqpipe.recipe.options`` by its name (``damping=0.02``); ``quality``, ``budget``,
             ``formats``, ``reader``, ``requantize``, ``untie``, ``eval``, ``report``, ``text_field``, ``samples``,
             ``seqlen``, ``seed``, ``work_dir``; ``push``, the hub's repository to which the result is uploaded;
             ``resume`` and ``overwrite``; ``workers``, ``device``, ``max_memory`` and ``progress``, which decide no
             byte

    ``record`` is the content of ptqpipe.json. Raises a kind of PtqError; AlreadyComplete where ``resume`` finds nothing
    left to do, UsageError with the nearest name for an unknown option.

    >>> ptqpipe.convert("MODEL", format="nvfp4", out="OUT")
    <convert OUT: format nvfp4, weights 21 at 4.50 bits, size 1.20 MB, time ... s>
    """
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    named = {"format": format, "out": out, "recipe": recipe, "stats": stats, "codes": codes, "ignore": patterns}
    texts = options.pop("eval", None) or ()
    texts = (texts,) if isinstance(texts, str | Path) else tuple(texts)  # names of files may have commas
    repository = options.get("push")
    if repository is not None:
        check_push(repository)
    with data_names(data) as names, also_complete(repository):
        chosen = options_from(ConvertCommand, options, model=str(model), data=tuple(names), eval=texts, **named)
        machine, progress = machine_of(chosen, options.get("progress")), watched(options.get("progress"))
        if chosen.has_stages:
            check_alone(stats=stats, codes=codes)
            done = pipeline(
                model,
                recipe=chosen.recipe_options,
                recipe_path=chosen.recipe,
                out=chosen.out,
                work=chosen.part(PipelineOptions),
                mode=chosen.mode,
                machine=machine,
                say=partial(print, file=sys.stderr) if progress else lambda line: None,
            )
            result = _made(done)
        else:
            result = _convert(model, chosen, machine)
    if repository is not None:
        assert result.path is not None  # a conversion has one
        result.facts["uploaded to"] = push(result.path, repository)
    return result


def _convert(model: str | Path, options: ConvertCommand, machine: Machine) -> Result:
    """A conversion alone."""
    recipe = options.recipe_options
    if options.reader is not None:
        recipe = for_reader(options.reader, recipe, options.recipe)
    where: dict[str, Any] = {"recipe_path": options.recipe, "stats": options.stats, "codes": options.codes}
    best = best_with(recipe, **where)
    with prepare(
        model, options=best, out=options.out, reader=options.reader, requantize=options.requantize, **where
    ) as prepared:
        no_config = missing_config(prepared)
        if no_config is not None:
            warnings.warn(no_config, PtqWarning, stacklevel=4)
        done = convert_stage.convert(prepared, mode=options.mode, machine=machine)
    return checkpoint("convert", done, converted_text)


def _made(made: PipelineResult) -> Result:
    """The result of a conversion of several stages."""
    size = sum(file.stat().st_size for file in made.out.glob("*.safetensors"))
    facts = {**_weights(made.record), "size": disk_size(size), "time": f"{made.seconds:.1f} s"}
    shown = partial(pipeline_text.render, made)
    return Result(
        "convert", made, path=made.out, record=made.record, facts=facts, text=shown, evaluation=made.evaluation
    )


def checkpoint(name: str, done: WriteResult | None, text: Callable[[WriteResult], str], **more: Any) -> Result:
    """The result of a command that wrote a checkpoint. ``more``: of `Result`."""
    assert done is not None  # rank 0 always has a result
    facts = {**_weights(done.record), "size": disk_size(done.written_bytes), "time": f"{done.seconds:.1f} s"}
    return Result(name, done, path=done.out, record=done.record, facts=facts, text=lambda: text(done), **more)


def _weights(record: Mapping[str, Any]) -> dict[str, str]:
    """How many weights a checkpoint has, and in which formats where they are quantized, from its record."""
    weights = (record.get("weights") or {}).values()
    if not all("scheme" in entry for entry in weights):
        return {"weights": str(len(weights))}
    sizes = [(prod(entry["shape"]), entry["bits_per_weight"]) for entry in weights]
    bits = sum(count * each for count, each in sizes) / sum(count for count, _ in sizes)
    return {
        "format": ", ".join(sorted({entry["scheme"] for entry in weights})),
        "weights": f"{len(weights)} at {bits:.2f} bits",
    }


def finished(name: str, done: Finished, text: Callable[[Finished], str], facts: Mapping[str, str]) -> Result:
    """The result of a command that wrote a folder or file of its own kind."""
    facts = {**facts, "time": f"{done.seconds:.1f} s"}
    return Result(name, done, path=done.out, record=done.content, facts=facts, text=lambda: text(done))


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
    return finished("calibrate", done, calibrate_text.render, facts)


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
    return finished("generate", done, lambda done: f"{done.out}: {facts}", facts)


@command(TransformCommand, progress=True)
def transform(
    model: str | Path,
    transforms: str | Iterable[str],
    out: str | Path,
    *,
    stats: str | Path | None = None,
    **options: Any,
) -> Result:
    """Folds smoothing factors or rotations into a float model, which then computes the same and quantizes better.

    transforms  in their order: smoothquant, awq, aqas, smooth_swiglu, rotate
    stats    folder of `calibrate`; only rotations need none
    options  as ``ptqpipe transform`` has them: ``alpha``, ``power_of_two``, ``fold_at``, ``rotation_size``, ``untie``,
             ``format``, ``dtype``, ``shard_size``, and those of the machine

    >>> ptqpipe.transform("MODEL", "smoothquant", "SMOOTH", stats="STATS")
    <transform SMOOTH: weights 21, size 4.47 MB, time ... s>
    """
    named = {"model": str(model), "transforms": ",".join(names_in(transforms)), "out": out, "stats": stats}
    chosen = options_from(TransformCommand, options, **named)
    done = transform_stage.transform(
        model,
        chosen.out,
        stats=chosen.stats,
        options=chosen.part(TransformOptions),
        mode=chosen.mode,
        machine=machine_of(chosen, options.get("progress")),
    )
    return checkpoint("transform", done, transform_stage.render)


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
    return finished("tune", done, tune_text.render, facts)


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
