"""CPU time of error feedback and refinement (NVFP4, as `--algorithm gptq` does them) by the width of the weight, on
each instruction set.

Prints one JSON line an instruction set and width: milliseconds of this process on one thread, medians of the rounds, of
"feedback" (GPTQ with scales at block entry), "start" (refinement without a sweep: what its first slope costs) and
"refine" (three sweeps), the error before and behind refinement, and a hash of the codes, by which two builds compare.
Weights are normal, inputs normal with columns of different size; two inputs a column up to 2048 columns, one of five
beyond.

    python -m labs.feedback [--rows 512] [--widths 2048 5632] [--isas avx512 avx2] [--rounds 3] [--build NAME]
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.kernels.cpu_library import processor
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import metric, refine
from ptqpipe.quantization.gptq import codes_at_entry

FORMAT = get_format("nvfp4")


def moment_of(columns: int) -> torch.Tensor:
    """float32 [columns, columns] of inputs."""
    seeded = torch.Generator().manual_seed(0)
    inputs = 2 * columns if columns <= 2048 else columns // 5
    x = torch.randn(inputs, columns, generator=seeded) * torch.rand(columns, generator=seeded).mul(2).exp()
    moment = x.t() @ x / inputs
    return (moment + moment.t()) / 2


def timed(call: Callable[[], QTensor], rounds: int) -> tuple[float, QTensor]:
    """(median milliseconds of CPU time, the result)."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        q = call()
        found.append(1000 * (time.process_time() - start))
    return round(statistics.median(found), 1), q


def line_of(w: torch.Tensor, of_input: metric.Metric, rounds: int) -> dict[str, object]:
    """What is printed of one weight [n, K], but for its name."""
    g, blocks = w.abs().amax() / FORMAT.max_product, refine.block_metrics(of_input.moment, FORMAT)

    def refined(sweeps: int) -> Callable[[], QTensor]:
        return lambda: refine.refine(q, w, moment=of_input.moment, sweeps=sweeps, blocks=blocks)

    feedback, q = timed(lambda: codes_at_entry(w, FORMAT, metric=of_input, global_scale=g), rounds)
    start, _ = timed(refined(0), rounds)
    sweeps, better = timed(refined(3), rounds)
    before, after = (metric.output_error(w - found.dequantize(), of_input.moment) for found in (q, better))
    written = hashlib.sha256(better.data.numpy().tobytes() + better.scales.view(torch.uint8).numpy().tobytes())
    times = {"feedback": feedback, "start": start, "refine": sweeps}
    return times | {"error": [round(before, 5), round(after, 5)], "codes": written.hexdigest()[:12]}


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 5632])
    parser.add_argument("--isas", nargs="+", default=list(cpu.isas()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--build", default="", help="what the lines call this build")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for columns in args.widths:
        moment = moment_of(columns)
        of_input = metric.make_metric(moment, order=metric.descending(moment, group=FORMAT.block[1]))
        w = 0.02 * torch.randn(args.rows, columns, generator=torch.Generator().manual_seed(1))
        for isa in args.isas:
            cpu.force_isa(isa)
            line = {"columns": columns, "rows": args.rows, "isa": isa, "build": args.build, "cpu": processor()[0]}
            print(json.dumps(line | line_of(w, of_input, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
