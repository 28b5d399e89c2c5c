"""The command that talks with a checkpoint, or with a service, in the terminal."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass

import click

from ptqpipe.cli.common import Terminal, command
from ptqpipe.cli.lines import say
from ptqpipe.cli.parameters import params_of
from ptqpipe.errors import UsageError, printable
from ptqpipe.run.options import Options, argument, option
from ptqpipe.serving.options import ServeOptions

# Options of the service that loads CKPT.
_OF_SERVICE = ("chat_template", "max_model_len", "dtype", "device", "workers")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ChatCommand(Options):
    """The options of `chat`."""

    ckpt: str | None = argument(None)
    url: str | None = option(
        None, "Talk with a running service of OpenAI's API instead of loading CKPT.", metavar="URL"
    )
    api_key: str | None = option(
        None,
        "Key that the service of {url} asks for.",
        metavar="KEY",
        envvar="PTQPIPE_API_KEY",
        shown="$PTQPIPE_API_KEY",
    )
    system: str = option("", "System prompt, for all answers.", metavar="TEXT", shown="none")
    temperature: float = option(0.7, "Randomness of the answers, 0 to 2.")
    top_p: float | None = option(None, "Draw from the likeliest tokens of probability P.", metavar="P", shown="1")
    max_tokens: int | None = option(None, "Most tokens in an answer.", metavar="N", shown="the context's rest")
    seed: int | None = option(None, "Seed of the answers' randomness.", metavar="N", shown="a random one")


@command(
    ChatCommand,
    example="ptqpipe chat CKPT",
    json=False,
    quiet=False,
    more=[one for one in params_of(ServeOptions) if one.name in _OF_SERVICE],
)
def chat(options: ChatCommand, terminal: Terminal) -> None:
    """Talk with a checkpoint in the terminal.

    CKPT is loaded as `ptqpipe serve` does. Standard input that is no terminal is one question.
    """
    if (options.ckpt is None) == (options.url is None):
        raise UsageError("name a checkpoint to load, or the --url of a running service: one of them")
    from ptqpipe.cli.talk import Conversation, talk

    def write(piece: str) -> None:  # nothing by which an answer could command a terminal
        click.echo(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece, nl=False)

    with ExitStack() as stack:
        url = options.url
        if options.ckpt is not None:
            from ptqpipe.checkpoint import resolve_source
            from ptqpipe.serving.command import serving

            context = click.get_current_context().params
            of_service = {name: context[name] for name in _OF_SERVICE}
            service = ServeOptions(ckpt=str(resolve_source(options.ckpt)), port=0, max_num_seqs=1, **of_service)
            url = stack.enter_context(serving(service, log=say if sys.stderr.isatty() else lambda line: None))
        assert url is not None  # one of both, as checked above
        sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        conversation = Conversation(url, api_key=options.api_key, sampling=sampling, system=options.system)
        if sys.stdin.isatty():
            talk(conversation, say=write, note=say)
        elif question := sys.stdin.read().strip("\n"):
            for piece in conversation.ask(question):
                write(piece)
            write("\n")
        else:
            raise UsageError("there is no question on standard input; pipe one in, or run it in a terminal")
