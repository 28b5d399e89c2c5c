"""A chart in the two widths of the page, which shows the one that fits."""

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart for wide and for narrow pages."""

    wide: Markup
    narrow: Markup

    @staticmethod
    def both(draw: Callable[[bool], Markup]) -> "Drawn":
        """Draws it twice; ``draw`` is told whether for a wide page."""
        return Drawn(draw(True), draw(False))
