"""Prompts to tokens: text, tokens, and chats by the model's template."""

from typing import Any

from ptqpipe.errors import one_line
from ptqpipe.server.errors import ApiError
from ptqpipe.server.logprobs import TokenNames
from ptqpipe.server.schema import Message


def check_text(text: str, param: str) -> None:
    """ApiError for half of a surrogate pair, which JSON can spell and no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400, f"{param} has half of a surrogate pair at character {error.start}, which is no text", param=param
        ) from None


class Prompts:
    """A model's tokenizer, as the routes need it.

    chat_template  Jinja text in the place of the tokenizer's own
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self.tokenizer, self.names = tokenizer, TokenNames(tokenizer)
        self._template = chat_template or getattr(tokenizer, "chat_template", None)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def encode(self, prompt: str | list[int], *, special: bool = True) -> tuple[tuple[int, ...], str]:
        """(tokens, text) of a prompt that is one or the other."""
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            return tuple(self.tokenizer(prompt, add_special_tokens=special).input_ids), prompt
        try:
            return tuple(prompt), self.decode(prompt)
        except (OverflowError, TypeError, ValueError, IndexError):
            raise ApiError(400, "prompt has a token that is not in the vocabulary", param="prompt") from None

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def chat(self, messages: list[Message], *, generate: bool, extra: dict[str, Any]) -> tuple[int, ...]:
        """The tokens of a chat. ApiError without a template, or for messages that it refuses."""
        if self._template is None:
            raise ApiError(
                400,
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
            )
        if not messages:
            raise ApiError(400, "messages is empty; expected one at least", param="messages")
        plain = [
            {**(message.model_extra or {}), "role": message.role, "content": message.text()} for message in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, chat_template=self._template, add_generation_prompt=generate, tokenize=False, **extra
            )
        except Exception as error:  # a template is a program of the checkpoint's author
            raise ApiError(400, f"the chat template refuses these messages: {one_line(str(error))}") from error
        check_text(text, "messages")
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
