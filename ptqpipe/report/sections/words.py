"""Words for names, formats and weights, as every section says them."""

import re

from markupsafe import Markup, escape

from ptqpipe.errors import one_line
from ptqpipe.report.content import Weight

_FAMILIES = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8")


def shown(name: str) -> str:
    """A name from a file on one printable line of bounded length."""
    return one_line(name, limit=300)


def breakable(name: str) -> Markup:
    """The same, escaped, with places after its dots where a line may break."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._])", shown(name)))


def family(fmt: str) -> str:
    """The class of a format's colour: a letter-only word, whatever the format's name."""
    return next((name for name in _FAMILIES if fmt.startswith(name)), "other")


def how(weight: Weight) -> str:
    """How a weight's scales and codes were chosen, in a few words."""
    words = [weight.search]
    words += [weight.algorithm] if weight.algorithm not in ("", "rtn") else []
    words += [f"{weight.weighting} weights"] if weight.weighting not in ("", "none") else []
    words += ["went back to rounding"] if weight.reverted else []
    words += ["proven"] if weight.proven else []
    return ", ".join(word for word in words if word)
