"""``python -m ptqpipe``, and the ``ptqpipe`` command: as little as possible before Ctrl-C has its exit code."""

import sys


def run() -> None:
    """Runs the command line; an interrupt while it is still imported ends like any other, without a trace."""
    try:
        from ptqpipe.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
