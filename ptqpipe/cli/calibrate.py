"""Commands that prepare a conversion: calibrate, generate, tune, plan."""

import json

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Given, command, devices_of, ranks_of, resume_hint
from ptqpipe.cli.parameters import (
    COMPUTES,
    DEVICE,
    OUT,
    PATH,
    QUIET,
    RECIPE,
    STATS,
    computing_dtype,
    data_options,
    names,
    pipeline_options,
    recipe_options,
    run_options,
    window_options,
)
from ptqpipe.errors import UsageError


@command(
    example="""
ptqpipe calibrate MODEL --data text.jsonl -o stats
ptqpipe calibrate MODEL --data wikitext:wikitext-2-raw-v1:train -o stats
"""
)
@click.argument("model")
@data_options("Windows of text that the model runs on.", "Seed that chooses the windows.")
@click.option(
    "--holdout",
    type=int,
    metavar="N",
    help="Held-out windows, on which convert compares its result with plain rounding; they double the size of the "
    "moments.  [default: samples / 8]",
)
@click.option(
    "--moments",
    type=names,
    default="diagonal,full",
    show_default=True,
    metavar="KINDS",
    help="Second moments of the inputs to collect, with commas: diagonal, block (16x16), full. GPTQ, the default of "
    "convert --stats, needs full, which takes 4 bytes for every pair of a layer's inputs, twice with held-out windows. "
    "diagonal,block is small and enough for convert --algorithm rtn. kl adds a backward pass: plan then minimizes KL "
    "divergence, and so does convert --stats if full is given, too. pairs adds a backward pass that stores inputs and "
    "gradients of some tokens, for transform --learn.",
)
@computing_dtype("fp32", "fp64", "bf16", "fp16", "auto")
@click.option("-o", "--out", **OUT, help="Folder of statistics to write.")
@click.option(
    "--device",
    metavar="DEVICE",
    default="cpu",
    show_default=True,
    help="Device that computes: cpu, cuda:N, cuda (all GPUs share the samples; under torchrun one GPU per rank), auto.",
)
@run_options(computes=True, spills="samples")
def calibrate(given: Given) -> None:
    """Collect statistics of a model's linear inputs.

    MODEL, a folder or a name on the hub, runs on text one decoder layer at a time.
    """
    import torch

    from ptqpipe.calibration import command as stage, summary as text

    devices = devices_of(given.device)
    machine = given.machine(devices[0], waits=False)
    with resume_hint(given.out, given.mode):
        done = stage.calibrate(
            given.model,
            given.data,
            given.out,
            options=given.into(stage.CalibrateOptions),
            mode=given.mode,
            machine=machine,
            ranks=ranks_of(),
            devices=[machine.device, *map(torch.device, devices[1:])],
            warn=lambda line: given.show(f"warning: {line}", err=True),
            log=given.log,
        )
    if done is None:
        return
    given.tell(done, text)
    next_steps.say_next(given, next_steps.calibrate)


@command(example="ptqpipe generate MODEL --samples 128 --seqlen 512 -o own.jsonl")
@click.argument("model")
@window_options(
    "Windows of text to calibrate on; one more is written for every 8 of them, which calibrate holds out.",
    "Seed of the random draws.",
)
@click.option(
    "--temperature",
    type=float,
    multiple=True,
    default=(1.0,),
    metavar="X",
    help="Sampling temperature, up to 2. Repeatable: windows alternate between the values.  [default: 1]",
)
@click.option(
    "--length",
    type=int,
    multiple=True,
    metavar="N",
    help="Tokens in each text; several texts fill a window. Repeatable: windows alternate between the values.  "
    "[default: a window]",
)
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    help="Prompts that the texts begin with: each a row of the file, as --data reads it, cut to half of --length. "
    "Repeatable.  [default: one random token]",
)
@computing_dtype("fp32", "bf16", "fp16", "auto")
@click.option("-o", "--out", **OUT, help="File of token ids to write (.jsonl).")
@COMPUTES
@DEVICE
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@QUIET
def generate(given: Given) -> None:
    """Let a model generate its own calibration text.

    For when you have no text: calibrate and tune take the file as --data.
    """
    from ptqpipe.calibration import own_text as stage

    machine = given.machine(given.device, waits=False)
    done = stage.generate(
        given.model, given.out, options=given.into(stage.GenerateOptions), overwrite=given.overwrite, machine=machine,
        log=given.log,
    )  # fmt: skip
    samples, held_out, seqlen = (done.content[name] for name in ("samples", "held_out", "seqlen"))
    given.show(
        f"{done.out}: {samples} windows of {seqlen} tokens and {held_out} more to hold out, in {done.seconds:.1f} s"
    )
    windows = ["--samples", samples, "--seqlen", seqlen]
    next_steps.say_next(given, next_steps.generate, windows)


@command(
    example="""
ptqpipe tune MODEL --data text.jsonl -o codes
ptqpipe tune MODEL --data text.jsonl --format nvfp4_w4a4 --method kl -o codes
"""
)
@click.argument("model")
@data_options("Windows of text to learn from.", "Seed that chooses the windows and their order.")
@RECIPE
@STATS
@recipe_options("container", "rotate")
@click.option(
    "--method",
    type=click.Choice(["gptq", "kl", "layerwise"]),
    default="gptq",
    show_default=True,
    help="How codes, the quantized values, are found: by GPTQ in the order of the model, each layer compensating for "
    "the error of earlier layers (gptq), by that and then gradient descent on the KL divergence of the whole model, "
    "held in memory (kl), or by GPTQ on each layer independently, in half the time (layerwise).",
)
@click.option(
    "--metric",
    type=click.Choice(["kl", "output"]),
    help="Objective of GPTQ: the KL divergence of the model, estimated with gradients from a backward pass (kl), or "
    "the squared error of each layer's output, in half of the time (output).  [default: kl; of layerwise, output]",
)
@click.option(
    "--share",
    type=float,
    metavar="F",
    help="Fraction of the error of earlier layers that each layer compensates for, 0 to 1; for --method gptq and kl.  "
    "[default: 0.5]",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Steps of gradient descent, for --method kl.  [default: 100]",
)
@click.option(
    "--train",
    type=names,
    default="",
    metavar="KINDS",
    help="After the codes, also train tensors that stay float, with commas: head, embeddings, norms, biases, and "
    "global for the global scales; for --method kl. The record, ptqpipe.json, lists the trained tensors.  "
    "[default: none]",
)
@click.option("-o", "--out", **OUT, help="Folder of codes to write.")
@DEVICE
@run_options(computes=True, spills="samples")
def tune(given: Given) -> None:
    """Learn how a model's weights are rounded.

    MODEL is tuned one decoder layer at a time, starting from what convert would write with these options.
    `ptqpipe convert MODEL --rounding OUT` then writes the result.
    """
    from ptqpipe.pipeline.tune import command as stage, tune_options as of_tune, tune_summary as text

    if given.share is not None and given.method == "layerwise":
        raise UsageError("--share belongs to --method gptq and kl; add it, or leave --share out")
    if given.train and given.method != "kl":
        raise UsageError("--train belongs to --method kl; add it, or leave --train out")
    if given.steps is not None and given.method != "kl":
        raise UsageError("--steps belongs to --method kl; add it, or leave --steps out")
    options = given.into(
        of_tune.TuneOptions,
        data_field=given.field,
        share=of_tune.SHARE if given.share is None else given.share,
        settings=of_tune.settings_of(given.steps, seed=given.seed),
    )
    machine = given.machine(given.device, waits=False)
    with resume_hint(given.out, given.mode):
        done = stage.tune(
            given.model,
            given.data,
            given.out,
            recipe=given.recipe,
            recipe_path=given.recipe_path,
            stats=given.stats,
            options=options,
            mode=given.mode,
            machine=machine,
            log=given.log,
        )
    given.tell(done, text)
    next_steps.say_next(given, next_steps.tune)


def _left_of_plan(given: Given) -> str:
    if given.measure is None:
        return "nothing is written"
    return f"what is measured is kept in {given.out}.measured.jsonl, and the same command continues from there"


@command(
    example="""
ptqpipe plan MODEL --budget 5.5bits --stats stats -o mixed.yaml
ptqpipe plan MODEL --budget 9GB --measure text.txt --for vllm -o mixed.yaml
""",
    leaves=_left_of_plan,
)
@click.argument("model")
@click.option(
    "--budget", required=True, metavar="4.75bits|9GB", help="Bits per weight, or the size of all weights on disk."
)
@click.option(
    "--formats",
    type=names,
    metavar="A,B,...",
    help="Formats to choose from, with commas.  [default: nvfp4,mxfp4a16,mxfp8a16,fp8_dynamic,keep]",
)
@pipeline_options("reader")
@click.option(
    "--stats",
    type=PATH,
    metavar="DIR",
    help="Folder of statistics that `ptqpipe calibrate` wrote. The sensitivity of a layer is then the KL divergence "
    "that its error adds (with calibrate --moments kl), or else its output error.",
)
@click.option(
    "--measure",
    type=PATH,
    metavar="FILE",
    help="Text on which the KL divergence of each layer is measured as its sensitivity.",
)
@click.option("--max-tokens", type=int, metavar="N", help="Tokens of the --measure text to use.  [default: 4096]")
@click.option(
    "--seqlen",
    type=int,
    metavar="N",
    help="Tokens in each window of the --measure text.  [default: the model's positions, at most 2048]",
)
@click.option("-o", "--out", **OUT, help="Recipe file to write.")
@run_options(restart=False)
def plan(given: Given) -> None:
    """Choose a format for every layer under a budget.

    Integer programming minimizes the sum of sensitivities and writes a recipe for convert. Without --stats and
    --measure the sensitivity of a layer is the error of its weights. Results of --measure are kept in
    OUT.measured.jsonl, from which an interrupted call continues.
    """
    from ptqpipe.pipeline import call
    from ptqpipe.pipeline.budget import command as stage, plan_summary as text
    from ptqpipe.pipeline.budget.measure import sensitivity

    costs = sensitivity(given.stats, given.measure, given.out, tokens=given.max_tokens, seqlen=given.seqlen)
    stage.check_recipe_target(given.out)
    formats = call.formats_for(given.pipeline)
    allocation = stage.plan_mixed(
        given.model,
        stage.Budget.parse(given.budget),
        formats=formats,
        sensitivity=costs,
        machine=given.machine(),
        container=None if given.reader is None else call.container_of_all(given.reader, formats),
        log=given.log,
    )
    stage.write_recipe(allocation, given.out)
    if given.as_json:
        click.echo(json.dumps(text.to_json(allocation)))
        return
    given.show(f"{text.render(allocation)}\n{given.out} is the recipe")
    next_steps.say_next(given, next_steps.plan)
