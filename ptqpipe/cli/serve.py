"""ptqpipe serve."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptqpipe.cli.common import Dtype, Size, one_line_errors
from ptqpipe.cli.serve_vllm import handed_to_vllm, vllm_options
from ptqpipe.errors import UsageError

if TYPE_CHECKING:
    from ptqpipe.stages.serve.ranks import Place


@click.command(epilog="Example: ptqpipe serve CKPT --port 8000")
@click.argument("ckpt")
@click.option(
    "--tp",
    type=int,
    metavar="N",
    help="Ranks that share the model.  [default: 1; under torchrun: all of them]",
)
@click.option(
    "--allreduce",
    default="off",
    show_default=True,
    metavar="int8|off|auto",
    help="The ranks' sums in prefill: quantized, plain, or what is measured to be faster.",
)
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="Those sums beside computing.")
@click.option("--batch-invariant", is_flag=True, help="An answer does not depend on what else is served, to the bit.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0: any free one.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which clients reach the service, beside addresses, localhost and this machine's own; * stands for "
    "anything. Repeatable. Requests with another Host are refused.",
)
@click.option(
    "--api-key",
    envvar="PTQPIPE_API_KEY",
    help="What clients must send as Bearer.  [default: $PTQPIPE_API_KEY]",
)
@click.option("--served-model-name", "name", help="The model's name in the API.  [default: the folder's]")
@click.option(
    "--dtype",
    type=Dtype("bf16", "fp32", "fp16", "auto"),
    default="bf16",
    show_default=True,
    help="What it computes in; auto: the checkpoint's own.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda (a GPU a rank) or cuda:N.")
@click.option("--decoded", is_flag=True, help="Decode the weights to --dtype instead of computing with packed ones.")
@click.option(
    "--activations",
    type=click.Choice(["simulated", "none"]),
    default="simulated",
    show_default=True,
    help="Quantize activations as the format says, or not.",
)
@click.option("--max-model-len", type=int, metavar="N", help="Longest sequence in tokens.  [default: the model's]")
@click.option("--max-num-seqs", type=int, default=32, show_default=True, help="Most sequences in a step.")
@click.option("--max-batch-tokens", type=int, default=1024, show_default=True, help="Most tokens in a step.")
@click.option("--max-queue", type=int, default=256, show_default=True, help="Most sequences that wait; then 429.")
@click.option(
    "--kv-cache-size",
    type=Size(),
    help="Keys and values of a rank.  [default: a quarter of the free memory]",
)
@click.option("--no-prefix-caching", is_flag=True, help="Compute common beginnings of prompts again.")
@click.option(
    "--threads",
    type=int,
    metavar="N",
    help="Of a rank.  [default: physical cores less one, divided by ranks]",
)
@click.option("--max-body", type=Size(), default="4MiB", show_default=True, help="Largest body of a request.")
@click.option("--chat-template", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A Jinja file.")
@click.option("--drain", "drain_s", type=float, default=30.0, show_default=True, help="Seconds after SIGTERM.")
@click.option("--rank-of", hidden=True)
@click.option("--parent", type=int, hidden=True)
@vllm_options
@one_line_errors
def serve(
    ckpt: str,
    tp: int | None,
    allreduce: str,
    overlap: bool,
    batch_invariant: bool,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    api_key: str | None,
    name: str | None,
    dtype: str,
    device: str,
    decoded: bool,
    activations: str,
    max_model_len: int | None,
    max_num_seqs: int,
    max_batch_tokens: int,
    max_queue: int,
    kv_cache_size: int | None,
    no_prefix_caching: bool,
    threads: int | None,
    max_body: int,
    chat_template: Path | None,
    drain_s: float,
    rank_of: str | None,
    parent: int | None,
    **_: object,  # those of vllm_options, which handed_to_vllm reads itself
) -> None:
    """Serve CKPT (a folder, quantized or not) with OpenAI's API, and a page to chat at /.

    --engine vllm starts and watches vLLM of another environment instead; its own flags go after --.
    """
    if handed_to_vllm(click.get_current_context()):
        return
    from ptqpipe.stages.serve import run as stage

    options = stage.ServeOptions(
        ckpt=ckpt,
        host=host,
        port=port,
        name=name,
        dtype=dtype,
        device=device,
        packed=not decoded,
        activations=activations,
        allreduce=allreduce,
        overlap=overlap,
        invariant=batch_invariant,
        max_len=max_model_len,
        max_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_queue=max_queue,
        cache_bytes=kv_cache_size,
        prefix_caching=not no_prefix_caching,
        threads=threads,
        allowed_hosts=allowed_hosts,
        api_key=api_key,
        max_body=max_body,
        chat_template=chat_template,
        drain_s=drain_s,
    )
    worker = [sys.executable, "-m", "ptqpipe", *sys.argv[1:]]
    stage.serve(options, _place(tp, rank_of, parent), worker=worker, say=lambda line: click.echo(line, err=True))


def _place(tp: int | None, rank_of: str | None, parent: int | None = None) -> "Place":
    """Which rank this is: of a service that starts its own, or of a torchrun."""
    from ptqpipe.stages.serve.ranks import Place, parse_place

    if tp is not None and tp < 1:
        raise UsageError(f"--tp is {tp}, expected 1 or more")
    if rank_of is not None:
        return parse_place(rank_of, tp or 1, parent=parent)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: os.environ.get(name, "") for name in names}
    if not found["WORLD_SIZE"].isdigit() or not found["RANK"].isdigit() or int(found["WORLD_SIZE"]) == 1:
        size = tp or 1
        if size > 1:  # ranks of one machine, whatever its name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return Place(0, size, size)
    size = int(found["WORLD_SIZE"])
    if tp is not None and tp != size:
        raise UsageError(f"--tp is {tp}, but torchrun started {size} ranks; leave --tp out")
    local = int(found["LOCAL_WORLD_SIZE"]) if found["LOCAL_WORLD_SIZE"].isdigit() else size
    local_rank = int(found["LOCAL_RANK"]) if found["LOCAL_RANK"].isdigit() else int(found["RANK"])
    return Place(int(found["RANK"]), size, local, local_rank, torchrun=True)
