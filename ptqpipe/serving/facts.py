"""What a service says about its model: numbers for the chat page, how far it is loaded, the first lines of its log."""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.layouts import part_bytes
from ptqpipe.models.language_model import takes_images
from ptqpipe.models.source import Source
from ptqpipe.numerics.kernels import cpu
from ptqpipe.run.machine import counting_bar
from ptqpipe.run.quantities import disk_size
from ptqpipe.runtime.loading import read_config

_SHOWN = 3  # formats of a model with many
LINE_S = 2.0  # between two lines about the loading


def facts_of(ckpt: str) -> dict[str, Any]:
    """Formats and sizes of a checkpoint's weights, from its headers.

    architecture     the class that config.json names, "" if it names none
    formats          formats of the weights, at most three, that of the most weights first
    bits_per_weight  of the quantized weights, scales included; None for a plain checkpoint
    weights_bytes    of all weights as they are stored
    instruction_set  that the compiled CPU kernels use, "none" without them
    """
    with Source.open(Path(ckpt)) as source:
        formats: Counter[str] = Counter()
        for name, (dtype, shape) in source.tensors.items():
            stored = source.stored.get(name)
            formats[dtype.lower() if stored is None else stored.scheme.name] += prod(shape)
        quantized = sum(prod(source.tensors[name][1]) for name in source.stored)
        nbytes = sum(part_bytes(part) for stored in source.stored.values() for part in stored.parts)
        return {
            "architecture": (source.reader.config.get("architectures") or [""])[0],
            "formats": [name for name, _ in formats.most_common(_SHOWN)],
            "bits_per_weight": round(8 * nbytes / quantized, 3) if quantized else None,
            "weights_bytes": source.reader.nbytes,
            "instruction_set": cpu.isa(),
        }


def heading(name: str, facts: dict[str, Any]) -> str:
    """One line about the served model."""
    bits = facts["bits_per_weight"]
    parts = [facts["architecture"], " + ".join(facts["formats"]), disk_size(facts["weights_bytes"])]
    parts += [] if bits is None else [f"{bits:.2f} bits per quantized weight"]
    return f"serving {name}: {', '.join(part for part in parts if part)}"


def about_images(ckpt: str, processor: Any) -> str | None:
    """A line about a model of images and text; None for others.

    processor  as in `preflight.processor_of`
    """
    if not takes_images(read_config(Path(ckpt)), Path(ckpt)):
        return None
    loaded = "vision tower and projector are loaded with the first image"
    return f"(a model of images and text: {processor if isinstance(processor, str) else loaded})"


def instructions(url: str, *, chats: bool, key: bool) -> list[str]:
    """Example requests for a service that is ready: lines for its log.

    chats  whether there is a chat template
    key    whether clients need an API key
    """
    body = (
        {"messages": [{"role": "user", "content": "Hello"}]}
        if chats
        else {"prompt": "Once upon a time", "max_tokens": 64}
    )
    path = "chat/completions" if chats else "completions"
    words = [f"curl {url}/v1/{path}", "-H 'content-type: application/json'", f"-d {shlex.quote(json.dumps(body))}"]
    words += ['-H "authorization: Bearer $PTQPIPE_API_KEY"'] if key else []
    call = " \\\n         ".join(words)  # a terminal would break it inside of quotation marks
    return [f"  API reference: {url}/docs", f"  try: {call}", "  stop: Ctrl-C"]


class LoadingBar:
    """How far the loading of a model is: a bar on a terminal, else lines, few of them.

    Called with (bytes of weights read, bytes in all), from any thread. A context, which clears the terminal.

    log    takes the lines where there is no terminal
    clock  gives seconds
    """

    def __init__(
        self, log: Callable[[str], None], *, terminal: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._clock = log, clock
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._next = clock() + LINE_S
        self._bar, self._done = ExitStack(), 0
        self._advance: Callable[[float, str], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._terminal:
            if self._advance is None:
                bar = counting_bar(total, "B", shown=True, title="loading", leave=False)
                self._advance = self._bar.enter_context(bar)
            self._advance(done - self._done, "")
            self._done = done
        elif self._clock() >= self._next:
            self._next = self._clock() + LINE_S
            self._log(f"loading ... {100 * done / max(total, 1):.0f} % of {disk_size(total)}")

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
