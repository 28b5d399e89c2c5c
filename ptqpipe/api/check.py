"""The commands that look at checkpoints, as functions of the same names: they return a `Result` and change nothing."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ptqpipe.api.calibration_data import Data, data_names
from ptqpipe.api.calls import command, folder_of, machine_of, names_in, options_from, watched
from ptqpipe.api.result import Result
from ptqpipe.check import diff as diff_stage, inspect as inspect_stage
from ptqpipe.check.evaluate import command as evaluate_stage, eval_summary as evaluate_text
from ptqpipe.check.options import EvalCommand, EvalOptions, ReportCommand, VerifyCommand
from ptqpipe.check.report.command import make_report
from ptqpipe.check.report.compare_command import compare
from ptqpipe.check.verify import command as verify_stage, report as verify_text
from ptqpipe.errors import PtqWarning
from ptqpipe.run.options import MachineOptions
from ptqpipe.run.quantities import disk_size, number


@command(VerifyCommand)
def verify(
    ckpt: str | Path,
    *,
    source: str | Path | None = None,
    stats: str | Path | None = None,
    optimal: bool = False,
    all_blocks: bool = False,
    workers: int | None = None,
    progress: bool | None = None,
) -> Result:
    """Checks a checkpoint's bytes and claims; ``ok`` says whether there is no fault, ``faults`` lists them.

    source      the model that it was made from: its weights are quantized again, and errors are measured
    stats       the statistics that it was made with, if there were any; needs ``source``
    optimal     proves block scales optimal once more by brute force, on a sample of blocks; ``all_blocks``: on all
    progress    whether there is a bar; None: in a terminal and in a notebook

    ``record`` is what ``ptqpipe verify --json`` prints. A fault is no error: this returns.

    >>> ptqpipe.verify("OUT", source="MODEL")
    <verify OUT: verdict no fault, weights 21, kept tensors 8, notes ...>
    """
    named = {"ckpt": ckpt, "source": source, "stats": stats, "optimal": optimal or all_blocks, "all_blocks": all_blocks}
    chosen = options_from(VerifyCommand, named)
    outcome = verify_stage.verify(
        chosen.ckpt,
        source=chosen.source,
        statistics=chosen.stats,
        optimal=chosen.optimal,
        all_blocks=chosen.all_blocks,
        workers=workers,
        progress=watched(progress),
    )
    faults = [fault.message for fault in outcome.faults]
    facts = {
        "verdict": f"{len(faults)} faults, the first: {faults[0]}" if faults else "no fault",
        "weights": str(len(outcome.weights)),
        "kept tensors": str(outcome.kept),
        "notes": str(len(outcome.notes)),
    }
    record, path = verify_text.to_json(outcome), Path(ckpt)
    return Result("verify", outcome, path=path, record=record, facts=facts, text=lambda: verify_text.render(outcome))


@command()
def inspect(ckpt: str | Path) -> Result:
    """Formats, sizes and suspicious scales of a checkpoint, by the role of its weights.

    ``record`` is what ``ptqpipe inspect --json`` prints.

    >>> ptqpipe.inspect("OUT")
    <inspect OUT: container compressed_tensors, parameters 1,443,584, size 1.19 MB (0.413 of bf16)>
    """
    outcome = inspect_stage.inspect(folder_of(ckpt))
    facts = {
        "container": outcome.container,
        "parameters": f"{outcome.params:,}",
        "size": f"{disk_size(outcome.nbytes)} ({number(outcome.ratio, 3)} of bf16)",
    }
    record, path = inspect_stage.to_json(outcome), Path(ckpt)
    return Result("inspect", outcome, path=path, record=record, facts=facts, text=lambda: inspect_stage.render(outcome))


@command()
def diff(a: str | Path, b: str | Path) -> Result:
    """Compares two checkpoints weight by weight, whatever their containers; ``equal`` says whether they are one model.

    ``record`` is what ``ptqpipe diff --json`` prints.

    >>> ptqpipe.diff("OUT", "OUT-modelopt").equal
    True
    """
    outcome = diff_stage.diff(folder_of(a), folder_of(b))
    verdict = "identical" if outcome.identical else "the same model" if outcome.equal else "different"
    facts = {"verdict": verdict, "tensors": str(len(outcome.tensors)), "other": str(b)}
    record, path = diff_stage.to_json(outcome), Path(a)
    return Result("diff", outcome, path=path, record=record, facts=facts, text=lambda: diff_stage.render(outcome))


@command(EvalCommand)
def evaluate(
    ckpt: str | Path,
    data: Data = None,
    *,
    source: str | Path | None = None,
    tasks: str | Iterable[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Measures perplexity, KL divergence and task scores, and writes them to a JSON file.

    data     text to score, as `calibrate` takes it; None: the sample text of the package, unless there are tasks
    source   the original model: with it the KL divergence is measured, and ``verdict`` says what it means
    tasks    of lm-eval, or local ones
    out      file to write; None: ``<ckpt>.eval.json`` beside a checkpoint of ptqpipe, of others in the working folder
    progress whether there are bars; None: in a terminal and in a notebook
    options  as ``ptqpipe eval`` has them: ``text_field``, ``seqlen``, ``stride``, ``max_tokens``, ``task_data``,
             ``include_path``, ``limit``, ``batch_size``, ``dtype``, ``device``, ``activations``, ``samples`` (of text
             that both models write), ``cache_dir`` and its limit ``cache_size``. Without ``cache_dir`` the original's
             logits are kept nowhere, and both models are in memory

    >>> ptqpipe.evaluate("OUT", "TEXT.txt", source="MODEL", max_tokens=2000).verdict.level
    'acceptable'
    """
    target = evaluate_text.default_out(str(ckpt)) if out is None else Path(out)
    named = names_in(tasks)
    compared = source is not None and (data is not None or not named)
    evaluate_text.check_target(target, overwrite=overwrite, compared=compared, tasks=bool(named))
    with data_names(data) as names:
        chosen = options_from(EvalOptions, options, data=tuple(names), tasks=named)
        original = None if source is None else str(source)
        outcome = evaluate_stage.evaluate(str(ckpt), source=original, options=chosen, progress=watched(progress))
    evaluate_text.write(
        outcome, target, ckpt=Path(ckpt), warn=lambda line: warnings.warn(line, PtqWarning, stacklevel=4)
    )
    facts = {f"perplexity on {row['data']}": number(row["checkpoint"]) for row in outcome["perplexity"]}
    facts |= {f"{row['task']} {row['metric']}": number(row["checkpoint"]) for row in outcome["tasks"]}
    return Result(
        "evaluate",
        None,
        path=target,
        record=outcome,
        facts=facts,
        text=lambda: evaluate_text.render(outcome),
        evaluation=outcome,
    )


@command(ReportCommand)
def report(
    ckpt: str | Path,
    *others: str | Path,
    source: str | Path | None = None,
    eval: str | Path | None = None,
    out: str | Path | None = None,
    kind: str | None = None,
    all_rows: bool = False,
    progress: bool | None = None,
) -> Result:
    """Writes a report on a checkpoint, or compares several of one model: one HTML file that needs no network, or
    markdown.

    others      checkpoints to compare with: quality against size, layer by layer
    source      the model that it was made from: the errors of all weights are recomputed
    eval        the file that `evaluate` wrote
    out         file to write; None: ``<ckpt>.report.html``
    kind        html or md; None: by the ending of ``out``
    all_rows    whether scale searches are compared on all rows instead of a sample
    progress    whether there are bars; None: in a terminal and in a notebook

    >>> ptqpipe.report("OUT", source="MODEL", out="report.html")
    <report report.html: summary OUT: 21 weights at 4.501 bits, 8 tensors kept, weight error 21.76 dB>
    """
    named = {"source": source, "eval": eval, "out": out, "kind": kind, "all_rows": all_rows}
    chosen = options_from(ReportCommand, named, ckpts=(ckpt, *others))
    machine = machine_of(MachineOptions(), progress)
    if others:
        path, said = compare(chosen.ckpts, out=chosen.out, kind=kind, machine=machine)
        facts = {"compared": ", ".join(str(one) for one in (ckpt, *others))}
    else:
        path, said = make_report(
            chosen.ckpts[0],
            source=chosen.source,
            evaluation=chosen.eval,
            out=chosen.out,
            kind=kind,
            all_rows=all_rows,
            machine=machine,
        )
        facts = {"summary": said.partition("\n")[0]}
    return Result("report", None, path=path, record={**facts, "said": said}, facts=facts, text=lambda: said)
