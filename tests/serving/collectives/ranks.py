"""Runs a function on every rank of a gloo group and brings the results back: a process a rank, forked from this one."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 300


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, world, *arguments)`` returned on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, args=(world, folder, function, arguments), nprocs=world, join=False, start_method="fork"
        )
        assert context is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not context.join(timeout=1):  # False as well when one rank has ended and others have not
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} on {world} ranks")
        return [torch.load(Path(folder, f"{rank}"), weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(function(rank, world, *arguments), Path(folder, f"{rank}"))
    dist.barrier()
    dist.destroy_process_group()
