"""The command that talks with a checkpoint, or with a service, in the terminal."""

import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import click

from ptqpipe.cli.common import Given, command
from ptqpipe.cli.lines import wrapped
from ptqpipe.cli.serve import serve
from ptqpipe.errors import UsageError, printable

F = TypeVar("F", bound=Callable[..., object])

_OF_SERVE = ("chat_template", "max_model_len", "dtype", "device", "workers")


def _options_of_serve(function: F) -> F:
    """Adds those options of ``ptqpipe serve`` that this command has, too."""
    shared = [option for option in serve.params if option.name in _OF_SERVE]
    function.__dict__["__click_params__"] = [*shared, *function.__dict__.get("__click_params__", [])]
    return function


@command(example="ptqpipe chat CKPT")
@click.argument("ckpt", required=False)
@click.option("--url", metavar="URL", help="Talk with a running service of OpenAI's API instead of loading CKPT.")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="PTQPIPE_API_KEY",
    help="API key of the service at --url.  [default: $PTQPIPE_API_KEY]",
)
@click.option("--system", default="", metavar="TEXT", help="System prompt, for all answers.  [default: none]")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="Randomness of the answers, 0 to 2.")
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    help="Draw each token from the likeliest ones, whose probabilities add up to P.  [default: 1]",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Largest number of tokens in an answer.  [default: what the context leaves]",
)
@click.option("--seed", type=int, metavar="N", help="Seed of the answers' randomness.  [default: a random one]")
@_options_of_serve
def chat(given: Given) -> None:
    """Talk with a checkpoint in the terminal.

    CKPT is loaded as `ptqpipe serve` does. Through a pipe, standard input is one question and standard output its
    answer. Type /help for the commands of the chat.
    """
    if (given.ckpt is None) == (given.url is None):
        raise UsageError("name a checkpoint to load, or the --url of a running service: one of them")
    from ptqpipe.cli.talk import Conversation, Talk, answer_once

    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    with ExitStack() as stack:
        url = stack.enter_context(_served(given)) if given.url is None else given.url
        talk = Conversation(url, api_key=given.api_key, sampling=sampling, system=given.system)
        if sys.stdin.isatty():
            Talk(talk, say=_say, note=_note).run()
        else:
            answer_once(talk, sys.stdin.read(), _say)


def _served(given: Given) -> AbstractContextManager[str]:
    """A service of the checkpoint for this talk alone, on a free port of this machine; its URL."""
    from ptqpipe.checkpoint import resolve_source
    from ptqpipe.serving.command import ServeOptions, serving

    given_here = {"port": 0, "max_len": given.max_model_len, "threads": given.workers, "max_seqs": 1}
    options = given.into(ServeOptions, ckpt=str(resolve_source(given.ckpt)), **given_here)
    return serving(options, log=_note if sys.stderr.isatty() else lambda line: None)


def _note(line: str) -> None:
    """A line that is no answer."""
    click.secho(wrapped(printable(line, keep="\n"), shutil.get_terminal_size().columns), dim=True, err=True)


def _say(piece: str) -> None:
    from ptqpipe.cli.talk import visible

    click.echo(visible(piece) if sys.stdout.isatty() else piece, nl=False)
