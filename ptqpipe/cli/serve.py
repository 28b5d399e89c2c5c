"""The serve command: with ptqpipe's own engine, or with vLLM (``--engine vllm``), which it starts and monitors."""

import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ptqpipe.cli.common import Terminal, command
from ptqpipe.errors import UsageError, arg, argv
from ptqpipe.serving.options import ServeCommand, ServeOptions, VllmService

if TYPE_CHECKING:
    from ptqpipe.serving.rank_processes import RankInfo

# Options of ptqpipe serve -> options of vLLM. Handed over when they were stated.
FORWARDED = {
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_queue": "max_num_queued_reqs",
    "kv_cache_size": "kv_cache_memory_bytes",
    "chat_template": "chat_template",
    "allowed_local_media_path": "allowed_local_media_path",
    "prefix_caching": "enable_prefix_caching",
}
FIXED_MIN_BYTES = "1048576"  # --allreduce int8: a prefill of a few hundred tokens reaches it, a decoding step does not
_OF_VLLM = ("vllm_python", "nnodes", "node_rank", "master_addr", "master_port")
_INTERNAL = [click.Option(["--rank-of"], hidden=True), click.Option(["--parent"], type=int, hidden=True)]


@command(
    ServeCommand,
    example="ptqpipe serve CKPT --port 8000",
    leaves="the service has ended",
    json=False,
    quiet=False,
    more=_INTERNAL,
)
def serve(options: ServeCommand, terminal: Terminal) -> None:
    """Serve a checkpoint with OpenAI's API.

    CKPT is a folder, quantized or not. The chat page is at /. With --engine vllm, give vLLM's own flags after --.
    """
    if _handed_to_vllm(options, terminal):
        return
    from ptqpipe.checkpoint import resolve_source
    from ptqpipe.run.processes import own_command
    from ptqpipe.serving import command as stage

    context = click.get_current_context()
    serving = replace(options.part(ServeOptions), ckpt=str(resolve_source(options.ckpt)))
    worker = [*own_command(), *sys.argv[1:]]
    rank_of = context.params["rank_of"]
    place = _place(options.tp, rank_of, context.params["parent"])
    if rank_of is None:
        terminal.mention_unused_gpu(options.device)
    stage.serve(serving, place, worker=worker, log=lambda line: terminal.show(line, err=True))


def _place(tp: int | None, rank_of: str | None, parent: int | None = None) -> "RankInfo":
    """Which rank this is: of a service that starts its own, or of a torchrun."""
    from ptqpipe.serving.rank_processes import RankInfo, parse_place

    if tp is not None and tp < 1:
        raise UsageError(f"{arg('tp')} is {tp}, expected 1 or more")
    if rank_of is not None:
        return parse_place(rank_of, tp or 1, parent=parent)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ.get(name, "") for name in names}
    if not variables["WORLD_SIZE"].isdigit() or not variables["RANK"].isdigit() or int(variables["WORLD_SIZE"]) == 1:
        size = tp or 1
        return RankInfo(0, size, size)
    size = int(variables["WORLD_SIZE"])
    if tp is not None and tp != size:
        raise UsageError(f"--tp is {tp}, but torchrun started {size} ranks; leave --tp out")
    local = int(variables["LOCAL_WORLD_SIZE"]) if variables["LOCAL_WORLD_SIZE"].isdigit() else size
    local_rank = int(variables["LOCAL_RANK"]) if variables["LOCAL_RANK"].isdigit() else int(variables["RANK"])
    return RankInfo(int(variables["RANK"]), size, local, local_rank, torchrun=True)


def _handed_to_vllm(options: ServeCommand, terminal: Terminal) -> bool:
    """Whether vLLM was asked for, and has run. UsageError for options that the chosen engine does not have."""
    context = click.get_current_context()
    names = [one.name for one in fields(ServeCommand)]
    stated = {name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if options.engine == "vllm":
        _serve_vllm(options, stated, terminal)
        return True
    if options.vllm_flags:
        raise UsageError(f"unexpected argument {options.vllm_flags[0]!r}; only --engine vllm takes more than CKPT")
    if foreign := sorted(stated & set(_OF_VLLM)):
        raise UsageError(
            f"{', '.join(map(arg, foreign))}: for --engine vllm alone; torchrun starts our own engine on several "
            "machines"
        )
    return False


def _serve_vllm(options: ServeCommand, stated: set[str], terminal: Terminal) -> None:
    """Starts vLLM with the options of the command line."""
    from ptqpipe.serving.vllm import serve_vllm

    own = {one.name for one in fields(VllmService)} | {"engine"}
    if unknown := sorted(stated - FORWARDED.keys() - own):
        raise UsageError(f"--engine vllm has no {', '.join(map(arg, unknown))}; vLLM's own flags go after --")
    forwarded = argv(**{there: getattr(options, here) for here, there in FORWARDED.items() if here in stated})
    measured = options.allreduce == "auto"
    values = {name: getattr(options, name) for name in own & {one.name for one in fields(ServeCommand)} - {"engine"}}
    service = VllmService(
        **values
        | {
            "tp": options.tp or options.nnodes,
            "allreduce": "int8" if measured else options.allreduce,
            "allreduce_min_bytes": (
                "auto" if measured else os.environ.get("PTQPIPE_ALLREDUCE_MIN_BYTES", FIXED_MIN_BYTES)
            ),
            "vllm_flags": (*forwarded, *options.vllm_flags),
        }
    )
    serve_vllm(service, inherited=os.environ, log=lambda line: terminal.show(line, err=True))
