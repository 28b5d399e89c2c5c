"""After GPTQ in the order of the model, codes by the KL divergence of the whole model, all layers at once
(`descent.py`), and then, with these codes, what ``train`` names (`floats.py`).

The codes that GPTQ found lie beside the output until those that are learned from them are written. Each time that codes
are judged, on held-out samples of each source and on the sample text of the package, the state of descent goes to disk,
so that a killed run continues; what descent ends with goes into the journal before any layer is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.runner import BATCH_TOKENS
from ptqpipe.checkpoint import CheckpointReader, LayerFolder, is_sealed
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.errors import UsageError, arg
from ptqpipe.pipeline.tune import codes_folder
from ptqpipe.pipeline.tune.kl.choice import with_codes
from ptqpipe.pipeline.tune.kl.descent import DescentResult
from ptqpipe.pipeline.tune.kl.floats import TrainedTensor, check_train, unit_name, with_gain
from ptqpipe.pipeline.tune.kl.judging_text import sample_windows
from ptqpipe.pipeline.tune.kl.learn_codes import STATE_FILE, learn, memory_need, save_state
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.quantization.learned_codes import LearnedCodes, relative_change, sha256_of
from ptqpipe.run.machine import BASE_BYTES, Machine
from ptqpipe.run.quantities import option_size, option_size_above

FOUR_BIT_RATE = 0.01  # where inputs have 4 bits: at the usual one, too few codes move to make up for these
_FOUND = "found"  # folder beside the output with what descent ended with


def with_rate(prepared: Conversion, options: TuneOptions) -> TuneOptions:
    """The options with the rate of descent that belongs to the inputs' formats."""
    if not any(unit.scheme.activation.four_bits for unit in prepared.outputs.plan.units):
        return options
    return replace(options, settings=replace(options.settings, rate=FOUR_BIT_RATE))


def check(prepared: Conversion, samples: Samples, options: TuneOptions, machine: Machine) -> None:
    """UsageError for images, data too short for a part that is not learned from, windows longer than the sample text,
    tensors that cannot be trained, and too little memory."""
    if samples.images:
        raise UsageError(
            f"{arg('method', 'kl')} takes no rows with images; use {arg('method', 'gptq')}, or data without images"
        )
    rows, seqlen = len(samples.windows) + len(samples.held_out), samples.windows.shape[1]
    if rows <= max(1, BATCH_TOKENS // seqlen):
        raise UsageError(
            f"{arg('method', 'kl')} needs held-out samples, but the data give {rows} of {seqlen} tokens, which is one "
            f"batch; give {arg('samples', BATCH_TOKENS // seqlen + 1)} or more"
        )
    sample_windows(prepared, samples)
    if options.train:
        check_train(prepared, options.train)
    least = memory_need(prepared, options.train) + BASE_BYTES
    if least > machine.memory_bytes:
        raise UsageError(
            f"{arg('max_memory', option_size(machine.memory_bytes))} is too small for {arg('method', 'kl')}, which "
            f"has all decoder layers in memory; give {arg('max_memory', option_size_above(least))}, or "
            + arg("method", "gptq")
        )


def improve(
    prepared: Conversion, samples: Samples, folder: LayerFolder, options: TuneOptions, machine: Machine
) -> None:
    """Learns codes from those that GPTQ has found, and commits every decoder layer with them."""
    partial, layers = folder.paths.partial, list(codes_folder.layers_of(folder))
    weights = {key: entry for name in layers for key, entry in folder.done[name]["weights"].items()}
    with LearnedCodes.of_files(folder.files, {"weights": weights}) as stored:
        if codes_folder.ENDED not in folder.done or not is_sealed(partial / _FOUND / STATE_FILE):
            learned, floats, kept = learn(prepared, samples, stored, partial, options, machine)
            save_state(partial / _FOUND, {**learned.codes, **({} if floats is None else floats.floats)})
            entry = _told(learned) | {"moved": learned.moved}
            folder.commit(codes_folder.ENDED, entry | _trained(prepared, floats, kept, options))
        units = {member.key: unit for unit in prepared.outputs.plan.units for member in unit.members}
        shapes = {member.key: member.shape for unit in prepared.outputs.plan.units for member in unit.members}
        with CheckpointReader.open(partial / _FOUND) as reader:
            for name in layers:
                codes = {}
                for key in folder.done[name]["weights"]:
                    codes[key] = q = stored.of(key, units[key].scheme.fmt, shape=shapes[key])
                    if key in reader.entries:
                        codes[key] = q = with_codes(q, reader.read(key))
                    gain = unit_name(units[key])
                    if gain in reader.entries:
                        codes[key] = with_gain(q, reader.read(gain))
                # Not in the journal, which says what the start was: a run that is resumed writes all of these again.
                folder.done[name] |= codes_folder.write(folder.paths.growing, name, codes)
            trained = folder.done[codes_folder.ENDED].get("trained", {})
            codes_folder.write_trained(folder.paths.growing, {name: reader.read(name) for name in trained})


def _told(result: DescentResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("start", "result", "steps", "best")}


def _trained(
    prepared: Conversion, result: DescentResult | None, kept: Sequence[TrainedTensor], options: TuneOptions
) -> dict[str, Any]:
    """What rounding.json says of what was trained after the codes. "trained" has nothing where the start is kept."""
    if result is None:
        return {}
    tensors = {}
    for each in kept if result.best else ():
        before, after = prepared.source.reader.read(each.tensor), result.floats[each.tensor]
        change = relative_change(before, after)
        tensors[each.tensor] = {"kind": each.kind, "sha256": sha256_of(after), "change": change}
    return {"train": {"kinds": list(options.train), **_told(result)}, "trained": tensors}
