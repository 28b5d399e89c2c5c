"""``python -m ptqpipe``: the same as the ``ptqpipe`` command."""

from ptqpipe.cli import main

if __name__ == "__main__":
    main()
