"""The command that measures: eval."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ptqpipe.check.options import EvalCommand, EvalOptions
from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command, this_call


@command(
    EvalCommand,
    name="eval",
    example="""
ptqpipe eval CKPT --source MODEL --data held-out.txt
ptqpipe eval CKPT --tasks local_piqa --task-data FOLDER --limit 200
""",
    leaves="nothing is written; what is complete of a baseline's log-probabilities stays in the cache for the next run",
)
def evaluate(options: EvalCommand, terminal: Terminal) -> None:
    """Measure perplexity, KL divergence and task scores.

    CKPT is a folder, or a name on the hub. Packed weights are decoded exactly, and the inputs of linear layers are
    quantized as the format says.
    """
    from ptqpipe.check.evaluate import command as stage, eval_summary as report
    from ptqpipe.checkpoint import read_json_object, resolve_source

    chosen = replace(
        options.part(EvalOptions),
        tasks=tuple(dict.fromkeys(options.tasks)),
        cache_dir=None if options.cache_size == 0 else options.cache_dir or _user_cache(),
        command=this_call(),
    )
    target = options.out or report.default_out(options.ckpt)
    compared = options.source is not None and bool(chosen.data or not chosen.tasks)
    report.check_target(target, overwrite=options.overwrite, compared=compared, tasks=bool(chosen.tasks))
    terminal.mention_unused_gpu(options.device)
    shown = not terminal.quiet and sys.stderr.isatty()
    result = stage.evaluate(options.ckpt, source=options.source, options=chosen, progress=shown, log=terminal.log)
    try:
        terminal.show(json.dumps(result) if terminal.as_json else f"{report.render(result)}\n")
    finally:  # shown even if it cannot be written, written even if nobody reads on
        report.write(result, target, ckpt=Path(options.ckpt), warn=terminal.warn)
    if not terminal.as_json:
        terminal.show(f"written to {target}")
        config = read_json_object(resolve_source(options.ckpt) / "config.json")
        next_steps.say_next(terminal, next_steps.evaluate(options, target, "quantization_config" in config))


def _user_cache() -> Path:
    """$XDG_CACHE_HOME/ptqpipe, by default ~/.cache/ptqpipe."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "ptqpipe"
