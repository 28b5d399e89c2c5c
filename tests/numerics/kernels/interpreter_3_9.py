"""What Triton 3.9 makes again at each operation that it interprets is made once, which is most of its time: types,
constants, the language's functions. Imported by quick_interpreter.py where that is the Triton that interprets.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl, semantic = interpreter.tl, interpreter.TritonSemantic
_patched: set[str] = set()
_PLAIN = {tl.tensor, int, float, bool, str, type(None), tl.dtype, tl.block_type}
_patch_lang, _numpy_type, _converted = interpreter._patch_lang, interpreter._get_np_dtype, interpreter._convert_float
_block_init, _equal, _unwrapped = tl.block_type.__init__, tl.dtype.__eq__, tl.core._unwrap_if_constexpr
_checked, _broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value


def patch_once(fn: Any) -> Any:
    """Puts the interpreter's functions in the place of the language's, for good: these processes compile nothing.

    The interpreter does so at every call of a function and looks through all names of the language for it, which takes
    a third of its time.
    """
    if fn.__module__ not in _patched:
        _patch_lang(fn)
        _patched.add(fn.__module__)
    return SimpleNamespace(restore=lambda: None)


def patch_attr(place: Any, name: str, member: Any, *given: Any) -> None:
    """Puts the interpreter's function there, which asks nothing about its arguments."""
    own = member.__wrapped__ if hasattr(member, "__wrapped__") else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return own(*arguments, **named)

    setattr(place, name, call)


def numpy_type(kind: Any) -> Any:
    """NumPy's type for one of the language."""
    facts = vars(kind)
    if "numpy_type" not in facts:
        facts["numpy_type"] = _numpy_type(kind)
    return facts["numpy_type"]


def new_block(cls: Any, element: Any, shape: Any) -> Any:
    """The one type of blocks of this shape."""
    known = vars(element).setdefault("blocks", {})
    key = tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
    if key not in known:
        known[key] = made = object.__new__(cls)
        _block_init(made, element, shape)
    return known[key]


def new_tensor(self: Any, handle: Any, kind: Any) -> None:
    """As the class has it, with what its type says made once."""
    facts = vars(kind)
    if "of_tensors" not in facts:
        shape = [tl.constexpr(n) for n in (kind.shape if kind.is_block() else ())]
        numel = tl.constexpr(kind.numel if shape else 1)
        facts["of_tensors"] = {"shape": tl.core.tuple(shape), "numel": numel, "type": kind, "dtype": kind.scalar}
    self.__dict__.update(facts["of_tensors"], handle=handle)


def equal(one: Any, other: Any) -> bool:
    """Of types, mostly the same one."""
    if type(one) is type(other) is tl.dtype:
        return bool(one.name == other.name)
    return one is other or _equal(one, other)


def converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
    """Between types of numbers; bfloat16 is the upper half of a float32, and cut off where no rounding is asked for."""
    if (source, target, mode) == (tl.float32, tl.bfloat16, None):
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return x.astype(np.uint32) << 16
    return _converted(x, source, target, mode)


def expand_dims(x: Any, axis: int) -> Any:
    """With one more axis there."""
    return x[(slice(None),) * axis + (None,)]


def checked(self: Any, a: Any, b: Any, *how: Any, **named: Any) -> Any:
    """Two operands of one type. What becomes of a number depends on the other's type alone, and is kept there."""
    if isinstance(a, tl.tensor) and isinstance(b, tl.tensor):
        # Pointers and quotients have rules of their own.
        plain = a.dtype is b.dtype and len(how) < 4 and not named and not a.dtype.is_ptr()
        return self.broadcast_impl_value(a, b) if plain else _checked(self, a, b, *how, **named)
    if not (isinstance(a, tl.tensor) or isinstance(b, tl.tensor)):
        return _checked(self, a, b, *how, **named)
    at = int(isinstance(b, tl.tensor))
    tensor, number = (b, a) if at else (a, b)
    known, key = vars(tensor.type).setdefault("numbers", {}), (at, type(number), repr(number), how, *named)
    if key in known:
        return (known[key], b) if at else (a, known[key])
    both = _checked(self, a, b, *how, **named)
    if both[at] is tensor:
        known[key] = both[1 - at]
    return both


def spread(x: Any, kind: Any) -> Any:
    """To the shape of a type."""
    if x.type is kind:
        return x
    data = np.empty(kind.shape, x.handle.data.dtype)
    data[...] = x.handle.data
    return tl.tensor(interpreter.TensorHandle(data, kind.scalar), kind)


def broadcast(self: Any, a: Any, b: Any) -> Any:
    """Two tensors in one shape, which their types decide."""
    if a.type is b.type:
        return a, b
    known = vars(a.type).setdefault("beside", {})
    if id(b.type) not in known:
        both = _broadcast(self, a, b)
        known[id(b.type)] = (both[0].type, both[1].type, b.type)  # which lives as long as its number
        return both
    found = known[id(b.type)]
    return spread(a, found[0]), spread(b, found[1])


def unwrapped(x: Any) -> Any:
    """What a constant of the language stands for, and other things themselves."""
    kind = type(x)
    return x.value if kind is tl.constexpr else x if kind in _PLAIN else _unwrapped(x)


interpreter.np.expand_dims = expand_dims
interpreter._patch_lang = patch_once
interpreter._convert_float = converted
interpreter._patch_attr = patch_attr
interpreter._get_np_dtype = numpy_type
tl.block_type.__new__ = new_block
tl.block_type.__init__ = lambda self, element, shape: None
tl.tensor.__init__ = new_tensor
tl.dtype.__eq__ = equal
tl.core._unwrap_if_constexpr = unwrapped
semantic.binary_op_type_checking_impl = checked
semantic.broadcast_impl_value = broadcast
# It adds again in int64, for an assertion that is not made unless a kernel is debugged.
semantic.binary_op_sanitize_overflow_impl = lambda *given: None
