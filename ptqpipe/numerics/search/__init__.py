"""Scale searches, a row of `SEARCHES` each. Nothing here imports torch: the command line lists the rows."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ptqpipe.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

    from ptqpipe.numerics.formats import Format


class Rule(Protocol):
    """Chooses the scales ``[N/bn, K/bk]`` of a matrix: uint8 codes, or numbers of the scale's dtype."""

    def __call__(
        self,
        w: "torch.Tensor",
        fmt: "Format",
        *,
        global_scale: "torch.Tensor | None" = None,
        importance: "torch.Tensor | None" = None,
    ) -> "torch.Tensor": ...


@dataclass(frozen=True, slots=True)
class Search:
    """A row of the table.

    function  a module of this package and its function, a `Rule`
    purpose   what it does, in a line
    proven    whether its scales are the argmin of ``objective.py`` over every scale that the format has
    """

    function: str
    purpose: str
    proven: bool = False

    @property
    def search(self) -> Rule:
        """The function; its module is imported on first use."""
        module, _, name = self.function.partition(".")
        return cast(Rule, getattr(import_module(f"{__name__}.{module}"), name))


SEARCHES = {
    "absmax": Search(
        "baselines.absmax",
        "Abs-max: maps the largest magnitude of the block to the largest element, and rounds the scale.",
    ),
    "absmax_pz": Search(
        "baselines.absmax_pz",
        'Abs-max with underflow protection ("prevent zero"): as absmax, but never below the smallest scale.',
    ),
    "brute_force": Search(
        "brute_force.search",
        "The oracle: scores every scale code of the format for every block and takes the best one, ties to the "
        "smallest code.",
        proven=True,
    ),
    "enlarged": Search(
        "enlarged.search",
        "As exact, after enlarging the weights a little, since rounding shrinks them: lower error of the model.",
        proven=True,
    ),
    "exact": Search(
        "exact.search",
        "The exact search: the least squared error over every scale of the format, equal to brute force bit for bit.",
        proven=True,
    ),
    "four_over_six": Search(
        "baselines.four_over_six",
        "Four over six: per block, maps the largest magnitude to 6 or to 4, whichever has the smaller squared error.",
    ),
    "ocp_ceil": Search(
        "baselines.ocp_ceil",
        "The smallest power of two that clips nothing: scale exponent ceil(log2(amax / max)).",
    ),
    "ocp_even": Search(
        "baselines.ocp_even",
        "The OCP rule with round-half-up exponents: as ocp_floor, but a significand of 1.75 or more counts as 2.",
    ),
    "ocp_floor": Search(
        "baselines.ocp_floor",
        "The OCP rule: scale exponent floor(log2 amax) - emax, emax being the exponent of the largest element.",
    ),
    "refit": Search(
        "baselines.refit",
        "float32 scales: the best of a list of candidates, then alternating least squares. Good, not proven.",
    ),
    "window": Search(
        "baselines.window",
        "A fixed window of scale codes around abs-max: the best of [-3, +7] from the code at or below amax / max.",
    ),
}


def get_search(name: str) -> Search:
    """The search called ``name`` (``-`` and ``_`` alike); UsageError with the known names."""
    key = name.lower().replace("-", "_")
    if key not in SEARCHES:
        raise UsageError(f"unknown search {name!r}; {did_you_mean(name, SEARCHES, listed=True)}")
    return SEARCHES[key]
