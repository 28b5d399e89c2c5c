"""The part of ptqpipe serve that hands over to vLLM: ``--engine vllm`` and what belongs to it."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ptqpipe.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

# Options of ptqpipe serve that vLLM has under another name or the same. Handed over when they were given.
FLAGS = {
    "name": "--served-model-name",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_batch_tokens": "--max-num-batched-tokens",
    "max_queue": "--max-num-queued-reqs",
    "kv_cache_size": "--kv-cache-memory-bytes",
    "chat_template": "--chat-template",
}
# Those that `VllmService` has itself, and those that only our own engine knows.
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
)
OWN += ("master_addr", "master_port", "vllm_flags", "no_prefix_caching")
FIXED_MIN_BYTES = "1048576"  # --allreduce int8: what a prefill of some hundred tokens reaches and no decoding step does


def vllm_options(command: F) -> F:
    """Adds the options."""
    options = (
        click.option("--engine", type=click.Choice(["own", "vllm"]), default="own", show_default=True),
        click.option("--vllm-python", metavar="PYTHON", help="vllm: the interpreter that has it.  [default: this one]"),
        click.option(
            "--nnodes", type=int, default=1, show_default=True, help="vllm: machines; each runs this command."
        ),
        click.option("--node-rank", type=int, default=0, show_default=True, help="vllm: which of them; 0 serves."),
        click.option("--master-addr", metavar="HOST", help="vllm: the address of machine 0."),
        click.option("--master-port", type=int, default=29501, show_default=True, help="vllm: where its ranks meet."),
        click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED),
    )
    for option in reversed(options):
        command = option(command)
    return command


def handed_to_vllm(context: click.Context) -> bool:
    """Whether vLLM was asked for, and has run. UsageError for options that the engine asked for does not have."""
    given: dict[str, Any] = context.params
    stated = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if given["engine"] == "vllm":
        _serve(given, stated)
        return True
    if given["vllm_flags"]:
        raise UsageError(f"unexpected argument {given['vllm_flags'][0]!r}; only --engine vllm takes more than CKPT")
    if foreign := sorted(stated & {"vllm_python", "nnodes", "node_rank", "master_addr", "master_port"}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise UsageError(f"{names}: for --engine vllm alone; torchrun starts our own engine on several machines")
    return False


def _serve(given: dict[str, Any], stated: set[str]) -> None:
    """Starts vLLM with what was given on the command line."""
    from ptqpipe.stages.serve.vllm import VllmService, serve_vllm

    if unknown := sorted(stated - FLAGS.keys() - set(OWN) - {"drain_s"}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise UsageError(f"--engine vllm has no {names}; vLLM's own flags go after --")
    forwarded = [text for name in FLAGS if name in stated for text in (FLAGS[name], str(given[name]))]
    forwarded += ["--no-enable-prefix-caching"] if given["no_prefix_caching"] else []
    measured = given["allreduce"] == "auto"
    service = VllmService(
        given["ckpt"],
        python=given["vllm_python"],
        host=given["host"],
        port=given["port"],
        tensor_parallel=given["tp"] or given["nnodes"],
        nnodes=given["nnodes"],
        node_rank=given["node_rank"],
        master_addr=given["master_addr"],
        master_port=given["master_port"],
        allreduce="int8" if measured else given["allreduce"],
        allreduce_min_bytes="auto" if measured else os.environ.get("PTQPIPE_ALLREDUCE_MIN_BYTES", FIXED_MIN_BYTES),
        api_key=given["api_key"],
        drain_s=given["drain_s"],
        forwarded=(*forwarded, *given["vllm_flags"]),
    )
    serve_vllm(service, inherited=os.environ, say=lambda line: click.echo(line, err=True))
