"""The command line: a command parses, calls one stage, prints what it says. Heavy imports live inside the commands.

One file a family of commands; `common.py` has what they share.
"""

import io
import sys

import click

from ptqpipe._version import __version__
from ptqpipe.cli.calibrate import calibrate
from ptqpipe.cli.convert import convert
from ptqpipe.cli.demo import demo, formats
from ptqpipe.cli.evaluate import evaluate
from ptqpipe.cli.generate import generate
from ptqpipe.cli.look import diff, inspect, verify
from ptqpipe.cli.plan import plan
from ptqpipe.cli.report import report
from ptqpipe.cli.rewrite import dequantize, relayout
from ptqpipe.cli.serve import serve
from ptqpipe.cli.simulate import simulate
from ptqpipe.cli.transform import transform
from ptqpipe.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Hugging Face checkpoints to FP4 and FP8: streaming, with block scales that are proven optimal."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be Unicode, and terminals need not know it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


for _command in (
    convert,
    plan,
    calibrate,
    generate,
    verify,
    evaluate,
    inspect,
    report,
    serve,
    diff,
    demo,
    formats,
    relayout,
    dequantize,
    simulate,
    transform,
    tune,
):
    main.add_command(_command)
