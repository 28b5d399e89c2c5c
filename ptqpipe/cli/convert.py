"""The convert command."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command, ranks_of, resume_hint, this_call
from ptqpipe.errors import UsageError, arg
from ptqpipe.pipeline.options import ConvertCommand
from ptqpipe.recipe.options import PipelineOptions

if TYPE_CHECKING:
    from ptqpipe.conversion.conversion import Conversion
    from ptqpipe.run.machine import Machine


@command(
    ConvertCommand,
    example="""
ptqpipe convert MODEL
ptqpipe convert MODEL --data text.jsonl --eval held-out.txt --report
ptqpipe convert MODEL --budget 4.75bits --data self --reader vllm -o OUT
""",
)
def convert(options: ConvertCommand, terminal: Terminal) -> None:
    """Quantize a model to a packed FP4 or FP8 checkpoint.

    MODEL is a folder, or a name on the hub. --data, --budget, --eval and --report add the stages that they need, such
    as calibration. Without them torchrun can divide the work among ranks; the output is the same.
    """
    if options.push is not None:
        from ptqpipe.conversion.push import check_push

        check_push(options.push)
    if options.has_stages:
        _pipeline(options, terminal)
        return
    from ptqpipe.checkpoint import check_output
    from ptqpipe.conversion import command as stage, convert_summary as tables
    from ptqpipe.conversion.push import also_complete
    from ptqpipe.pipeline.prepare_alone import prepare_alone
    from ptqpipe.run.machine import without_collections

    mode, machine = options.mode, terminal.machine(options, device=options.device)
    prepares = partial(prepare_alone, options)
    if options.dry_run:
        with without_collections():  # until what is prepared is gone again: no look through all of it
            _dry_run(terminal, machine, prepares)
        return
    with prepares() as prepared:
        no_config = tables.missing_config(prepared)
        ranks = ranks_of()
        if ranks.rank == 0:
            terminal.warn(no_config)
        pushed = also_complete(options.push if ranks.rank == 0 else None)
        with resume_hint(prepared.out, mode), _stop_is_interrupt(), pushed:
            if ranks.rank == 0 and not terminal.as_json:
                check_output(prepared.out, mode=mode)  # before the header, which says what will be done
                terminal.warn(tables.missing_tokenizer(prepared))
                terminal.show(tables.header_text(prepared, machine))
            done = stage.convert(prepared, mode=mode, machine=machine, ranks=ranks)
    if done is not None:
        terminal.show(json.dumps(tables.converted_json(done)) if terminal.as_json else tables.converted_text(done))
        _upload(options, terminal, done.out)
        if no_config is None:  # nothing measures or serves what has none
            elsewhere = _read_by_vllm(done.record, done.warnings)
            next_steps.say_next(terminal, next_steps.convert(options, done.out, elsewhere))


def _dry_run(terminal: Terminal, machine: "Machine", prepares: Callable[[], "Conversion"]) -> None:
    """Says what a conversion would do. ``prepares`` decides it."""
    from ptqpipe.conversion import convert_summary as text

    with prepares() as prepared:
        terminal.warn(text.missing_config(prepared))
        terminal.warn(text.missing_tokenizer(prepared))
        plan = text.plan_json(prepared, machine) if terminal.as_json else text.plan_text(prepared, machine)
    terminal.show(plan if isinstance(plan, str) else json.dumps(plan))


def _upload(options: ConvertCommand, terminal: Terminal, out: Path) -> None:
    """To the hub, where the call wants it."""
    from ptqpipe.conversion.push import push

    if options.push is not None:
        click.echo(f"uploaded to {push(out, options.push)}", err=terminal.as_json)


def _pipeline(options: ConvertCommand, terminal: Terminal) -> None:
    """All stages that the call needs, in one run."""
    from ptqpipe.conversion.push import also_complete
    from ptqpipe.pipeline import command as stage, messages as text
    from ptqpipe.pipeline.prepare_stages import prepare

    if ranks_of().world > 1:
        raise UsageError(
            f"with {arg('data')}, {arg('budget')}, {arg('eval')} or {arg('report')} convert is a single process; start "
            "it without torchrun"
        )
    mode, machine = options.mode, terminal.machine(options, device=options.device)
    recipe, work = options.recipe_options, options.part(PipelineOptions)
    prepared = prepare(options.model, recipe, options.recipe, options.out, work, mode, machine)
    prepared.command = this_call()
    with resume_hint(prepared.out, mode), _stop_is_interrupt(), also_complete(options.push):
        done = stage.run(prepared, say=(lambda line: None) if terminal.as_json else terminal.show)
    terminal.show_result(done, text)
    _upload(options, terminal, done.out)
    elsewhere, measured = _read_by_vllm(done.record, prepared.warnings), done.evaluation is not None
    next_steps.say_next(terminal, next_steps.convert(options, done.out, elsewhere, measured, done.report))


def _read_by_vllm(record: Mapping[str, Any], warnings: Sequence[str]) -> bool:
    """Whether vLLM reads a checkpoint, and computes what its formats say."""
    return record["container"] != "ptqpipe" and not any(line.startswith("vLLM ") for line in warnings)


@contextmanager
def _stop_is_interrupt() -> Iterator[None]:
    """SIGTERM, a batch system's stop, ends meanwhile as cleanly as Ctrl-C. To be called in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
