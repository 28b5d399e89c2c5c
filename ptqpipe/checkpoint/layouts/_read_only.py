"""What layouts share that are read and never written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint.layouts._config import quant_method
from ptqpipe.checkpoint.layouts._types import ConfigFiles, ConfigRequest, Container, Names, Part, StoredWeight, Target
from ptqpipe.errors import FormatError
from ptqpipe.numerics.schemes import Scheme


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """A layout by its ``quant_method``, without a way to write it."""

    method: str

    def supports(self, scheme: Scheme) -> str | None:
        """Never: the layout is read only."""
        return f"{self.method} is read only; write {scheme.name} with the {scheme.container} container"

    def parts(
        self,
        weight: str,
        shape: tuple[int, int],
        scheme: Scheme,
        *,
        experts: int | None = None,
        transposed: bool = False,
    ) -> tuple[Part, ...]:
        """FormatError: the layout is read only."""
        raise FormatError(f"{weight}: {self.supports(scheme)}")

    def configs(self, request: ConfigRequest) -> dict[str, dict[str, Any]]:
        """FormatError: the layout is read only."""
        raise FormatError(f"{self.method} is read only; choose another container")

    def config_faults(self, files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
        """Nothing: the layout is read only."""
        return iter(())

    def warnings(self, targets: Sequence[Target], config: Mapping[str, Any]) -> list[str]:
        """Nothing is written, nothing is to be warned of."""
        return []

    def detect(self, config: Mapping[str, Any], names: Names) -> bool:
        """Whether a checkpoint with this config has this layout."""
        return quant_method(config) == self.method


def is_read_only(container: Container) -> bool:
    """Whether nothing can be written in a layout."""
    return isinstance(getattr(container.supports, "__self__", None), ReadOnly)
