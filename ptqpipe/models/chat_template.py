"""Chats to text by a chat template: a program of the checkpoint's author, which may not end, or take all memory.

So it runs in a process of its own (``chat_renderer.py``), which ends when a text takes longer than `RENDER_S`; the next
text gets a new one. A thread could not be ended: ``'a' * 10**10`` is one step of Python's, during which no other thread
runs and no signal is handled.
"""

import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptqpipe.errors import UsageError, one_line
from ptqpipe.run.processes import safe_environment

RENDER_S = 10.0  # for one text; a template takes milliseconds
_RENDERER = Path(__file__).with_name("chat_renderer.py")


class TemplateError(UsageError):
    """A chat template does not make a text of messages. The message says why, without naming either.

    compiles  whether it is a template at all
    ends      whether it came to an end by itself
    """

    def __init__(self, message: str, *, compiles: bool = True, ends: bool = True) -> None:
        super().__init__(message)
        self.compiles, self.ends = compiles, ends


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | dict[str, str], options: Mapping[str, Any]
) -> str:
    """What a tokenizer's ``apply_chat_template`` makes of messages with a template. TemplateError where it makes none,
    another UsageError where nothing can be rendered here.

    template  Jinja text, or by name those of a model that has several
    options   further arguments of ``apply_chat_template``, and variables of the template
    """
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        try:  # of a library of its own, whose code is no part of the checkpoint
            text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        except Exception as error:
            raise TemplateError(one_line(str(error)) or type(error).__name__) from None
        return text
    try:
        chosen = template if isinstance(template, str) else tokenizer.get_chat_template(None, options.get("tools"))
    except ValueError as error:
        raise TemplateError(one_line(str(error))) from None
    return _renderer.answer(chosen, tokenizer.special_tokens_map, messages, options)


def compile_template(template: str) -> None:
    """TemplateError for what is no Jinja template, or takes too long to be read as one."""
    _renderer.answer(template, {}, None, {})


class _Renderer:
    """The process, started when there is something to render; for any thread, one text at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def answer(
        self,
        template: str,
        special: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The text, "" without messages. TemplateError."""
        job = {"template": template, "special": dict(special), "messages": messages, "options": dict(options)}
        sent = pickle.dumps(job | {"seconds": RENDER_S})
        with self._lock:
            try:
                reply = self._exchange(sent)
            except BaseException:  # an interrupt: what the process answers now belongs to no later text
                self._end()
                raise
            code = self._end() if reply is None else None
        if reply is None:
            if code == -signal.SIGALRM:
                raise TemplateError(f"it does not end within {RENDER_S:g} s", ends=False)
            raise UsageError(
                f"the process that renders chat templates ended with code {code}; see that there is memory left, and "
                f"that {sys.executable} can import transformers"
            )
        if "error" in reply:
            raise TemplateError(one_line(reply["error"]), compiles=reply["compiles"])
        text: str = reply["text"]
        return text

    def _exchange(self, sent: bytes) -> dict[str, Any] | None:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._process, self._owner = _start(), os.getpid()  # not that of a process that this one was forked from
        jobs, answers = self._process.stdin, self._process.stdout
        assert jobs is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):
            jobs.write(struct.pack("<Q", len(sent)) + sent)
            jobs.flush()
        if len(head := answers.read(8)) < 8:
            return None
        body = answers.read(struct.unpack("<Q", head)[0])
        try:
            reply: dict[str, Any] = json.loads(body)
        except ValueError:  # cut short
            return None
        return reply

    def _end(self) -> int | None:
        """Ends the process; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what could not be written
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        process.kill()
        return process.wait()


def _start() -> "subprocess.Popen[bytes]":
    """A process that renders. A Ctrl-C at the terminal does not reach it; it ends when this process has gone."""
    return subprocess.Popen(
        [sys.executable, "-P", str(_RENDERER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=safe_environment(os.environ),
        start_new_session=True,
    )


_renderer = _Renderer()
