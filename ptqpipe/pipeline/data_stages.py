"""The stages before a format is chosen: text, rotations, statistics and factors."""

import shutil
from contextlib import suppress

from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions, GenerateOptions
from ptqpipe.calibration.own_text import generate
from ptqpipe.calibration.statistics import STATS_FILE
from ptqpipe.checkpoint import FOLDING_FILE, Paths, read_json_object
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import AlreadyComplete
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.run_plan import Pipeline


def generate_stage(run: Pipeline) -> None:
    """The model writes text to calibrate on."""
    if not run.own_text.exists():
        count, _ = validate.own_share(run.work.data, run.work.samples)
        options = GenerateOptions(**run.windows() | {"samples": count})
        generate(run.path, run.own_text, options=options, machine=run.computing)
    run.ledger.add(run.own_text)
    run.texts.append(f"{run.own_text}={run.own_weight!r}" if run.texts else str(run.own_text))


def rotate_stage(run: Pipeline) -> None:
    """Learns rotations, from pairs of inputs and gradients that only this stage needs."""
    assert run.preset is not None
    pairs, target = run.folder / "pairs", run.folder / "rotations"
    if not target.exists() or Paths.of(target).partial.exists():
        kinds = ("diagonal", "pairs")
        options = CalibrateOptions(
            **run.windows() | {"samples": run.pair_samples}, text_field=run.field_of_rows, moments=kinds, holdout=0
        )
        with suppress(AlreadyComplete):
            done = calibrate(run.path, run.texts, pairs, options=options, mode="resume", machine=run.computing)
            run.notes += [] if done is None else done.notes
        run.ledger.add(pairs / STATS_FILE)
        rotation = TransformOptions(
            run.preset.rotations, dtype="fp32", learn=run.preset.steps, format=run.format, untie=run.work.untie
        )
        with suppress(AlreadyComplete):
            find_factors(run.path, target, stats=pairs, options=rotation, mode="resume", machine=run.computing)
    run.ledger.add(target / FOLDING_FILE)
    if pairs.exists() and run.work.work_dir is None:
        shutil.rmtree(pairs)
    foldings = read_json_object(target / FOLDING_FILE)["foldings"]
    run.notes += [f"warning: {line}" for line in run.gainless(foldings)]
    if foldings:
        run.floats = target


def calibrate_stage(run: Pipeline) -> None:
    """Statistics of what is quantized: the model, or with the factors of the transform in it."""
    assert run.preset is not None
    assert run.stats is not None
    blocks = run.preset.transform and not run.scaled
    by_kl = run.work.budget is not None and run.preset.method == "gptq"  # as the codes will be chosen
    kinds = ("diagonal", *(["block"] if blocks else []), *(["kl"] if by_kl else []))
    options = CalibrateOptions(**run.windows(), text_field=run.field_of_rows, moments=kinds)
    with suppress(AlreadyComplete):
        done = calibrate(run.floats, run.texts, run.stats, options=options, mode="resume", machine=run.computing)
        run.notes += [] if done is None else done.notes
    run.ledger.add(run.stats / STATS_FILE)


def transform_stage(run: Pipeline) -> None:
    """Finds the factors of a scaling; what follows from statistics needs those of the scaled model, then."""
    assert run.preset is not None
    assert run.stats is not None
    target = run.folder / "factors"
    options = TransformOptions(transforms=run.preset.transform, format=run.format, dtype="fp32")
    with suppress(AlreadyComplete):
        find_factors(run.floats, target, stats=run.stats, options=options, mode="resume", machine=run.machine)
    run.ledger.add(target / FOLDING_FILE)
    run.floats = target
    if run.static:
        calibrate_stage(run)
