"""The types that containers share: stored tensors, stored weights, and the shape of a container module."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch

from ptqpipe.checkpoint.layouts._lists import Lists
from ptqpipe.errors import FormatError
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.rotation import rotated_weight
from ptqpipe.numerics.schemes import Capabilities, Scheme

Names = Mapping[str, tuple[str, tuple[int, ...]]]
"""The tensors of a checkpoint: name -> (safetensors dtype, shape)."""

ConfigFiles = Mapping[str, Mapping[str, Any] | None]
"""The config files of a checkpoint by name, None for one that is missing."""

Load = Callable[[str, int | None, int | None], torch.Tensor]
"""Reads rows [start, stop) of a stored tensor's first axis (all of it for None)."""


class PartKind(StrEnum):
    """Kinds of stored tensors of a quantized weight: codes, scales, ..."""

    DATA = "data"  # packed codes, row major
    SCALES = "scales"  # block scales, row major over the scale grid
    GLOBAL = "global"  # float32 global scale, multiplies
    GLOBAL_DIVISOR = "global_divisor"  # its reciprocal
    INPUT_GLOBAL = "input_global"  # static global scale of the input, multiplies
    INPUT_GLOBAL_DIVISOR = "input_global_divisor"
    ZEROS = "zeros"  # zero points of the blocks
    GROUPS = "groups"  # which block each column belongs to, where they are not in order
    SHAPE = "shape"  # (N, K) once more
    OTHER = "other"  # kept with the weight, not part of its decode


DECODED_ROLES = frozenset(role for role in PartKind if not role.value.startswith(("input", "shape", "other")))
"""Roles of the parts that make up a weight's decode."""


class Part(NamedTuple):
    """One stored tensor of a quantized weight.

    ``dtype`` is safetensors' name of it ("U8", "F8_E4M3", "F32" ...). ``stacked`` says that the first axis counts the
    experts of a 3-D weight. ``numbers`` are what it holds where they follow from the weight's shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: PartKind
    stacked: bool = False
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight found in a checkpoint.

    ``weight`` is the logical name ("model.layers.0.mlp.up_proj.weight"). ``shape`` is (N, K) = (out, in) of the codes.
    A stack of experts in one 3-D tensor has ``experts`` = E, and its parts have a leading axis E. ``transposed`` says
    that the tensor of this name in the float checkpoint is [in, out] (each expert of a stack); the codes never are.
    Where codes or zero points are not row major (AWQ, GPTQ), ``whole`` reads the weight, CheckpointError for numbers
    that contradict each other.
    """

    weight: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[Part, ...]
    experts: int | None = None
    transposed: bool = False
    whole: Callable[[Load], QTensor] | None = None

    def part(self, role: PartKind) -> Part | None:
        return next((part for part in self.parts if part.role is role), None)

    @property
    def planes(self) -> Sequence[int | None]:
        """The numbers of a stack's experts; None alone for one matrix."""
        return (None,) if self.experts is None else range(self.experts)

    def key(self, expert: int | None) -> str:
        """The name of one of its matrices in records and reports: the weight's, with the expert in a stack."""
        return self.weight if expert is None else f"{self.weight}[{expert}]"

    def renamed(self, weight: str) -> "StoredWeight":
        """Another weight, stored like this one, whose parts are called by its name as these are by this one's."""
        start, base = len(self.weight.removesuffix("weight")), weight.removesuffix("weight")
        parts = tuple([Part(base + part.name[start:], *part[1:]) for part in self.parts])
        return StoredWeight(weight, self.shape, self.scheme, parts, self.experts, self.transposed)

    def plain(self, q: QTensor, *, memory: torch.Tensor | None = None) -> torch.Tensor:
        """float32 of rows of it as the float model has them: decoded, and rotated back where inputs are rotated.
        ``memory``: float32 of as many numbers, which it may take."""
        return rotated_weight(decoded(q, memory=memory), self.scheme.rotation)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight that a converted checkpoint stores quantized; what the config files are written from."""

    weight: str
    scheme: Scheme
    experts: int | None = None
    transposed: bool = False

    @property
    def module(self) -> str:
        return self.weight.removesuffix(".weight")


def schemes_of(targets: Iterable[Target]) -> list[Scheme]:
    """The schemes of these targets, each object once, in order: a hundred thousand targets have few."""
    return list({id(target.scheme): target.scheme for target in targets}.values())


@dataclass(frozen=True, slots=True)
class ConfigRequest:
    """The input for writing a checkpoint's config files.

    base          the source's config.json
    targets       the weights that are stored quantized
    kept_modules  modules whose matrices are not
    provenance    what the config says of its producer
    """

    base: Mapping[str, Any]
    targets: Sequence[Target]
    kept_modules: Sequence[str] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def check(self, supports: Callable[[Scheme], str | None]) -> None:
        """FormatError for the first target whose scheme the container cannot store."""
        for scheme in schemes_of(self.targets):
            reason = supports(scheme)
            if reason is not None:
                first = next(target for target in self.targets if target.scheme is scheme)
                raise FormatError(f"{first.weight}: {reason}")


class Container(Protocol):
    """The shape of a container module: all that there is to know about one layout stands in its file.

    A read-only one answers ``supports`` with its reason and refuses ``parts``.
    """

    QUANT_METHOD: str
    CAPABILITIES: Capabilities

    def supports(self, scheme: Scheme, /) -> str | None:
        """None if the layout can store this scheme, else one line that says why not and what can."""

    def parts(
        self,
        weight: str,
        shape: tuple[int, int],
        scheme: Scheme,
        /,
        *,
        experts: int | None = None,
        transposed: bool = False,
    ) -> tuple[Part, ...]:
        """The tensors that store this weight, in the order in which they are written.

        FormatError where the layout cannot store the scheme, the name, a stack of experts or a transposed weight.
        """

    def configs(self, request: ConfigRequest, /) -> dict[str, dict[str, Any]]:
        """The config files by file name ("config.json", ...): the source's config with the quantization described.

        FormatError naming the weight whose scheme the layout cannot store.
        """

    def detect(self, config: Mapping[str, Any], names: Names, /) -> bool:
        """Whether a checkpoint with this config and these tensors has this layout."""

    def stored_weights(self, config: Mapping[str, Any], names: Names, /) -> dict[str, StoredWeight]:
        """Every quantized weight, by logical name. CheckpointError where names, dtypes, shapes and config disagree."""

    def lists(self, config: Mapping[str, Any], /) -> Lists:
        """Which modules the description excludes, and of which readers look for codes. ``config`` is config.json (see
        `merged_config`). CheckpointError for lists that are none."""

    def config_faults(self, files: ConfigFiles, stored: Mapping[str, StoredWeight], /) -> Iterator[tuple[str, str]]:
        """(key or file, message): what readers act on in the config ``files`` and what is ``stored`` contradicts.

        Keys that every config with this layout has, with one plain value, are compared elsewhere."""
