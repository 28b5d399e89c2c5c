"""Stages: what the commands call, and the only place where recipe, search, containers and checkpoint meet."""
