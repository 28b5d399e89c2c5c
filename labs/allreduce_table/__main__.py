"""EQuARX's numbers beside ours: errors by exact numerics, times by the model; then every codec, then a real model.

EQuARX (arXiv 2506.17615) prints, for 4096 x 4096 normal numbers on 8 TPU v5e chips, the mean squared error and the
speed-up of four all-reduces, and the prefill time of Gemma 3 27B on 16. One JSON line a row; ``agrees`` says how far
off ours is, and a table of the comparison goes to stderr. Exit 1 when a row is further off than it was when written.

    python -m labs.allreduce_table [--elements 1048576] [--model DIR] > labs/allreduce_table/results.jsonl
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from labs.allreduce_simulator.codecs import PLAIN, get_rounding
from labs.allreduce_simulator.error import Case, ErrorRow, measure, model_error, rounding_error
from labs.allreduce_simulator.inputs import Inputs, drawn, row_parallel
from labs.allreduce_simulator.schemes import get_scheme
from labs.allreduce_simulator.time import MessageSize, seconds
from labs.allreduce_simulator.topologies import get_topology
from ptqpipe.errors import UsageError

THEIR_BLOCKS = (64, 128)  # they name none: their errors lie between those of these two, and only 128 is judged
ERRORS = {"ring": 0.0014, "semi-loop": 0.001, "ring-ag": 0.0003, "ring-cast": 0.13}
SPEEDUPS = {"ring": 1.8, "semi-loop": 1.6, "ring-ag": 1.3, "ring-cast": 1.9}
PREFILL_MS = {2048: (111.44, 87.24), 4096: (242.57, 194.87), 8192: (550.36, 452.97)}
LAYERS, WIDTH = 62, 5376  # of Gemma 3 27B, two all-reduces a layer
LIMITS = {"mse": 0.10, "speedup": 0.04, "saved_ms": 0.10}  # largest deviations
CODECS = (("int8", 32), ("int8", 64), ("int8", 128), ("int8", 256), ("fp8", 128), ("mxfp8", 32), ("int6", 32),
          ("int4", 32), ("nvfp4", 16))  # fmt: skip
STUDIED = ("ring-ag", "ring", "semi-loop", "two-shot", "one-shot")
DATA = ("gaussian", "t3", "outliers", "cancelling")


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of theirs and ours. ``digits`` tells whether ours rounds to what they print."""

    kind: str
    row: str
    theirs: float
    ours: float
    deviation: float
    agrees: str


def compared(kind: str, row: str, theirs: float, ours: float, digits: int) -> Compared:
    """``digits`` after the point are what they print."""
    deviation = ours / theirs - 1
    same = round(ours, digits) == theirs
    return Compared(kind, row, theirs, ours, deviation, "as printed" if same else f"within {abs(deviation):.1%}")


def errors(elements: int) -> Iterator[Compared]:
    """Their mean squared errors, and ours."""
    source = drawn("gaussian", elements)
    for name, theirs in ERRORS.items():
        cast = name == "ring-cast"
        for codec in [PLAIN["e5m2-cast"]] if cast else [get_rounding("int8", block) for block in THEIR_BLOCKS]:
            (row,) = measure([Case(get_scheme(name), codec)], source=source, ranks=8, output=torch.float32)
            yield compared("mse", f"{name} {codec.name}", theirs, row.mse, 2 if cast else 4)


def times() -> Iterator[Compared]:
    """Their speed-ups over bfloat16, and the milliseconds that a prefill saves."""
    topology, message = get_topology("tpu-v5e"), MessageSize(4096 * 4096)
    plain = seconds("ring-bf16", topology, ranks=8, message=message)
    for name, theirs in SPEEDUPS.items():
        ours = plain / seconds(name, topology, ranks=8, message=message)
        yield compared("speedup", name, theirs, ours, 1)
    for tokens, (before, after) in PREFILL_MS.items():
        message = MessageSize(tokens * WIDTH)
        saved = seconds("ring-bf16", topology, ranks=16, message=message)
        saved -= seconds("semi-loop", topology, ranks=16, message=message)
        yield compared("saved_ms", f"prefill of {tokens} tokens", before - after, 2 * LAYERS * saved * 1e3, 2)


def studies(elements: int) -> Iterator[ErrorRow]:
    """Every codec by scheme on 8 ranks (absolute, float32 result), then by data on 4 (as a model gets it)."""
    for name, block in CODECS:
        codec = get_rounding(name, block)
        rounding = rounding_error(codec)
        cases = [Case(get_scheme(s), codec, model_error(s, rounding, ranks=8, output=0.0)) for s in STUDIED]
        yield from measure(cases, source=drawn("gaussian", elements), ranks=8, output=torch.float32)
    codecs = [get_rounding(name, block) for name, block in CODECS]
    codecs.append(get_rounding("int8", 64, rotate=64))
    for data in DATA:
        cases = [Case(get_scheme("two-shot"), codec) for codec in codecs]
        cases.append(Case(get_scheme("ring-bf16"), PLAIN["bf16"]))
        yield from measure(cases, source=drawn(data, elements), ranks=4)


def layers_of(folder: Path, text: str, tokens: int) -> Iterator[Inputs]:
    """Inputs and weight of every row-parallel linear of a model that reads ``text``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> "object":
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs[name] = args[0].detach().reshape(-1, args[0].shape[-1])

        return hook

    linears = {n: m for n, m in model.named_modules() if n.endswith(("o_proj", "down_proj"))}
    for name, module in linears.items():
        module.register_forward_pre_hook(keep(name))
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        model(ids)
    for name, module in linears.items():
        yield row_parallel(name, inputs[name], module.weight.detach())


def real(folder: Path, tokens: int) -> Iterator[ErrorRow]:
    """The partials of a model's own layers on 2, 4 and 8 ranks."""
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    codecs = [get_rounding("int8", 64), get_rounding("int8", 64, rotate=64), get_rounding("fp8", 128)]
    for source in layers_of(folder, text, tokens):
        for ranks in (2, 4, 8):
            cases = [Case(get_scheme("two-shot"), codec) for codec in codecs]
            cases += [Case(get_scheme("ring"), codecs[0]), Case(get_scheme("ring-bf16"), PLAIN["bf16"])]
            yield from measure(cases, source=source, ranks=ranks)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="EQuARX's numbers beside ours.")
    parser.add_argument("--elements", type=int, default=1 << 20, help="of one rank's message")
    parser.add_argument("--model", type=Path, help="a model folder with heldout.txt [the demo model]")
    parser.add_argument("--tokens", type=int, default=256, help="that the model reads")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    rows = [*errors(options.elements), *times()]
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)
        print(f"{row.kind:9} {row.row:28} theirs {row.theirs:8g}  ours {row.ours:9.4g}  {row.agrees}", file=sys.stderr)
    try:
        for found in studies(options.elements):
            print(json.dumps({"kind": "error"} | asdict(found)), flush=True)
        folder = options.model or Path(__file__).resolve().parents[2] / "ptqpipe" / "demo_model"
        for found in real(folder, options.tokens):
            print(json.dumps({"kind": "model"} | asdict(found)), flush=True)
    except (UsageError, ImportError) as error:
        sys.exit(str(error))
    judged = [r for r in rows if r.agrees != "as printed" and not r.row.endswith("/64")]
    broken = [r for r in judged if abs(r.deviation) > LIMITS[r.kind]]
    for row in broken:
        print(f"{row.row} was within {LIMITS[row.kind]:.0%}: {row}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
