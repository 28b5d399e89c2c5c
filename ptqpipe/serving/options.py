"""The options of a service, of this package's own engine and of vLLM. Imports nothing that takes time."""

import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ptqpipe.errors import UsageError, arg

_PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `serve` with this package's own engine; `None` is chosen from the model or the machine.

    served_model_name   of the model in the API
    decoded             whether weights are decoded to ``dtype`` once, instead of computing with packed ones
    allreduce           "off", a codec ("int8", ...), or "auto": quantized where it is measured to be faster
    overlap             whether a prefill's all-reduces overlap with its computation (``engine/overlap.py``)
    batch_invariant     whether an answer must not depend, to the bit, on other requests (``runtime/compiled.py``)
    max_model_len       longest sequence in tokens
    max_num_seqs        most sequences in one step; max_batch_tokens: most tokens
    max_queue           most sequences that wait
    kv_cache_size       bytes of the keys and values on each rank
    speculative         "mtp": drafts by the model's own layer of that kind, ``speculative_tokens`` per sequence
    workers             threads of each rank
    allowed_host        names by which clients reach the service, beside this machine's own (``server/guards.py``)
    max_body            bytes of a request
    chat_template       Jinja file in the place of the model's template
    allowed_local_media_path  folder of the files that messages may name as images
    drain               seconds that running requests have to finish after a signal
    access_log          whether each HTTP request is a line on stderr
    """

    ckpt: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    decoded: bool = False
    activations: str = "simulated"
    allreduce: str = "off"
    overlap: bool = True
    batch_invariant: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_batch_tokens: int = 1024
    max_queue: int = 256
    kv_cache_size: int | None = None
    prefix_caching: bool = True
    speculative: str | None = None
    speculative_tokens: int = 1
    workers: int | None = None
    allowed_host: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 4 << 20
    chat_template: Path | None = None
    allowed_local_media_path: Path | None = None
    drain: float = 30.0
    access_log: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{arg(name)} is {value}, expected {least} or more")
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


_LEAST = {
    "max_num_seqs": 1, "max_batch_tokens": 16, "max_queue": 0, "workers": 1, "max_model_len": 2, "kv_cache_size": 1,
    "max_body": 1, "speculative_tokens": 1,
}  # fmt: skip


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
    if not (math.isfinite(drain) and drain >= 0):
        raise UsageError(f"{arg('drain')} is {drain:g}, expected a number of seconds, 0 or more")
    if api_key is not None and not api_key.strip():
        raise UsageError(f"{arg('api_key')} is empty, which any client has; give a key, or leave the option out")
