"""The header of one safetensors file, with every way in which it can be damaged put in words."""
from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .load import TensorInfo

# safetensors' own names and element sizes; a dtype that is not here cannot be planned for, only named
DTYPES: dict[str, tuple[str, int]] = {
    "BF16": ("bf16", 2), "F32": ("fp32", 4), "U8": ("u8", 1), "F8_E4M3": ("fp8_e4m3", 1),
    "I32": ("i32", 4), "I64": ("i64", 8), "F16": ("fp16", 2), "I8": ("i8", 1), "F64": ("fp64", 8),
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class Header:
    """``tensors`` are whole. ``problems`` are sentences about the file; ``damaged`` are the names in them.

    ``readable`` is false when no entry could be read at all.
    """

    tensors: dict[str, TensorInfo]
    problems: list[str]
    damaged: set[str]
    readable: bool = True


def read_header(path: Path) -> Header:
    """Read the header of ``path`` and compare it with the file's length. Never raises on bad contents."""
    try:
        entries, data_start, file_size = _read_entries(path)
    except (OSError, ValueError) as error:
        return Header({}, [f"{path.name}: {error}"], set(), readable=False)
    found = Header({}, [], set())
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            found.tensors[name] = _read_entry(entry, path.name, data_start, file_size)
        except (KeyError, TypeError, ValueError) as error:
            what = str(error) if type(error) is ValueError else f"malformed header entry {entry!r}"
            found.problems.append(f"{path.name}: tensor {name}: {what}")
            found.damaged.add(name)
    return found


def _read_entries(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header as JSON, the offset of the data, and the size of the file."""
    file_size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_size < 8 or length > file_size - 8:
            raise ValueError(
                f"the header should have {length} bytes, the file has {file_size}: "
                "truncated, or not safetensors"
            )
        if length > _LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes: not a safetensors file")
        text = file.read(length)
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the header is not JSON ({error}): corrupt") from None
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object: corrupt")
    return entries, 8 + length, file_size


def _read_entry(entry: dict[str, Any], file: str, data_start: int, file_size: int) -> TensorInfo:
    shape = tuple(int(n) for n in entry["shape"])
    start, stop = (int(n) for n in entry["data_offsets"])
    dtype, itemsize = DTYPES.get(entry["dtype"], (entry["dtype"], 0))
    if itemsize and stop - start != prod(shape) * itemsize:
        raise ValueError(
            f"{dtype} {list(shape)} needs {prod(shape) * itemsize} bytes, the header gives {stop - start}"
        )
    if start < 0:
        raise ValueError(f"it begins at byte {start} of the data")
    if data_start + stop > file_size:
        raise ValueError(f"it ends at byte {data_start + stop}, the file has {file_size}: truncated")
    return TensorInfo(shape, dtype, file, data_start + start)
