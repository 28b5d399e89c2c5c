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
from ptqpipe.api.calls import (
    DEVICE,
    RESTART,
    Keywords,
    command,
    into,
    keywords_of,
    machine_of,
    mode_of,
    names_in,
    path_or_none,
    pipeline_of,
    recipe_keywords,
    recipe_of,
    run_keywords,
    watched,
)
from ptqpipe.api.result import Result
from ptqpipe.calibration import command as calibrate_stage, own_text as generate_stage, summary as calibrate_text
from ptqpipe.calibration.own_text import GenerateOptions
from ptqpipe.checkpoint import Finished
from ptqpipe.conversion import Done, command as convert_stage
from ptqpipe.conversion.convert_summary import converted_text, missing_config
from ptqpipe.conversion.prepare import best_with, prepare
from ptqpipe.conversion.push import also_complete, check_push, push
from ptqpipe.conversion.transform import command as transform_stage
from ptqpipe.conversion.transform.plan import TransformOptions
from ptqpipe.errors import PtqWarning
from ptqpipe.pipeline import messages as pipeline_text
from ptqpipe.pipeline.budget import command as plan_stage, plan_summary as plan_text
from ptqpipe.pipeline.budget.measure import sensitivity
from ptqpipe.pipeline.call import check_alone, container_of_all, for_reader, formats_for
from ptqpipe.pipeline.command import Made, pipeline
from ptqpipe.pipeline.tune import command as tune_stage, tune_options as tune_options, tune_summary as tune_text
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions, recipe_path
from ptqpipe.run.quantities import disk_size, number

COMPUTING = "8GiB"  # the limit of memory of what runs a model


# `data` is one of the function's own: it is more than names.
_WORK = keywords_of(PipelineOptions, "data")


PUSH: Keywords = {"push": (str | None, None)}


@command(recipe_keywords(), _WORK, RESTART, run_keywords(), DEVICE, PUSH)
def convert(
    model: str | Path,
    *,
    format: str | None = None,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    stats: str | Path | None = None,
    rounding: str | Path | None = None,
    ignore: Iterable[str] = (),
    data: Data = None,
    **options: Any,
) -> Result:
    """Quantizes a model to a checkpoint; the arguments mean what the options of ``ptqpipe convert`` mean.

    out      folder to write; None: ``<model>-<FORMAT>`` in the working folder
    data     what the model is calibrated on, in the same run: files, data sets by name, "self" for text that the model
             writes, texts, token ids, a ``datasets`` object or a DataLoader
    options  every option of ``ptqpipe.recipe.options`` by its name (``damping=0.02``); ``quality``, ``budget``,
    ``formats``,
             ``reader`` (the command's ``--for``), ``requantize``, ``untie``, ``eval``, ``report``, ``field``,
             ``samples``, ``seqlen``, ``seed``, ``keep_stages``; ``push``, the hub's repository to which the result is
             uploaded; ``resume`` and ``overwrite``; ``workers``, ``device``, ``max_memory`` and ``progress``, which
             decide no byte

    ``record`` is the content of ptqpipe.json. Raises a kind of PtqError; AlreadyComplete where ``resume`` finds nothing
    left to do, UsageError with the nearest name for an unknown option.

    >>> ptqpipe.convert("MODEL", format="nvfp4", out="OUT")
    <convert OUT: format nvfp4, weights 21 at 4.50 bits, size 1.20 MB, time ... s>
    """
    given, target, rules = recipe_of(options, format=format, ignore=ignore), path_or_none(out), recipe_path(recipe)
    repository = options.get("push")
    if repository is not None:
        check_push(repository)
    with data_names(data) as names, also_complete(repository):
        work = pipeline_of(options, names)
        if work.asked:
            check_alone(stats=stats, rounding=rounding)
            say = partial(print, file=sys.stderr) if watched(options.get("progress")) else lambda line: None
            mode, machine = mode_of(options), machine_of(options)
            made = pipeline(
                model, recipe=given, recipe_path=rules, out=target, work=work, mode=mode, machine=machine, say=say
            )
            result = _made(made)
        else:
            given = given if work.reader is None else for_reader(work.reader, given, rules)
            result = _convert(model, given, rules, target, path_or_none(stats), path_or_none(rounding), options)
    if repository is not None:
        assert result.path is not None  # a conversion has one
        result.facts["uploaded to"] = push(result.path, repository)
    return result


def _convert(
    model: str | Path,
    given: RecipeOptions,
    rules: Path | None,
    out: Path | None,
    stats: Path | None,
    rounding: Path | None,
    options: Mapping[str, Any],
) -> Result:
    """A conversion alone. ``rules``: a recipe file."""
    best = best_with(given, recipe_path=rules, stats=stats, codes=rounding)
    where: dict[str, Any] = {"out": out, "stats": stats, "codes": rounding, "reader": options.get("reader")}
    where["requantize"] = bool(options.get("requantize"))
    with prepare(model, options=best, recipe_path=rules, **where) as prepared:
        no_config = missing_config(prepared)
        if no_config is not None:
            warnings.warn(no_config, PtqWarning, stacklevel=4)
        done = convert_stage.convert(prepared, mode=mode_of(options), machine=machine_of(options))
    return checkpoint("convert", done, converted_text)


def _made(made: Made) -> Result:
    """The result of a conversion of several stages."""
    size = sum(file.stat().st_size for file in made.out.glob("*.safetensors"))
    facts = {**_weights(made.record), "size": disk_size(size), "time": f"{made.seconds:.1f} s"}
    shown = partial(pipeline_text.render, made)
    return Result(
        "convert", made, path=made.out, record=made.record, facts=facts, text=shown, evaluation=made.evaluation
    )


def checkpoint(name: str, done: Done | None, text: Callable[[Done], str], **more: Any) -> Result:
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


@command(keywords_of(calibrate_stage.CalibrateOptions), run_keywords(COMPUTING), RESTART, DEVICE)
def calibrate(model: str | Path, data: Data, out: str | Path, **options: Any) -> Result:
    """Collects statistics of a model's linear inputs in a folder, for ``convert(stats=...)``.

    data     files, data sets by name, texts, token ids, a ``datasets`` object or a DataLoader: see docs/python.md
    options  as ``ptqpipe calibrate`` has them: ``samples``, ``seqlen``, ``seed``, ``field``, ``moments``, ``dtype``,
             ``holdout``, and those of the machine

    ``record`` is the content of stats.json. Raises UsageError for data that do not fit the model.

    >>> ptqpipe.calibrate("MODEL", "TEXT.txt", "STATS", samples=8, seqlen=64)
    <calibrate STATS: modules 22, samples 8 of 64 tokens, held out 1, time ... s>
    """
    chosen = {**options, **({"moments": names_in(options["moments"])} if "moments" in options else {})}
    with data_names(data) as names:
        done = calibrate_stage.calibrate(
            model,
            names,
            Path(out),
            options=into(calibrate_stage.CalibrateOptions, chosen),
            mode=mode_of(options),
            machine=machine_of(options, memory=COMPUTING, waits=False),
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


_OWN_TEXT = keywords_of(GenerateOptions, "temperature", "length", "prompts")


@command(_OWN_TEXT, {"overwrite": (bool, False)}, run_keywords(COMPUTING), DEVICE)
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
    own = {name: value for name, value in options.items() if name in _OWN_TEXT}
    own["temperature"] = tuple(temperature) if isinstance(temperature, Iterable) else (temperature,)
    own["length"] = tuple(length) if isinstance(length, Iterable) else (length,)
    machine = machine_of(options, memory=COMPUTING, waits=False)
    with data_names(prompts) as names:
        chosen = GenerateOptions(**own, prompts=tuple(names))
        done = generate_stage.generate(
            model, Path(out), options=chosen, overwrite=options.get("overwrite", False), machine=machine
        )
    content = done.content
    facts = {"windows": f"{content['samples']} of {content['seqlen']} tokens", "held out": str(content["held_out"])}
    return finished("generate", done, lambda done: f"{done.out}: {facts}", facts)


@command(keywords_of(TransformOptions, "apply"), run_keywords(), RESTART)
def transform(
    model: str | Path, apply: str | Iterable[str], out: str | Path, *, stats: str | Path | None = None, **options: Any
) -> Result:
    """Folds smoothing factors or rotations into a float model, which then computes the same and quantizes better.

    apply    transforms in their order: smoothquant, awq, aqas, smooth_swiglu, rotate
    stats    folder of `calibrate`; only rotations need none
    options  as ``ptqpipe transform`` has them: ``alpha``, ``powers_of_two``, ``edges``, ``block``, ``untie``,
             ``format``, ``dtype``, ``shard_bytes``, and those of the machine

    >>> ptqpipe.transform("MODEL", "smoothquant", "SMOOTH", stats="STATS")
    <transform SMOOTH: weights 21, size 4.47 MB, time ... s>
    """
    chosen = into(TransformOptions, options, apply=",".join(names_in(apply)))
    done = transform_stage.transform(
        model,
        Path(out),
        stats=path_or_none(stats),
        options=chosen,
        mode=mode_of(options),
        machine=machine_of(options),
    )
    return checkpoint("transform", done, transform_stage.render)


_TUNING = {"steps": (int | None, None), "field": (str | None, None)}


@command(
    keywords_of(tune_options.TuneOptions, "settings", "data_field"),
    _TUNING,
    recipe_keywords("container"),
    run_keywords(COMPUTING),
    RESTART,
    DEVICE,
)
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
    """Learns how a model's weights are rounded, into a folder of codes for ``convert(rounding=...)``.

    data     as `calibrate` takes them
    options  as ``ptqpipe tune`` has them: ``samples``, ``seqlen``, ``seed``, ``field``, ``method``, ``metric``,
             ``share``, ``train``, ``steps``, ``container``, and those of the machine

    ``record`` is the content of rounding.json.

    >>> ptqpipe.tune("MODEL", "TEXT.txt", "CODES", samples=8, seqlen=64)
    <tune CODES: method gptq, weights 21, decoder layers improved ... of 3, time ... s>
    """
    settings = tune_options.settings_of(options.get("steps"), seed=options.get("seed", 0))
    with data_names(data) as names:
        done = tune_stage.tune(
            model,
            names,
            Path(out),
            recipe=recipe_of(options, format=format, ignore=ignore),
            recipe_path=recipe_path(recipe),
            stats=path_or_none(stats),
            options=into(tune_options.TuneOptions, options, data_field=options.get("field"), settings=settings),
            mode=mode_of(options),
            machine=machine_of(options, memory=COMPUTING, waits=False),
        )
    blocks = done.content["blocks"].values()
    facts = {
        "method": str(done.content["method"]),
        "weights": str(len(done.content["weights"])),
        "decoder layers improved": f"{sum(bool(block['kept']) for block in blocks)} of {len(blocks)}",
    }
    return finished("tune", done, tune_text.render, facts)


@command({"max_tokens": (int | None, None), "seqlen": (int | None, None), "reader": (str | None, None)}, run_keywords())
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
    options  ``reader``, the program that will load the result (the command's ``--for``), and those of the machine

    ``record`` is what ``ptqpipe plan --json`` prints.

    >>> ptqpipe.plan("MODEL", "5bits", "mixed.yaml", stats="STATS")
    <plan mixed.yaml: bits per weight ..., formats ..., size ... MB>
    """
    target, reader = Path(out), options.get("reader")
    choices = PipelineOptions(formats=None if formats is None else names_in(formats), reader=reader)
    chosen = formats_for(choices)
    plan_stage.check_recipe_target(target)
    tokens, seqlen = options.get("max_tokens"), options.get("seqlen")
    outcome = plan_stage.plan_mixed(
        model,
        plan_stage.Budget.parse(budget),
        formats=chosen,
        sensitivity=sensitivity(path_or_none(stats), path_or_none(measure), target, tokens=tokens, seqlen=seqlen),
        machine=machine_of(options),
        container=None if reader is None else container_of_all(reader, chosen),
    )
    plan_stage.write_recipe(outcome, target)
    counts = outcome.counts(outcome.solution)
    facts = {
        "bits per weight": number(outcome.bits(outcome.solution), 3),
        "formats": " ".join(f"{count}x{name}" for name, count in counts.items()),
        "size": disk_size(outcome.file_bytes),
    }
    record = plan_text.to_json(outcome)
    return Result("plan", outcome, path=target, record=record, facts=facts, text=lambda: plan_text.render(outcome))
