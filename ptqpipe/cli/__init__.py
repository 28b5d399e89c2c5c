"""The command line: a command parses, calls one stage, prints what it returns. Heavy imports live inside the commands.

One file for each family of commands, which are in `main` once the file is imported; `common.py` has what they share.
"""

from ptqpipe.cli import calibrate, chat, check, convert, demo, evaluate, rewrite, serve
from ptqpipe.cli.common import main

__all__ = ["calibrate", "chat", "check", "convert", "demo", "evaluate", "main", "rewrite", "serve"]
