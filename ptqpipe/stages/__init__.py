"""Stages: what the commands call, and the only place where recipe, search, containers and checkpoint meet.

One folder for each command: ``run.py`` does the work, ``text.py`` formats the terminal output; ``common`` is shared.
"""
