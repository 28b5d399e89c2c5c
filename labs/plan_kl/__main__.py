"""What `plan` loses when it chooses by output errors, and when it chooses by KL divergence (calibrate --moments kl):
with tokens taken as independent, and by windows.

    python -m labs.plan_kl MODEL --stats STATS --text FILE [--bits 4.75 5.5 6.5] [--results FILE]

STATS is what `ptqpipe calibrate MODEL --moments diagonal,kl` wrote. For each budget and each of the three, every weight
gets its nearest codes in the format that was chosen, and the mean KL divergence to the float model is measured. Appends
and prints a line of JSON for each. Needs the hf and plan extras.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.calibration.statistics import STATS_FILE
from ptqpipe.calibration.store import OUTPUTS_FILE
from ptqpipe.check.evaluate.cache import KeptLogits
from ptqpipe.check.evaluate.scores import score
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.kernels.cpu_library import processor
from ptqpipe.pipeline.budget.command import Budget, MixedPlan, plan_mixed
from ptqpipe.pipeline.budget.plan_units import DEFAULT_FORMATS, KEEP
from ptqpipe.run.machine import Machine
from ptqpipe.runtime.find_weight import find_place
from ptqpipe.runtime.loading import load_model, load_tokenizer


@contextmanager
def quantized(model: Any, source: Source, plan: MixedPlan) -> Iterator[None]:
    """Meanwhile the model has the nearest codes of the plan's formats."""
    saved = []
    with torch.no_grad():
        for group in plan.groups:
            for member in group.members:
                if plan.chosen[group.id] != KEEP:
                    w = SourceRows(source, member.source, shape=member.shape).rows(0, member.shape[0]).float()
                    place = find_place(model, member, w)
                    saved.append((place, w))
                    place.copy_(ptqpipe.quantize(w, plan.chosen[group.id]).dequantize())
        yield
        for place, w in saved:
            place.copy_(w)


def without(stats: Path, folder: Path, kinds: tuple[str, ...]) -> Path:
    """A copy of statistics in ``folder`` that lacks such tensors of the reverse pass."""
    shutil.copytree(stats, folder)
    tensors = load_file(folder / OUTPUTS_FILE)
    kept = {name: t for name, t in tensors.items() if not name.rpartition(".")[2].startswith(kinds)}
    save_file(kept, folder / OUTPUTS_FILE)
    content = json.loads((folder / STATS_FILE).read_text(encoding="utf-8"))
    del content["files"][OUTPUTS_FILE]  # its hash
    (folder / STATS_FILE).write_text(json.dumps(content), encoding="utf-8")
    return folder


def main() -> None:
    """Plans, measures and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.75, 5.5, 6.5])
    parser.add_argument("--formats", default=",".join(DEFAULT_FORMATS))
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    text = read_text(args.text, lambda: load_tokenizer(args.model), max_tokens=args.tokens)
    model = load_model(args.model, activations="none")
    reference = KeptLogits(model, text.tokens, args.window, begin=text.begin)
    with Source.open(args.model) as source, tempfile.TemporaryDirectory() as folder:
        by_outputs = without(args.stats, Path(folder) / "outputs", ("gradient_", "output_moment"))
        by_tokens = without(args.stats, Path(folder) / "tokens", ("gradient_",))
        for bits in args.bits:
            for how, stats in (("output errors", by_outputs), ("KL by tokens", by_tokens), ("KL", args.stats)):
                plan = plan_mixed(
                    args.model,
                    Budget(bits=bits),
                    formats=args.formats.split(","),
                    sensitivity=stats,
                    machine=Machine(workers=1),
                )
                with quantized(model, source, plan):
                    found = score(model, text.tokens, window=args.window, begin=text.begin, reference=reference)
                assert found.kl is not None
                line = {
                    "model": args.model.parent.name,
                    "budget_bits": bits,
                    "bits": round(plan.bits(plan.solution), 4),
                    "costs": how,
                    "predicted": round(plan.solution.cost, 7),
                    "kl": round(float(found.kl.double().mean()), 7),
                    "tokens": len(text.tokens),
                    "cpu": processor()[0],
                    "threads": torch.get_num_threads(),
                }
                print(json.dumps(line), flush=True)
                if args.results is not None:
                    with open(args.results, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
