"""`convert`, as a function: it returns a `Result`."""

import sys
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ptqpipe.api.calibration_data import Data, data_names
from ptqpipe.api.calls import command, machine_of, options_from, watched
from ptqpipe.api.result import Result, of_checkpoint, weight_facts
from ptqpipe.conversion import command as convert_stage
from ptqpipe.conversion.convert_summary import converted_text, missing_config
from ptqpipe.conversion.push import also_complete, check_push, push
from ptqpipe.errors import PtqWarning
from ptqpipe.pipeline import messages as pipeline_text
from ptqpipe.pipeline.command import PipelineResult, pipeline
from ptqpipe.pipeline.options import ConvertCommand
from ptqpipe.pipeline.prepare_alone import prepare_alone
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import disk_size


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
            result = _of_run(done)
        else:
            result = _convert(chosen, machine)
    if repository is not None:
        assert result.path is not None  # a conversion has one
        result.facts["uploaded to"] = push(result.path, repository)
    return result


def _convert(options: ConvertCommand, machine: Machine) -> Result:
    """A conversion alone."""
    with prepare_alone(options) as prepared:
        no_config = missing_config(prepared)
        if no_config is not None:
            warnings.warn(no_config, PtqWarning, stacklevel=4)
        done = convert_stage.convert(prepared, mode=options.mode, machine=machine)
    return of_checkpoint("convert", done, converted_text)


def _of_run(done: PipelineResult) -> Result:
    """The result of a conversion of several stages."""
    size = sum(file.stat().st_size for file in done.out.glob("*.safetensors"))
    facts = {**weight_facts(done.record), "size": disk_size(size), "time": f"{done.seconds:.1f} s"}
    shown = partial(pipeline_text.render, done)
    return Result(
        "convert", done, path=done.out, record=done.record, facts=facts, text=shown, evaluation=done.evaluation
    )
