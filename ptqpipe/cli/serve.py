"""The serve command: with ptqpipe's own engine, or with vLLM (``--engine vllm``), which it starts and monitors."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ptqpipe.cli.common import Given, command
from ptqpipe.cli.parameters import ACTIVATIONS, Size, computing_dtype, options, workers_option
from ptqpipe.errors import UsageError

if TYPE_CHECKING:
    from ptqpipe.serving.rank_processes import RankInfo

# Options of ptqpipe serve -> flags of vLLM. Handed over when they were given.
FLAGS = {
    "served_model_name": "--served-model-name",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_batch_tokens": "--max-num-batched-tokens",
    "max_queue": "--max-num-queued-reqs",
    "kv_cache_size": "--kv-cache-memory-bytes",
    "chat_template": "--chat-template",
    "allowed_local_media_path": "--allowed-local-media-path",
}
# Options that `VllmService` takes itself.
OWN: tuple[str, ...] = (
    "ckpt",
    "tp",
    "allreduce",
    "host",
    "port",
    "api_key",
    "engine",
    "vllm_python",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "vllm_flags",
    "prefix_caching",
)
FIXED_MIN_BYTES = "1048576"  # --allreduce int8: a prefill of a few hundred tokens reaches it, a decoding step does not


VLLM_OPTIONS = options(
    click.option(
        "--engine",
        type=click.Choice(["own", "vllm"]),
        default="own",
        show_default=True,
        help="Engine that computes: ptqpipe's own, or vLLM in another environment, started and monitored.",
    ),
    click.option(
        "--vllm-python",
        metavar="PYTHON",
        help="Interpreter that has vLLM, for --engine vllm.  [default: the one that runs ptqpipe]",
    ),
    click.option(
        "--nnodes",
        type=int,
        default=1,
        show_default=True,
        help="Number of machines for --engine vllm; each of them runs this command.",
    ),
    click.option(
        "--node-rank",
        type=int,
        default=0,
        show_default=True,
        help="Number of this machine for --engine vllm; machine 0 answers requests.",
    ),
    click.option("--master-addr", metavar="HOST", help="Address of machine 0 for --engine vllm."),
    click.option(
        "--master-port",
        type=int,
        default=29501,
        show_default=True,
        help="Port of machine 0 where the ranks of --engine vllm meet.",
    ),
    click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED),
)


@command(example="ptqpipe serve CKPT --port 8000", leaves="the service has ended")
@click.argument("ckpt")
@click.option(
    "--tp",
    type=int,
    metavar="N",
    help="Number of ranks that share the model.  [default: 1; under torchrun: all of them]",
)
@click.option(
    "--allreduce",
    default="off",
    show_default=True,
    metavar="int8|off|auto",
    help="How ranks send their sums in prefill: in int8, unquantized (off), or whichever measures faster (auto).",
)
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="Overlap the prefill all-reduces with computation.",
)
@click.option(
    "--batch-invariant", is_flag=True, help="Make every answer bit-identical, whatever other requests are running."
)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="Name by which clients reach the service, besides addresses, localhost and this machine's own name; * matches "
    "anything. Requests with another Host header are refused. Repeatable.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="PTQPIPE_API_KEY",
    help="Key that clients must send as a Bearer token.  [default: $PTQPIPE_API_KEY]",
)
@click.option("--served-model-name", metavar="NAME", help="Name of the model in the API.  [default: the folder's name]")
@computing_dtype("bf16", "fp32", "fp16", "auto")
@click.option(
    "--device",
    metavar="DEVICE",
    default="cpu",
    show_default=True,
    help="Device that computes: cpu, cuda (one GPU per rank) or cuda:N.",
)
@click.option("--decoded", is_flag=True, help="Decode the weights to --dtype instead of computing with packed ones.")
@ACTIVATIONS
@click.option("--max-model-len", type=int, metavar="N", help="Longest sequence in tokens.  [default: the model's]")
@click.option(
    "--max-num-seqs", type=int, default=32, show_default=True, help="Largest number of sequences in one step."
)
@click.option(
    "--max-batch-tokens", type=int, default=1024, show_default=True, help="Largest number of tokens in one step."
)
@click.option(
    "--max-queue",
    type=int,
    default=256,
    show_default=True,
    help="Largest number of waiting sequences; further ones get HTTP 429.",
)
@click.option(
    "--kv-cache-size",
    type=Size(),
    help="Memory for keys and values on each rank.  [default: a quarter of the free memory]",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse the keys and values of common prompt prefixes.",
)
@click.option(
    "--speculative",
    type=click.Choice(["mtp"]),
    help="Draft with the model's own multi-token prediction layer (mtp): several tokens per step, the same output.",
)
@click.option(
    "--speculative-tokens",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Tokens that --speculative drafts for each sequence in a step.",
)
@workers_option("physical cores less one, divided by the ranks")
@click.option("--max-body", type=Size(), default="4MiB", show_default=True, help="Largest body of a request.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Jinja file that turns chats into prompts.  [default: the model's]",
)
@click.option(
    "--allowed-local-media-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose image files messages may name; without it images must be data URIs.",
)
@click.option(
    "--drain",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds that running requests have to finish after SIGTERM.",
)
@click.option("--access-log", is_flag=True, help="Write a line to stderr for each HTTP request.")
@click.option("--rank-of", hidden=True)
@click.option("--parent", type=int, hidden=True)
@VLLM_OPTIONS
def serve(given: Given) -> None:
    """Serve a checkpoint with OpenAI's API.

    CKPT is a folder, quantized or not. The chat page is at /. With --engine vllm, give vLLM's own flags after --.
    """
    if _handed_to_vllm(given):
        return
    from ptqpipe.checkpoint import resolve_source
    from ptqpipe.run.processes import own_command
    from ptqpipe.serving import command as stage
    from ptqpipe.serving.options import ServeOptions

    serving = given.into(ServeOptions)
    serving = replace(serving, ckpt=str(resolve_source(given.ckpt)))  # the rest of the call is right by now
    worker = [*own_command(), *sys.argv[1:]]
    place = _place(given.tp, given.rank_of, given.parent)
    if given.rank_of is None:
        given.say_unused_gpu()
    stage.serve(serving, place, worker=worker, log=lambda line: given.show(line, err=True))


def _place(tp: int | None, rank_of: str | None, parent: int | None = None) -> "RankInfo":
    """Which rank this is: of a service that starts its own, or of a torchrun."""
    from ptqpipe.serving.rank_processes import RankInfo, parse_place

    if tp is not None and tp < 1:
        raise UsageError(f"--tp is {tp}, expected 1 or more")
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


def _handed_to_vllm(given: Given) -> bool:
    """Whether vLLM was asked for, and has run. UsageError for options that the chosen engine does not have."""
    context = click.get_current_context()
    stated = {name for name in vars(given) if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if given.engine == "vllm":
        _serve_vllm(given, stated)
        return True
    if given.vllm_flags:
        raise UsageError(f"unexpected argument {given.vllm_flags[0]!r}; only --engine vllm takes more than CKPT")
    if foreign := sorted(stated & {"vllm_python", "nnodes", "node_rank", "master_addr", "master_port"}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise UsageError(f"{names}: for --engine vllm alone; torchrun starts our own engine on several machines")
    return False


def _serve_vllm(given: Given, stated: set[str]) -> None:
    """Starts vLLM with the options of the command line."""
    from ptqpipe.serving.options import VllmService
    from ptqpipe.serving.vllm import serve_vllm

    if unknown := sorted(stated - FLAGS.keys() - set(OWN) - {"drain"}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise UsageError(f"--engine vllm has no {names}; vLLM's own flags go after --")
    forwarded = [text for name in FLAGS if name in stated for text in (FLAGS[name], str(getattr(given, name)))]
    forwarded += ["--no-enable-prefix-caching"] if not given.prefix_caching else []
    measured = given.allreduce == "auto"
    service = given.into(
        VllmService,
        tp=given.tp or given.nnodes,
        allreduce="int8" if measured else given.allreduce,
        allreduce_min_bytes="auto" if measured else os.environ.get("PTQPIPE_ALLREDUCE_MIN_BYTES", FIXED_MIN_BYTES),
        vllm_flags=(*forwarded, *given.vllm_flags),
    )
    serve_vllm(service, inherited=os.environ, log=lambda line: given.show(line, err=True))
