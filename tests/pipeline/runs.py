"""Runs of several stages as the tests of this folder make them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.pipeline import command as stage
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.run.machine import Machine

LENGTH = 24
ONE = Machine(workers=1)


def work_of(text: Path, **more: Any) -> PipelineOptions:
    return PipelineOptions(data=(str(text),), samples=8, seqlen=LENGTH, **more)


def made(model: Path, out: Path, work: PipelineOptions, scheme: str | None = None, **more: Any) -> stage.PipelineResult:
    return stage.pipeline(model, recipe=RecipeOptions(scheme), out=out, work=work, machine=ONE, **more)


def ran(*words: object) -> str:
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def weights_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def few(text: object) -> tuple[object, ...]:
    return "--data", text, "--samples", 8, "--seqlen", LENGTH, "--workers", 1


def stops(real: Callable[..., Any], *, at: int, how: type[BaseException] = KeyboardInterrupt) -> Callable[..., Any]:
    """The function, which ends the run at its call number ``at``."""
    calls: list[int] = []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise how
        return real(*args, **kwargs)

    return stopping
