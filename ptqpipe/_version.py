"""The version, alone in a file so that everything may import it."""

__version__ = "0.1.0"
