"""What a plan is: units of weights, and kept tensors."""

from dataclasses import dataclass

from ptqpipe.models.slices import Member
from ptqpipe.numerics.schemes import Scheme
from ptqpipe.recipe.recipe import Rule


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are quantized together and share one global scale."""

    id: str
    members: tuple[Member, ...]
    rule: Rule

    @property
    def scheme(self) -> Scheme:
        scheme = self.rule.scheme
        if scheme is None:  # units are built from quantizing rules only
            raise AssertionError(self.id)
        return scheme

    @property
    def search(self) -> str:
        return self.rule.search_for(self.scheme.fmt.name)

    @property
    def elements(self) -> int:
        return sum(member.elements for member in self.members)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that keeps its bytes (or its decoded numbers, if the source stores it quantized), and why."""

    name: str
    reason: str
    matrix: bool  # whether readers could look for it among the linear layers


@dataclass(frozen=True, slots=True)
class Plan:
    """The fate of every tensor: ``units`` and ``kept``, each in the order of the source files."""

    units: tuple[Unit, ...]
    kept: tuple[Kept, ...]
    tied_head: bool  # the head is the embedding, so no tensor of its own names it
    modules: tuple[str, ...]  # every name that a pattern may mean: of tensors, and of single experts in kept stacks

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """Modules with a kept matrix, and ``lm_head``: what config files must list as not quantized."""
        modules = [kept.name.removesuffix(".weight") for kept in self.kept if kept.matrix]
        return tuple(dict.fromkeys(modules + ["lm_head"] * self.tied_head))
