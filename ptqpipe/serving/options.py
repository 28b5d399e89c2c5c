"""The options of a service, of this package's own engine and of vLLM. Imports nothing that takes time."""

import re
import socket
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from ptqpipe.errors import UsageError, arg
from ptqpipe.run.options import Options, argument, option

_PORTS = 1 << 16


@dataclass(frozen=True, repr=False, eq=False)
class ServeOptions(Options):
    """Options of `serve` with this package's own engine; None is chosen from the model or the machine."""

    ckpt: str = argument()
    allreduce: str = option(
        "off",
        "How ranks send their sums in prefill: in int8, unquantized (off), or whichever measures faster (auto).",
        metavar="int8|off|auto",
    )
    overlap: bool = option(True, "Overlap the prefill all-reduces with computation.")
    batch_invariant: bool = option(False, "Make every answer bit-identical, whatever other requests are running.")
    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8000, "Port to listen on; 0 takes any free one.")
    allowed_host: tuple[str, ...] = option(
        (),
        "Name by which clients reach the service, besides addresses, localhost and this machine's own name; * matches "
        "anything. Requests with another Host header are refused. Repeatable.",
        metavar="NAME",
    )
    api_key: str | None = option(
        None,
        "Key that clients must send as a Bearer token.",
        metavar="KEY",
        envvar="PTQPIPE_API_KEY",
        shown="$PTQPIPE_API_KEY",
    )
    served_model_name: str | None = option(
        None, "Name of the model in the API.", metavar="NAME", shown="the folder's name"
    )
    dtype: str = option(
        "bfloat16",
        "Float type that the model computes in; auto is the checkpoint's own.",
        kind="dtype",
        choices=("bf16", "fp32", "fp16", "auto"),
    )
    device: str = option("cpu", "Device that computes: cpu, cuda (one GPU per rank) or cuda:N.", metavar="DEVICE")
    decoded: bool = option(False, "Decode the weights to {dtype} instead of computing with packed ones.")
    activations: str = option(
        "simulated",
        "Quantize activations as the format of the checkpoint says, or leave them.",
        choices=("simulated", "none"),
    )
    max_model_len: int | None = option(
        None, "Longest sequence in tokens.", metavar="N", bounds=(2, inf), shown="the model's"
    )
    max_num_seqs: int = option(32, "Largest number of sequences in one step.", bounds=(1, inf))
    max_batch_tokens: int = option(1024, "Largest number of tokens in one step.", bounds=(16, inf))
    max_queue: int = option(256, "Largest number of waiting sequences; further ones get HTTP 429.", bounds=(0, inf))
    kv_cache_size: int | None = option(
        None, "Memory for keys and values on each rank.", kind="size", bounds=(1, inf), shown="a quarter of free memory"
    )
    prefix_caching: bool = option(True, "Reuse the keys and values of common prompt prefixes.")
    speculative: str | None = option(
        None,
        "Draft with the model's own multi-token prediction layer (mtp): several tokens per step, the same output.",
        choices=("mtp",),
    )
    speculative_tokens: int = option(
        1, "Tokens that {speculative} drafts for each sequence in a step.", metavar="N", bounds=(1, inf)
    )
    workers: int | None = option(
        None,
        "CPU threads that work at the same time.",
        metavar="N",
        bounds=(1, inf),
        shown="physical cores less one, divided by the ranks",
    )
    max_body: int = option(4 << 20, "Largest body of a request.", kind="size", bounds=(1, inf), shown="4MiB")
    chat_template: Path | None = option(
        None, "Jinja file that turns chats into prompts.", metavar="FILE", kind="file", shown="the model's"
    )
    allowed_local_media_path: Path | None = option(
        None,
        "Folder whose image files messages may name; without it images must be data URIs.",
        metavar="DIR",
        kind="folder",
    )
    drain: float = option(30.0, "Seconds that running requests have to finish after SIGTERM.")
    access_log: bool = option(False, "Write a line to stderr for each HTTP request.")

    def __post_init__(self) -> None:
        self.check()
        _check_address(self.port, self.drain, self.api_key)
        self.host_names()
        if self.batch_invariant and (self.dtype, self.device, self.allreduce) != ("bfloat16", "cpu", "off"):
            raise UsageError(
                f"{arg('batch_invariant')} needs {arg('dtype', 'bfloat16')}, {arg('device', 'cpu')} and "
                f"{arg('allreduce', 'off')}, not {self.dtype}, {self.device} and {self.allreduce}"
            )
        if self.speculative is None and self.speculative_tokens != 1:
            raise UsageError(
                f"{arg('speculative_tokens')} says how much {arg('speculative')} drafts; add "
                f"{arg('speculative', 'mtp')}"
            )
        if self.max_batch_tokens < self.max_num_seqs:
            raise UsageError(
                f"{arg('max_batch_tokens', self.max_batch_tokens)} is less than "
                f"{arg('max_num_seqs', self.max_num_seqs)}: a sequence needs one token per step"
            )

    def host_names(self) -> tuple[str, ...]:
        """The names by which clients may reach the service: ``host``, this machine's, ``allowed_host``. UsageError."""
        for name in self.allowed_host:
            if not re.fullmatch(r"[\w.*-]+", name):
                raise UsageError(
                    f"{arg('allowed_host')} is {name!r}, expected a name without scheme and port, as api.example.com"
                )
        own = socket.gethostname()
        short = own.partition(".")[0]
        return self.host, own, short, f"{short}.local", *self.allowed_host


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ServeCommand(ServeOptions):
    """The options of `serve`, of both engines.

    vllm_flags  further flags of ``vllm serve``, handed on as they are
    """

    tp: int | None = option(
        None,
        "Number of ranks that share the model.",
        metavar="N",
        shown="1; under torchrun: all of them",
    )
    engine: str = option(
        "own",
        "Engine that computes: ptqpipe's own, or vLLM in another environment, started and monitored.",
        choices=("own", "vllm"),
        shell=True,
    )
    vllm_python: str | None = option(
        None,
        "Interpreter that has vLLM, for {engine} vllm.",
        metavar="PYTHON",
        shown="the one that runs ptqpipe",
        shell=True,
    )
    nnodes: int = option(1, "Number of machines for {engine} vllm; each of them runs this command.", shell=True)
    node_rank: int = option(0, "Number of this machine for {engine} vllm; machine 0 answers requests.", shell=True)
    master_addr: str | None = option(None, "Address of machine 0 for {engine} vllm.", metavar="HOST", shell=True)
    master_port: int = option(29501, "Port of machine 0 where the ranks of {engine} vllm meet.", shell=True)
    vllm_flags: tuple[str, ...] = argument(())


@dataclass(frozen=True, slots=True)
class VllmService:
    """Options of `serve` with vLLM.

    vllm_python  the interpreter of the environment with vLLM; None: the one that runs this
    tp           ranks over all nodes
    node_rank    0 serves HTTP; the others work for it and serve none
    allreduce    off, or the codec of the all-reduce in prefill (int8, ...)
    allreduce_min_bytes  messages below stay plain; "auto": measured at start
    drain        seconds for running requests after a signal
    vllm_flags   further flags of ``vllm serve``, handed on as they are
    """

    ckpt: str
    vllm_python: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29501
    allreduce: str = "off"
    allreduce_min_bytes: str = "auto"
    api_key: str | None = None
    drain: float = 30.0
    vllm_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_address(self.port, self.drain, self.api_key)
        for name, value in (("tp", self.tp), ("nnodes", self.nnodes)):
            if value < 1:
                raise UsageError(f"{arg(name)} is {value}, expected 1 or more")
        if self.tp % self.nnodes:
            raise UsageError(
                f"{arg('tp', self.tp)} does not divide over {arg('nnodes', self.nnodes)}; give {arg('tp')}, the ranks "
                "of all nodes together, as a multiple"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(
                f"{arg('node_rank', self.node_rank)} of {self.nnodes} nodes; expected 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.master_addr is None:
            raise UsageError(f"{self.nnodes} nodes need {arg('master_addr')}, the address of node 0")


def _check_address(port: int, drain: float, api_key: str | None) -> None:
    """UsageError for a port, a time or a key that is none."""
    if not 0 <= port < _PORTS:
        raise UsageError(f"{arg('port')} is {port}, expected 0 to {_PORTS - 1}")
    if not (isfinite(drain) and drain >= 0):
        raise UsageError(f"{arg('drain')} is {drain:g}, expected a number of seconds, 0 or more")
    if api_key is not None and not api_key.strip():
        raise UsageError(f"{arg('api_key')} is empty, which any client has; give a key, or leave the option out")
