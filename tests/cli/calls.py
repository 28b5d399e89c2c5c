"""Calls of the command line in this process."""

import json

from click.testing import CliRunner, Result

from ptqpipe.cli import main

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    """Runs a command in this process. An exception that is no exit fails here, with its trace."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], env={**dict.fromkeys(TORCHRUN), **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*args: object, env: dict[str, str] | None = None) -> str:
    """The one line of a command that fails, or with --json its message; click's own two lines on usage aside."""
    result = run(*args, env=env)
    assert result.exit_code in (1, 2), result.output
    if "--json" in args:
        failure = json.loads(result.stdout)
        assert failure == {"error": failure["error"], "exit_code": result.exit_code}
        assert result.stderr == ""
        return str(failure["error"])
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error")
    assert lines[0].isprintable()
    return lines[0]
