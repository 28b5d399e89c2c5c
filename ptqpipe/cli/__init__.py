"""The command line: a command parses, calls one stage, prints what it returns. Heavy imports live inside the commands.

One file for each family of commands, which `main` imports when one of them is asked for (``help.FILES``); ``common.py``
has what they share.
"""

from ptqpipe.cli.common import main

__all__ = ["main"]
