"""The command that talks with a checkpoint, or with a service, in the terminal."""

import sys
from contextlib import ExitStack

import click

from ptqpipe.cli.common import Given, command
from ptqpipe.cli.lines import say
from ptqpipe.cli.serve import serve
from ptqpipe.errors import UsageError, printable


@command(example="ptqpipe chat CKPT")
@click.argument("ckpt", required=False)
@click.option("--url", metavar="URL", help="Talk with a running service of OpenAI's API instead of loading CKPT.")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="PTQPIPE_API_KEY",
    help="Key that the service of --url asks for.  [default: $PTQPIPE_API_KEY]",
)
@click.option("--system", default="", metavar="TEXT", help="System prompt, for all answers.  [default: none]")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="Randomness of the answers, 0 to 2.")
@click.option("--top-p", type=float, metavar="P", help="Draw from the likeliest tokens of probability P.  [default: 1]")
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens in an answer.  [default: the context's rest]")
@click.option("--seed", type=int, metavar="N", help="Seed of the answers' randomness.  [default: a random one]")
def chat(given: Given) -> None:
    """Talk with a checkpoint in the terminal.

    CKPT is loaded as `ptqpipe serve` does. Standard input that is no terminal is one question.
    """
    if (given.ckpt is None) == (given.url is None):
        raise UsageError("name a checkpoint to load, or the --url of a running service: one of them")
    from ptqpipe.cli.talk import Conversation, talk

    def write(piece: str) -> None:  # nothing by which an answer could command a terminal
        click.echo(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece, nl=False)

    with ExitStack() as stack:
        if given.url is None:
            from ptqpipe.checkpoint import resolve_source
            from ptqpipe.serving.command import serving
            from ptqpipe.serving.options import ServeOptions

            options = given.into(ServeOptions, ckpt=str(resolve_source(given.ckpt)), port=0, max_num_seqs=1)
            given.url = stack.enter_context(serving(options, log=say if sys.stderr.isatty() else lambda line: None))
        sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        conversation = Conversation(given.url, api_key=given.api_key, sampling=sampling, system=given.system)
        if sys.stdin.isatty():
            talk(conversation, say=write, note=say)
        elif question := sys.stdin.read().strip("\n"):
            for piece in conversation.ask(question):
                write(piece)
            write("\n")
        else:
            raise UsageError("there is no question on standard input; pipe one in, or run it in a terminal")


chat.params += [
    one for one in serve.params if one.name in ("chat_template", "max_model_len", "dtype", "device", "workers")
]
