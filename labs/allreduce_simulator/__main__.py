"""Compares plain and quantized AllReduces: errors by the arithmetic of the real ones, times by a model of machines.

    python -m labs.allreduce_simulator [--ranks 8..64] [--codec int8,nvfp4] [--only error|time] [--json] [--plot DIR]

Prints the errors of sums, from the real arithmetic; times, from a model of latency, bandwidth and codec speed; and the
message size from which quantizing pays. Lists have commas; a range of ranks means the powers of two in it.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from labs.allreduce_simulator.compare import TimeRow
from labs.allreduce_simulator.error import ErrorRow
from labs.allreduce_simulator.partials import read_partials
from labs.allreduce_simulator.request import BreakEven, codecs_of, error_rows, request_of, sources_of, time_rows
from labs.allreduce_simulator.text import as_dict, error_text, time_text
from ptqpipe.errors import UsageError
from ptqpipe.run.quantities import bytes_of


def size(text: str) -> int:
    """Bytes of ``1MiB``; argparse's error otherwise."""
    nbytes = bytes_of(text)
    if nbytes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 2GiB, 800MB or a number of bytes")
    return nbytes


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8..512", help="numbers of ranks: 8, 2,4 or 8..512 [8..512]")
    parser.add_argument("--codec", default="int8", help="of the messages; times are those of the first [int8]")
    parser.add_argument("--block", type=int, default=64, help="elements of a message that share a scale [64]")
    parser.add_argument("--hadamard", type=int, default=0, help="elements that are rotated together [0: none]")
    parser.add_argument("--scheme", help="whose errors are simulated [seven of them]")
    parser.add_argument("--values", default="gaussian", help="gaussian, t3, outliers, cancelling [gaussian]")
    parser.add_argument("--elements", type=int, default=1 << 16, help="in the message of each rank [65536]")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn values [0]")
    parser.add_argument("--partials", type=Path, help="a .safetensors file with partial sums, instead of drawn ones")
    parser.add_argument("--tensor", help="of --partials: the sums [ranks, ...], or a layer's inputs with --weight")
    parser.add_argument("--weight", help="of --partials: the layer's weight [outer, inner]")
    parser.add_argument("--node", type=int, default=8, help="ranks of a node, in hierarchical schemes [8]")
    parser.add_argument("--topology", help="machines whose times are modelled; ethernet-<G>g has G Gbit/s [all]")
    parser.add_argument("--size", type=size, action="append", default=[], help="of a message; repeatable [64KiB..1GiB]")
    parser.add_argument("--only", choices=["error", "time"])
    parser.add_argument("--plot", type=Path, metavar="DIR", help="folder to which plots are written as PNG files")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of tables")
    return parser.parse_args(words)


def compared(args: argparse.Namespace) -> None:
    """Computes and prints."""
    if args.partials is None and (args.tensor or args.weight):
        raise UsageError("--tensor and --weight belong to --partials; add it")
    if args.plot is not None:
        from labs.allreduce_simulator import plots  # without matplotlib this fails before anything is computed
    sources = sources_of(args.values, elements=args.elements, seed=args.seed)
    if args.partials is not None:
        sources = (read_partials(args.partials, tensor=args.tensor, weight=args.weight),)
    codecs = codecs_of(args.codec, block=args.block, hadamard=args.hadamard)
    request = request_of(args.ranks, codecs, sources, args.scheme, args.topology, args.node, tuple(args.size))
    times, evens = ([], []) if args.only == "error" else time_rows(request)
    errors = [] if args.only == "time" else list(error_rows(request))
    if args.json:
        rows: list[ErrorRow | TimeRow | BreakEven] = [*errors, *times, *evens]
        print("\n".join(json.dumps(as_dict(row)) for row in rows))
    else:
        halves = [error_text(errors)] if errors else []
        halves += [time_text(times, evens, request.topologies)] if times else []
        print("\n\n".join(halves))
    for path in [] if args.plot is None else plots.write_plots(args.plot, errors, times):
        print(f"{path} written", file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    """The exit code."""
    args = arguments(words)
    torch.set_num_threads(1)  # the tensors are small
    try:
        compared(args)
    except (UsageError, SafetensorError, OSError, ImportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
