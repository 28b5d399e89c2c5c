"""Prompts to tokens: text, tokens, and chats by the model's template.

Tokenizing takes some 200 bytes for each token and a second for each megabyte, so what cannot fit the model's context is
refused from its beginning, and one thread does it for all requests: however many long prompts arrive, memory stays.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ptqpipe.errors import UsageError, arg, tokenizer_errors
from ptqpipe.models.chat_template import TemplateError, render
from ptqpipe.models.images import decode_images, digest_of, read_image, split_content
from ptqpipe.serving.engine import ContextTooLong, Images
from ptqpipe.serving.server.error_responses import ApiError
from ptqpipe.serving.server.logprobs import TokenNames
from ptqpipe.serving.server.schema import Message

_T = TypeVar("_T")
_USUAL = 8  # characters that a token has at most, in text as people write it


def check_text(text: str, param: str) -> None:
    """ApiError for half of a surrogate pair, which JSON can escape and no text contains."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400, f"{param} has half of a surrogate pair at character {error.start}, which is no text", param=param
        ) from None


class Prompts:
    """A model's tokenizer, as the routes need it.

    context        longest sequence in tokens; a prompt of more than twice as many is refused before it is tokenized
    chat_template  Jinja text in the place of the tokenizer's own
    processor      the model's, for images (``runtime/processor.py``); a text that says why there is none
    media          folder of the files that messages may name as images; None allows none
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        context: int,
        chat_template: str | None = None,
        processor: Any = "this model takes no images",
        media: Path | None = None,
    ) -> None:
        self.tokenizer, self.names, self.context = tokenizer, TokenNames(tokenizer), context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._template = chat_template or getattr(tokenizer, "chat_template", None)
        self._template = self._template or getattr(processor, "template", None)
        self._processor, self._media = processor, media

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    async def run(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns, which tokenizes: in the one thread that does. UsageError where the tokenizer fails."""

        def guarded() -> _T:
            with tokenizer_errors("the request"):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def encode(self, prompt: str | list[int], *, special: bool = True) -> tuple[tuple[int, ...], str]:
        """(tokens, text) of a prompt that is one or the other. ContextTooLong for more than twice the context."""
        if isinstance(prompt, str):
            return self._tokens(prompt, "prompt", special=special), prompt
        self._check_count(len(prompt))
        try:
            return tuple(prompt), self.decode(prompt)
        except (OverflowError, TypeError, ValueError, IndexError):
            raise ApiError(400, "prompt has a token that is not in the vocabulary", param="prompt") from None

    def _tokens(self, text: str, param: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a text that may fit the context.

        Of a long text longer and longer beginnings are tokenized, the first one as long as a context of usual text. A
        beginning may end within a word, and so have a few tokens more than the same part of the whole; never twice as
        many.
        """
        check_text(text, param)
        length = _USUAL * self.context
        while length < len(text):
            self._check_count(len(self.tokenizer(text[:length], add_special_tokens=False).input_ids))
            length *= 2
        return tuple(self.tokenizer(text, add_special_tokens=special).input_ids)

    def _check_count(self, count: int) -> None:
        if count > 2 * self.context:
            raise ContextTooLong(
                f"the prompt has more than {2 * self.context} tokens; this model's context is {self.context} tokens"
            )

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def chat(
        self, messages: list[Message], *, generate: bool, extra: dict[str, Any]
    ) -> tuple[tuple[int, ...], Images | None]:
        """The tokens of a chat, and its images. ApiError without a template, or for messages that it refuses."""
        if self._template is None:
            raise ApiError(
                400,
                "this model has no chat template; use /v1/completions, or start the server with "
                f"{arg('chat_template')}",
                code="no_chat_template",
            )
        if not messages:
            raise ApiError(400, "messages is empty; expected one at least", param="messages")
        try:
            split = [split_content(message.content, f"messages[{index}]") for index, message in enumerate(messages)]
            places = [place for _, images_of_one in split for place in images_of_one]
            if not places:
                text = self._render(messages, [message.text() for message in messages], generate=generate, extra=extra)
                return self._tokens(text, "messages", special=False), None
            if isinstance(self._processor, str):
                raise UsageError(f"{self._processor}; send parts of type 'text' alone")
            folder = f"the server reads those of the folder that its {arg('allowed_local_media_path')} names"
            raw = [read_image(place, self._media, remedy=f"{folder}; or send a data URI") for place in places]
            images = decode_images(raw, "the request")
            self._check_marks([part.get("text", "") for parts, _ in split for part in parts])
            text = self._render(messages, [parts for parts, _ in split], generate=generate, extra=extra)
            self._tokens(text, "messages", special=False)
            tokens, inputs = self._processor(text, images)
            return tokens, Images(inputs, tuple(map(digest_of, raw)), self._processor.token)
        except UsageError as error:
            raise error if isinstance(error, ContextTooLong) else ApiError(400, str(error), param="messages") from None

    def _check_marks(self, texts: list[str]) -> None:
        """UsageError for text that holds what stands for an image."""
        mark = next((mark for mark in self._processor.marks if any(mark in text for text in texts)), None)
        if mark is not None:
            raise UsageError(f"a text has {mark!r}, which stands for an image here; leave it out")

    def _render(self, messages: list[Message], contents: list[Any], *, generate: bool, extra: dict[str, Any]) -> str:
        """The text that the chat template makes of messages. ApiError for those that it refuses."""
        plain = [
            {**(message.model_extra or {}), "role": message.role, "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        assert self._template is not None
        try:
            return render(self.tokenizer, plain, self._template, {"add_generation_prompt": generate, **extra})
        except TemplateError as error:
            what = "refuses" if error.ends else "fails on"
            raise ApiError(400, f"the chat template {what} these messages: {error}", param="messages") from None
