"""Commands that write a checkpoint: convert, relayout, dequantize, transform, demo."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Given, command, machine_of, ranks_of, resume_hint, this_call
from ptqpipe.cli.parameters import (
    DEVICE,
    MODEL,
    OUT,
    PATH,
    RECIPE,
    STATS,
    Dtype,
    Size,
    names,
    pipeline_options,
    recipe_options,
    run_options,
)
from ptqpipe.errors import UsageError
from ptqpipe.recipe.options import PipelineOptions

if TYPE_CHECKING:
    from ptqpipe.conversion.conversion import Conversion
    from ptqpipe.run.machine import Machine


@command(
    example="""
ptqpipe convert MODEL
ptqpipe convert MODEL --data text.jsonl --eval held-out.txt --report
ptqpipe convert MODEL --budget 4.75bits --data self --for vllm -o OUT
"""
)
@click.argument("model")
@click.option("-o", "--out", type=PATH, help="Folder to write.  [default: <model>-<FORMAT>]")
@RECIPE
@STATS
@click.option(
    "--rounding",
    type=PATH,
    metavar="DIR",
    help="Folder of codes that `ptqpipe tune` learned. They bring their format, container and ignored modules along.",
)
@recipe_options()
@pipeline_options()
@click.option("--push", metavar="OWNER/NAME", help="Repository on the hub to which the result is uploaded.")
@DEVICE
@click.option("--dry-run", is_flag=True, help="Print what would be done and the exact size; read and write no weights.")
@run_options()
def convert(given: Given) -> None:
    """Quantize a model to a packed FP4 or FP8 checkpoint.

    MODEL is a folder, or a name on the hub. --data, --budget, --eval and --report add the stages that they need, such
    as calibration. Without them torchrun can divide the work among ranks; the output is the same.
    """
    if given.push is not None:
        from ptqpipe.conversion.push import check_push

        check_push(given.push)
    work = given.pipeline
    if work.asked:
        _pipeline(given, work)
        return
    from ptqpipe.checkpoint import check_output
    from ptqpipe.conversion import command as stage, convert_summary as tables
    from ptqpipe.conversion.prepare import best_with, prepare
    from ptqpipe.conversion.push import also_complete
    from ptqpipe.pipeline.call import for_reader
    from ptqpipe.run.machine import without_collections

    mode, machine = given.mode, given.machine(given.device)
    where = {"recipe_path": given.recipe_path, "stats": given.stats, "codes": given.rounding}
    recipe = given.recipe if work.reader is None else for_reader(work.reader, given.recipe, given.recipe_path)
    asked = {"out": given.out, "reader": work.reader, "requantize": work.requantize, "dry": given.dry_run}
    prepares = partial(prepare, given.model, options=best_with(recipe, **where), **asked, **where)
    if given.dry_run:
        with without_collections():  # until what is prepared is gone again: no look through all of it
            _dry_run(given, machine, prepares)
        return
    with prepares() as prepared:
        no_config = tables.missing_config(prepared)
        ranks = ranks_of()
        if ranks.rank == 0:
            _warn(given, no_config)
        pushed = also_complete(given.push if ranks.rank == 0 else None)
        with resume_hint(prepared.out, mode), _stop_is_interrupt(), pushed:
            if ranks.rank == 0 and not given.as_json:
                check_output(prepared.out, mode=mode)  # before the header, which says what will be done
                _warn(given, tables.missing_tokenizer(prepared))
                given.show(tables.header_text(prepared, machine))
            done = stage.convert(prepared, mode=mode, machine=machine, ranks=ranks)
    if done is not None:
        given.show(json.dumps(tables.converted_json(done)) if given.as_json else tables.converted_text(done))
        _upload(given, done.out)
        if no_config is None:  # nothing measures or serves what has none
            next_steps.say_next(given, next_steps.convert, done.out, _read_by_vllm(done.record, done.warnings))


def _dry_run(given: Given, machine: "Machine", prepares: Callable[[], "Conversion"]) -> None:
    """Says what a conversion would do. ``prepares`` decides it."""
    from ptqpipe.conversion import convert_summary as text

    with prepares() as prepared:
        _warn(given, text.missing_config(prepared))
        _warn(given, text.missing_tokenizer(prepared))
        plan = text.plan_json(prepared, machine) if given.as_json else text.plan_text(prepared, machine)
    given.show(plan if isinstance(plan, str) else json.dumps(plan))


def _upload(given: Given, out: Path) -> None:
    """To the hub, where the call asks for it."""
    from ptqpipe.conversion.push import push

    if given.push is not None:
        click.echo(f"uploaded to {push(out, given.push)}", err=given.as_json)


def _pipeline(given: Given, work: PipelineOptions) -> None:
    """All stages that the call needs, in one run."""
    from ptqpipe.conversion.push import also_complete
    from ptqpipe.pipeline import call, command as stage, messages as text
    from ptqpipe.pipeline.prepare_stages import prepare

    call.check_alone(stats=given.stats, rounding=given.rounding, dry_run=given.dry_run)
    if ranks_of().world > 1:
        raise UsageError(
            "with --data, --budget, --eval or --report convert is a single process; start it without torchrun"
        )
    mode, machine = given.mode, given.machine(given.device)
    prepared = prepare(given.model, given.recipe, given.recipe_path, given.out, work, mode, machine)
    prepared.command = this_call()
    with resume_hint(prepared.out, mode), _stop_is_interrupt(), also_complete(given.push):
        say = (lambda line: None) if given.as_json else given.show
        made = stage.run(prepared, say=say)
    given.tell(made, text)
    _upload(given, made.out)
    elsewhere = _read_by_vllm(made.record, prepared.warnings)
    next_steps.say_next(given, next_steps.convert, made.out, elsewhere, made.evaluation is not None, made.report)


def _read_by_vllm(record: Mapping[str, Any], warnings: Sequence[str]) -> bool:
    """Whether vLLM reads a checkpoint, and computes what its formats say."""
    return record["container"] != "ptqpipe" and not any(line.startswith("vLLM ") for line in warnings)


def _warn(given: Given, line: str | None) -> None:
    """A line on stderr, if there is one."""
    if line is not None:
        given.show(f"warning: {line}", err=True)


@contextmanager
def _stop_is_interrupt() -> Iterator[None]:
    """SIGTERM, a batch system's stop, ends meanwhile as cleanly as Ctrl-C. To be called in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@command(example="ptqpipe relayout CKPT --container modelopt")
@click.argument("ckpt", type=MODEL)
@click.option("--container", required=True, metavar="NAME", help="Layout to write; `ptqpipe formats` lists them.")
@click.option("-o", "--out", type=PATH, help="Folder to write.  [default: <ckpt>-<container>]")
@run_options()
def relayout(given: Given) -> None:
    """Rewrite a checkpoint in another container.

    The codes and scales of CKPT stay the same: nothing is quantized again.
    """
    from ptqpipe.checkpoint import name_of
    from ptqpipe.conversion.relayout import command as stage

    container = given.container.lower().replace("_", "-")
    out = given.out if given.out is not None else Path(f"{name_of(given.ckpt)}-{container}")
    with resume_hint(out, given.mode):
        done = stage.relayout(given.ckpt, out, container=given.container, **given.run)
    if done is not None:
        given.tell(done, stage)
        next_steps.say_next(given, next_steps.relayout, done.out, done.record["container"] != "ptqpipe")


@command(example="ptqpipe dequantize CKPT --dtype bf16")
@click.argument("ckpt", type=MODEL)
@click.option(
    "--dtype",
    type=Dtype("bf16", "fp16", "fp32", long=False),
    default="bf16",
    show_default=True,
    help="Float type of the weights that are written.",
)
@click.option("-o", "--out", type=PATH, help="Folder to write.  [default: <ckpt>-<dtype>]")
@run_options()
def dequantize(given: Given) -> None:
    """Write a quantized checkpoint as plain floats.

    Every tool that loads the original model loads the result.
    """
    from ptqpipe.checkpoint import name_of
    from ptqpipe.conversion import dequantize as stage

    out = given.out if given.out is not None else Path(f"{name_of(given.ckpt)}-{given.dtype}")
    with resume_hint(out, given.mode):
        done = stage.dequantize(given.ckpt, out, dtype=given.dtype, **given.run)
    if done is not None:
        given.tell(done, stage)
        next_steps.say_next(given, next_steps.dequantize, done.out)


@command(example="ptqpipe transform MODEL --apply smoothquant --stats stats -o smooth")
@click.argument("model")
@click.option(
    "--apply",
    required=True,
    metavar="NAMES",
    help="Transforms to apply, in order, with commas: smoothquant, awq, aqas, smooth_swiglu, rotate.",
)
@click.option(
    "--stats",
    type=PATH,
    metavar="DIR",
    help="Folder of statistics that `ptqpipe calibrate` wrote; Hadamard rotations need none.",
)
@click.option("--alpha", type=float, help="Exponent of the inputs in SmoothQuant, or the strength of Smooth-SwiGLU.")
@click.option(
    "--power-of-two", "powers_of_two", is_flag=True, help="Round factors to powers of two: exact in every float type."
)
@click.option(
    "--edges",
    type=names,
    metavar="KINDS",
    help="Between which layers factors move, with commas: from a norm to the layers that read it (norm), within latent "
    "attention (latent), from v_proj to o_proj (value), from up_proj to down_proj (up).  "
    "[default: each transform's own]",
)
@click.option(
    "--block",
    type=int,
    help="Channels rotated together, 16 to 256.  [default: 32; with --learn the largest that divides the hidden size]",
)
@click.option(
    "--learn",
    type=int,
    metavar="STEPS",
    default=0,
    help="Learn rotations for --format in this many steps, such as 200; needs --stats of --moments diagonal,pairs.  "
    "[default: 0, Hadamard matrices]",
)
@click.option("--untie", is_flag=True, help="Store an output head that is tied to the embedding separately.")
@click.option(
    "--format",
    metavar="NAME",
    default="nvfp4",
    show_default=True,
    help="Number format for which awq and aqas search and rotations are learned.",
)
@click.option(
    "--dtype",
    type=Dtype("bf16", "fp16", "fp32", long=False),
    help="Float type of the weights that are written.  [default: the source's if that is exact, else fp32]",
)
@click.option(
    "--shard-size", "shard_bytes", type=Size(), help="Size of the largest weight file.  [default: chosen by the total]"
)
@click.option("-o", "--out", **OUT, help="Folder to write.")
@run_options()
def transform(given: Given) -> None:
    """Fold smoothing factors or rotations into a model.

    The result computes the same function as MODEL and loses less when quantized. It needs statistics of its own:
    calibrate it again before `ptqpipe convert --stats`.
    """
    from ptqpipe.conversion.transform import command as stage
    from ptqpipe.conversion.transform.plan import TransformOptions

    with resume_hint(given.out, given.mode):
        options = given.into(TransformOptions)
        done = stage.transform(given.model, given.out, stats=given.stats, options=options, **given.run)
    if done is not None:
        given.tell(done, stage)
        next_steps.say_next(given, next_steps.transform)


@command(
    example="ptqpipe demo -o ptqpipe-demo",
    leaves=lambda given: (
        f"the formats that are finished are kept in {given.out}; another demo starts from the beginning"
    ),
)
@click.option(
    "-o", "--out", type=PATH, default=Path("ptqpipe-demo"), show_default=True, help="Folder for the checkpoints."
)
def demo(given: Given) -> None:
    """Convert a small built-in model to three formats.

    The checkpoints are verified, and a table shows what each format costs.
    """
    from ptqpipe.pipeline import demo as stage

    machine = machine_of(None, "cpu", 2 << 30, progress=False)
    stage.run_demo(given.out, machine=machine, show=given.show)
    next_steps.say_next(given, next_steps.demo, stage.SCHEMES[0])
