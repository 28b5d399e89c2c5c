"""Stages: what the commands call, and the only place where recipe, search, containers and checkpoint meet.

A folder a command: ``run.py`` does it, ``text.py`` says it on a terminal; ``common`` is what they share.
"""
