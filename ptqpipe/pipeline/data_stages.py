"""The stages before a format is chosen: text, rotations, statistics and factors."""

import shutil
from contextlib import suppress

from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import SAMPLE_LENGTH
from ptqpipe.calibration.options import CalibrateOptions, GenerateOptions
from ptqpipe.calibration.own_text import generate
from ptqpipe.calibration.pairs import most_pairs
from ptqpipe.calibration.statistics import STATS_FILE, of_all_experts
from ptqpipe.checkpoint import FOLDING_FILE, Paths, read_json_object
from ptqpipe.checkpoint.tensor_names import layer_of
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import AlreadyComplete
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.run_plan import Pipeline
from ptqpipe.recipe.weight_map import WeightMap

LEAST_ROWS = 32  # of text to learn rotations from, where there are so many


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
        windows = run.windows()
        with Source.open(run.path) as source:
            windows["samples"] = pair_samples(source, samples=windows["samples"], seqlen=windows["seqlen"])
        options = CalibrateOptions(**windows, text_field=run.field_of_rows, moments=kinds, holdout=0)
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


def pair_samples(source: Source, *, samples: int, seqlen: int | None) -> int:
    """How many of the samples rotations are learned from: those that have as many tokens as pairs are kept of, but no
    fewer than some rows of text."""
    text = source.reader.config.get("text_config")
    configs = [part for part in (text, source.reader.config) if isinstance(part, dict)]
    keys = "max_position_embeddings", "n_positions"
    positions = [value for part in configs for key in keys if isinstance(value := part.get(key), int)]
    length = seqlen or min(SAMPLE_LENGTH, next(iter(positions), 0) or SAMPLE_LENGTH)
    return min(samples, max(LEAST_ROWS, -(-most_pairs(_columns(source)) // length)))


def _columns(source: Source) -> int:
    """Sum over the inputs of all linear layers of the decoder; experts of a layer share theirs."""
    weights = WeightMap.of(source)
    columns = {of_all_experts(name): member.shape[1] for name, member in weights.weights.items()}
    apart = {member.source.tensor for member in weights.weights.values()}
    for name, stack in weights.stacks.items():
        for expert, member in stack.items():
            if member.source.tensor not in apart:
                columns[of_all_experts(f"{name}[{expert}]")] = member.shape[1]
    return sum(count for name, count in columns.items() if layer_of(name) is not None)


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
