"""Dtypes by name, and which stored floats may stand for which.

Transformers widens a router when it saves and stores ``A_log`` as narrow as its model, so plain floats are accepted
in any float dtype and tensors that lose digits are named. Packed bytes and scaled fp8 are never converted.
"""
from __future__ import annotations

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "u8": torch.uint8,
    "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.float16: "fp16", torch.float64: "fp64"}
Kinds = dict[str, tuple[str, str]]  # by tensor: dtype stored and dtype read
_FLOAT_BITS = {"bf16": (8, 8), "fp16": (11, 5), "fp32": (24, 8), "fp64": (53, 11)}  # of significand, of exponent
_NAMED = 4  # tensors that a note names


def can_stand_for(stored: str, wanted: str) -> bool:
    """Whether a tensor of dtype ``stored`` is what a recipe of dtype ``wanted`` may read."""
    return stored == wanted or {stored, wanted} <= _FLOAT_BITS.keys()


def is_rounded(stored: str, read: str) -> bool:
    """Whether reading ``stored`` floats as ``read`` can lose digits or range."""
    plain = {stored, read} <= _FLOAT_BITS.keys()
    return plain and any(have > left for have, left in zip(_FLOAT_BITS[stored], _FLOAT_BITS[read], strict=True))


def rounding_note(tensors: Kinds, what: str) -> str:
    """One line that says ``what`` happens to tensors. Empty without any."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, kind in sorted(tensors.items()):
        kinds.setdefault(kind, []).append(name)
    parts = []
    for (stored, read), names in kinds.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        many = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
        parts.append(f"{many} stored as {stored} {what} {read}: {', '.join(names[:_NAMED])}{more}")
    return "; ".join(parts)
