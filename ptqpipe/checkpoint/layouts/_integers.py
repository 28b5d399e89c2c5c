"""Weights of INT4 and INT8: their formats as checkpoints describe them, and how compressed-tensors stores them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ptqpipe.checkpoint.layouts._codec import FLOAT_SCALES, scale_dtype
from ptqpipe.checkpoint.layouts._config import FLOAT_MODEL, check_parts, matrix_shape, scheme_for, stored_grid
from ptqpipe.checkpoint.layouts._types import Load, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import CODECS, WHOLE, Format, unpack
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation


def integer_format(bits: int, group: int, scale: str, *, zeros: bool, offset: bool = True) -> Format:
    """INT4 or INT8 with a float scale for every ``group`` weights of a row; 0 for one scale a row.

    scale   safetensors dtype of the scales
    zeros   whether each group has a zero point, too
    offset  whether codes count from the least integer, as packed ones do; else they are two's complement

    CheckpointError for scales of another dtype.
    """
    if scale not in FLOAT_SCALES:
        raise CheckpointError(f"integer weights have scales of dtype {scale}; expected F16, BF16 or F32")
    element = CODECS[f"int{bits}" if offset else f"int{bits}_signed"]
    name = element.name + (f"_g{group}" if group else "_channel") + ("_zeros" if zeros else "")
    return Format(name, element, (1, group or WHOLE), CODECS[FLOAT_SCALES[scale]], has_zeros=zeros)


def group_size(described: Mapping[str, Any], method: str) -> int:
    """``group_size`` of a config, 0 for -1, which means one group per row. CheckpointError for no such number."""
    size = described.get("group_size", -1)
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise CheckpointError(f"group_size of a {method} checkpoint is {size!r} in config.json; expected -1 or 1 to K")
    return max(size, 0)


def has_integers(described: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config has a group of integer weights."""
    groups = described.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    return any(isinstance(group_weights, Mapping) and group_weights.get("type") == "int" for group_weights in weights)


def described_integers(weights: Mapping[str, Any]) -> Format | None:
    """The format of a compressed-tensors group with these weight arguments; None where it is none that is read."""
    strategy, bits = weights.get("strategy"), weights.get("num_bits")
    group = weights.get("group_size") if strategy == "group" else 0
    if weights.get("type") != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        return None
    if not isinstance(group, int) or group < (strategy == "group"):
        return None
    return integer_format(bits, group, "BF16", zeros=weights.get("symmetric") is False)


def integer_parts(module: str, shape: tuple[int, int], fmt: Format) -> list[Part]:
    """The tensors of a weight [N, K] without zero points: ``weight_packed``, whose words of 32 bits hold codes that
    count from the least integer, with ``weight_shape``; or ``weight``, one integer per byte.

    FormatError where rows do not fill whole words.
    """
    n, k = shape
    grid, bits = fmt.scale_shape(shape), fmt.element.bits
    scales = Part(f"{module}.weight_scale", scale_dtype(fmt), grid, PartKind.SCALES)
    if fmt.element.grid[0] == 0:
        return [Part(f"{module}.weight", "I8", shape, PartKind.DATA), scales]
    if k * bits % 32:
        raise FormatError(f"{module}: compressed-tensors packs integers into words of 32 bits, {k} do not fill them")
    data = Part(f"{module}.weight_packed", "I32", (n, k * bits // 32), PartKind.DATA)
    return [data, scales, Part(f"{module}.weight_shape", "I64", (2,), PartKind.SHAPE, numbers=shape)]


def stored_integers(module: str, fmt: Format, activation: Activation, names: Names) -> StoredWeight:
    """The INT4 or INT8 weight of a module: ``weight_packed`` I32 [N, K*bits/32], or ``weight`` I8 [N, K].

    fmt  what the config says; scale dtype and the codes' offset as they are found

    CheckpointError where names, dtypes and shapes contradict it.
    """
    weight, bits = f"{module}.weight", fmt.element.bits
    packed = f"{module}.weight_packed" in names or bits < 8
    data = f"{module}.weight_packed" if packed else weight
    n, k = matrix_shape(names, data, bits=bits, owner=module)
    k = k * 4 if packed else k  # words of four bytes
    scale = names.get(f"{module}.weight_scale", ("BF16", ()))[0]
    fmt = integer_format(bits, fmt.block[1], scale, zeros=fmt.has_zeros, offset=packed)
    grid = stored_grid(weight, fmt, (n, k))
    expected = integer_parts(module, (n, k), fmt)
    if f"{module}.weight_shape" not in names:
        expected = [part for part in expected if part.role is not PartKind.SHAPE]
    whole = None
    zero = f"{module}.weight_zero_point"
    if fmt.has_zeros:
        words = packed and names.get(zero, ("I32", ()))[0] != "I8"
        shape = (-(-n * bits // 32), grid[1]) if words else grid
        expected.append(Part(zero, "I32" if words else "I8", shape, PartKind.ZEROS))
        whole = partial(_read, module, data, fmt, (n, k))
    check_parts(expected, names, weight=weight)
    others = [] if fmt.has_zeros or zero not in names else [Part(zero, *names[zero], PartKind.OTHER)]
    if others:
        whole = partial(_read_symmetric, module, data, fmt, (n, k))
    return StoredWeight(weight, (n, k), scheme_for(fmt, activation), (*expected, *others), whole=whole)


def integer_stacks(names: Names) -> list[str]:
    """Stacks of experts whose codes are one tensor ``<stack>_packed`` I32 [E, N, K*bits/32]: of both projections of an
    MLP, with shapes that say which axis is the inputs'."""
    stacks = []
    for name, (dtype, shape) in names.items():
        stack = name.removesuffix("gate_up_proj_packed")
        down = names.get(f"{stack}down_proj_packed", ("", ()))
        if stack.endswith("experts.") and dtype == down[0] == "I32" and len(shape) == len(down[1]) == 3:
            stacks += [f"{stack}gate_up_proj", f"{stack}down_proj"]
    return stacks


def stored_stack(stack: str, fmt: Format, activation: Activation, names: Names) -> StoredWeight:
    """A stack of experts of INT4 or INT8, [E, N, K] in the float model: ``<stack>_packed`` I32 [E, N, K*bits/32],
    ``<stack>_scale`` [E, N, K/group], and ``<stack>_shape`` (N, K) where it is there.

    CheckpointError where names, dtypes and shapes contradict what the config says, for zero points, and for codes
    packed along the outputs.
    """
    parent, bits = stack.rpartition(".")[0], fmt.element.bits
    (experts, up, words), (_, down, inner) = (names[f"{parent}.{leaf}_proj_packed"][1] for leaf in ("gate_up", "down"))
    if fmt.has_zeros or (up, words * 32 // bits) != (2 * inner * 32 // bits, down):
        raise CheckpointError(
            f"'{stack}_packed' is a stack of experts with zero points, or not of [experts, outputs, inputs], which is "
            f"not read; {FLOAT_MODEL}"
        )
    _, n, words = names[f"{stack}_packed"][1]
    shape = (n, words * 32 // bits)
    fmt = integer_format(bits, fmt.block[1], names.get(f"{stack}_scale", ("BF16", ()))[0], zeros=False)
    expected = [
        Part(f"{stack}_packed", "I32", (experts, n, words), PartKind.DATA, stacked=True),
        Part(
            f"{stack}_scale",
            scale_dtype(fmt),
            (experts, *stored_grid(stack, fmt, shape)),
            PartKind.SCALES,
            stacked=True,
        ),
    ]
    if f"{stack}_shape" in names:
        expected.append(Part(f"{stack}_shape", "I64", (2,), PartKind.SHAPE, numbers=shape))
    check_parts(expected, names, weight=stack)
    return StoredWeight(stack, shape, scheme_for(fmt, activation), tuple(expected), experts)


def _read(module: str, data: str, fmt: Format, shape: tuple[int, int], load: Load) -> QTensor:
    """A weight with zero points."""
    zeros, codes = _zeros(module, fmt, shape[0], load), _codes(data, shape, load)
    return QTensor(fmt, shape, codes, load(f"{module}.weight_scale", None, None), zeros=zeros)


def _read_symmetric(module: str, data: str, fmt: Format, shape: tuple[int, int], load: Load) -> QTensor:
    """A weight whose config says that it has no zero points, and which has them all the same: they must be 0."""
    if bool((_zeros(module, fmt, shape[0], load) != max(0, -int(min(fmt.element.grid)))).any()):
        raise CheckpointError(
            f"'{module}.weight_zero_point' is not 0 everywhere, but config.json says symmetric: true; {FLOAT_MODEL}, "
            "or say symmetric: false if that is what its publisher meant"
        )
    return QTensor(fmt, shape, _codes(data, shape, load), load(f"{module}.weight_scale", None, None))


def _codes(data: str, shape: tuple[int, int], load: Load) -> torch.Tensor:
    return load(data, None, None).contiguous().view(torch.uint8).reshape(shape[0], -1)


def _zeros(module: str, fmt: Format, rows: int, load: Load) -> torch.Tensor:
    """Zero points as codes, uint8 [N, K/group]: stored packed along N from the least integer on, as codes are, or one
    per I8."""
    zero, bits = load(f"{module}.weight_zero_point", None, None), fmt.element.bits
    if zero.dtype is torch.int32:
        zeros = unpack(zero.t().contiguous().view(torch.uint8), bits)[:, :rows].t().contiguous()
    else:
        shifted = zero.int() - int(min(fmt.element.grid))
        if int(shifted.min()) < 0 or int(shifted.max()) >= 1 << bits:
            raise CheckpointError(f"'{module}.weight_zero_point' has numbers beyond {bits} bits")
        zeros = (shifted if fmt.element.grid[0] < 0 else zero.int() & 0xFF).to(torch.uint8)
    return zeros
