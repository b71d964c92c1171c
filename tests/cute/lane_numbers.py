"""The number types of the emulators: what the DSL calls ``Int32``, as an array with an element a thread or a lane.

Operations widen as the DSL's do: to the later of the two types in ``Types.ranks``, to ``Float32`` with a Python float.
"""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "truediv": np.divide, "lshift": np.left_shift, "rshift": np.right_shift, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}
DTYPES = {"Boolean": np.bool_, "Int32": np.int32, "Uint32": np.uint32, "Int64": np.int64, "Float32": np.float32}


class Number:
    """A value of every lane. Each emulator has types of its own, of its own shape."""

    dtype: Any = None
    types: Any = None
    shape: Callable[[], tuple[int, ...]]

    def __init__(self, value: Any) -> None:
        value = value.a if isinstance(value, Number) else value
        with np.errstate(all="ignore"):
            self.a = np.broadcast_to(np.asarray(value).astype(self.dtype), type(self).shape())

    def _with(self, other: Any, operation: Any) -> Any:
        types, kind = self.types, type(self)
        if isinstance(other, Number):
            kind = max(type(self), type(other), key=types.ranks.index)
        elif isinstance(other, float):
            kind = types.Float32
        elif kind is types.Boolean and not isinstance(other, bool):
            kind = types.Int32
        right = other if isinstance(other, Number) else kind(other)
        with np.errstate(all="ignore"):
            result = operation(self.a.astype(kind.dtype), right.a.astype(kind.dtype))
        return types.Boolean(result) if result.dtype == bool else kind(result)

    def bitcast(self, kind: Any) -> Any:
        return kind(np.ascontiguousarray(self.a).view(kind.dtype))

    def to(self, kind: Any) -> Any:
        return kind(self)

    def __neg__(self) -> Any:
        return type(self)(-self.a)

    def __invert__(self) -> Any:
        return type(self)(~self.a)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __bool__(self) -> bool:
        raise AssertionError("a branch on a value of the lanes outside a kernel")

    __hash__ = None  # type: ignore[assignment]


for _name, _operation in OPERATIONS.items():
    setattr(Number, f"__{_name}__", lambda self, other, operation=_operation: self._with(other, operation))


def number_types(shape: Callable[[], tuple[int, ...]]) -> Any:
    """``Boolean`` to ``Float32`` whose values have the ``shape`` of the launch that runs, and their ``ranks``."""
    types = SimpleNamespace()
    for name, dtype in DTYPES.items():
        setattr(types, name, type(name, (Number,), {"dtype": dtype, "types": types, "shape": staticmethod(shape)}))
    types.ranks = [getattr(types, name) for name in DTYPES]
    return types
