"""What a plan is: units of weights, kept tensors, and where the rows of each weight lie in the source."""

from collections.abc import Mapping
from dataclasses import dataclass

from ptqpipe.recipe import Rule
from ptqpipe.schemes import Scheme

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (safetensors dtype, shape) of the tensors of a checkpoint, as a reader of plain weights sees them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where the rows of a weight lie in a source tensor: rows start, start+step, ... of [out, in].

    ``expert`` selects from a 3-D stack; ``transposed`` says the tensor (or each expert) is [in, out]. The columns of
    [out, in] are rotated by blocks of ``rotation`` when they are read (``rotation.py``).
    """

    tensor: str
    start: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One weight of a unit. ``weight`` is its logical name; ``shape`` is (N, K) = (out, in).

    With ``stack`` the weight is expert number ``source.expert`` of a 3-D weight that stays one tensor of ``stack``
    experts on disk, and ``weight`` names that stack.
    """

    weight: str
    shape: tuple[int, int]
    source: Slice
    stack: int | None = None

    @property
    def module(self) -> str:
        """The module's name: the weight's without ``.weight``."""
        return self.weight.removesuffix(".weight")

    @property
    def key(self) -> str:
        """What names it in records: the weight's name, with the expert in brackets in a stack."""
        return self.weight if self.stack is None else f"{self.weight}[{self.source.expert}]"

    @property
    def elements(self) -> int:
        """How many weights it holds."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are quantized together and share one global scale."""

    id: str
    members: tuple[Member, ...]
    rule: Rule

    @property
    def scheme(self) -> Scheme:
        """The scheme of every member."""
        scheme = self.rule.stored_scheme
        if scheme is None:  # units are built from quantizing rules only
            raise AssertionError(self.id)
        return scheme

    @property
    def search(self) -> str:
        """The search of its block scales."""
        return self.rule.search_for(self.scheme.fmt.name)

    @property
    def elements(self) -> int:
        """How many weights the unit holds."""
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
