"""formats: everything that can be named on the command line: formats, containers and searches."""

from ptqpipe.containers import container_names
from ptqpipe.schemes import SCHEMES
from ptqpipe.search import search_names


def render() -> str:
    """One line for each format, with its aliases and its default container; then the other names."""
    lines = ["formats (any case; also element/block/scale[/global], such as e2m1/8/ue5m3):"]
    for scheme in SCHEMES.values():
        names = ", ".join((scheme.name, *scheme.aliases))
        lines.append(f"  {names:<38} {scheme.describe()} [{scheme.container}]")
    return "\n".join(
        [*lines, f"containers: {', '.join(container_names())}", f"searches:   {', '.join(search_names())}"]
    )
