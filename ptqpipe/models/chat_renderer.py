"""The process that renders chat templates, which are programs of a checkpoint's author: run as a file, by its path.

Each job may take the seconds that it says and `MEMORY_BYTES`; the kernel ends a process whose template takes longer,
whatever it is doing, and nothing else is lost with it. Imports nothing of this package, and not torch: transformers
renders without it, and starts in a second.

A job on standard input is its length (8 bytes, little endian) and a pickled `dict` with ``template``, ``special`` (the
tokenizer's special tokens), ``messages`` (None only compiles), ``options`` and ``seconds``. The answer, on standard
output, is its length and JSON: {"text"} or {"error", "compiles"}.
"""

import json
import pickle
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, BinaryIO

MEMORY_BYTES = 2 << 30  # that a template may take
MOST_CHARACTERS = 1 << 26  # of a text


def render(job: dict[str, Any]) -> dict[str, Any]:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class Words:
        """What a tokenizer is asked when it renders."""

        special_tokens_map = job["special"]

        def get_chat_template(self, template: str, tools: Any) -> str:
            return template

        def _mark_chat_inputs(self, *_: Any) -> Any:
            raise ValueError("sanitize_control_tokens is not supported here; leave it out")

    compiles = False
    try:
        _compile_jinja_template(job["template"])  # kept by transformers for the next job
        compiles = True
        if job["messages"] is None:
            return {"text": ""}
        text: Any = PreTrainedTokenizerBase.apply_chat_template(
            Words(),
            job["messages"], chat_template=job["template"], tokenize=False, **job["options"],
        )  # fmt: skip
    except MemoryError:
        raise
    except Exception as error:  # of any kind: what goes wrong in the author's program
        return {"error": str(error)[:10_000] or type(error).__name__, "compiles": compiles}
    if len(text) > MOST_CHARACTERS:
        message = f"it makes a text of {len(text)} characters, expected at most {MOST_CHARACTERS}"
        return {"error": message, "compiles": True}
    return {"text": text}


def main(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answers jobs until there are no more."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # what imports it goes on without
    import transformers.tokenization_utils_base  # noqa: F401  # before the limits, which are of the template alone

    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # Linux has it
        data = int(file.read().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = data + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    while len(head := jobs.read(8)) == 8:
        job = pickle.loads(jobs.read(struct.unpack("<Q", head)[0]))
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])  # SIGALRM, which nothing here handles
        try:
            answer = json.dumps(render(job)).encode()
        except MemoryError:
            answer = b'{"error": "it takes too much memory", "compiles": true}'
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(struct.pack("<Q", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
