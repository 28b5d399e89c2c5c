"""Ranks of a tensor-parallel group as processes of this machine: what the tests of parallel loading run.

One start of the processes does many jobs, since starting them costs more than the jobs.
"""

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to load and run.

    options   those of ``ptqpipe.runtime.load``
    reduce    "plain" sums by torch, "counting" notes the shapes besides
    hf        by transformers' ``from_pretrained`` with a ``distributed_config`` instead
    """

    name: str
    path: Path
    tokens: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 4
    reduce: str = "plain"
    hf: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What one rank found: float32 logits of the prompt, greedy continuation, bytes read of tensors, sums' shapes."""

    logits: torch.Tensor
    greedy: torch.Tensor
    bytes_read: int
    sums: tuple[tuple[int, ...], ...]
    bytes_packed: tuple[int, int]


def run(jobs: Sequence[Job], *, size: int, folder: Path) -> dict[str, list[Done]]:
    """The jobs on ``size`` ranks: name -> what each rank found."""
    folder.mkdir(parents=True)
    torch.save(list(jobs), folder / "jobs.pt")
    # A server that has imported what every rank needs, once for all tests of this process: half of a rank's time.
    multiprocessing.set_forkserver_preload(["transformers.models.llama.modeling_llama", "ptqpipe.runtime.hf"])
    mp.start_processes(_rank, args=(size, folder), nprocs=size, start_method="forkserver")
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
    return {job.name: [by_name[job.name] for by_name in found] for job in jobs}


def _rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # as torchrun does
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    jobs: list[Job] = torch.load(folder / "jobs.pt", weights_only=False)
    try:
        torch.save({job.name: do(job, size=size, rank=rank) for job in jobs}, folder / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other ranks


def do(job: Job, *, size: int = 1, rank: int = 0) -> Done:
    """One job on one rank."""
    from ptqpipe.runtime import load
    from tests.runtime.models import packed_bytes

    sums: list[tuple[int, ...]] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        sums.append(tuple(x.shape))
        dist.all_reduce(x)
        return x

    reduce = counting if job.reduce == "counting" else None
    with CountedReads() as reads:
        if job.hf:
            model = from_pretrained(job, size)
        else:
            model = load(job.path, tp=size, rank=rank, all_reduce=reduce, **job.options)
    with torch.no_grad():
        logits = model(job.tokens).logits.float()
        first = len(sums)
        greedy = greedy_tokens(model, job.tokens, job.new_tokens)
    return Done(logits, greedy, reads.bytes, tuple(sums[:first]), packed_bytes(model))


def from_pretrained(job: Job, size: int) -> Any:
    """The job's model as transformers loads it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ptqpipe.runtime.hf import PackedConfig

    options = {**job.options, "distributed_config": DistributedConfig(tp_size=size)}
    config = PackedConfig(activations=options.pop("activations", "simulated"))
    return AutoModelForCausalLM.from_pretrained(job.path, quantization_config=config, **options).eval()


def greedy_tokens(model: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` greedy tokens after each prompt, [batch, count]."""
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    found: torch.Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return found[:, tokens.shape[1] :]


class CountedReads:
    """Counts what ``os.preadv`` brings, whoever calls it: the only way that tensors are read."""

    def __init__(self) -> None:
        self.bytes = 0
        self._preadv = os.preadv

    def __enter__(self) -> "CountedReads":
        def counted(fd: int, buffers: Any, offset: int, *flags: int) -> int:
            count = self._preadv(fd, buffers, offset, *flags)
            self.bytes += count
            return count

        os.preadv = counted
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._preadv
