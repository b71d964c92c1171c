"""A Hugging Face checkpoint folder: what it holds, whether that fits a plan, and reading parts of tensors.

Opening reads headers only. Evaluating recipes is ``load.py``'s work.
"""
from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..compiler.errors import CheckpointError
from .boxes import Box, sizes
from .conversion import Kinds, can_stand_for, is_rounded, rounding_note
from .load import Loadable, TensorInfo, load_weights, stored_tensors
from .safetensors_header import read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# prefixes of tensors that a decode step never reads; the first layer has no blocks to mix, but weights to do it
NOT_DECODED = ("vision_tower.", "mm_projector.", "language_model.model.layers.0.self_attention_res_")
_SHOWN = 10  # lines of each group in an error

# group -> (heading, what to do)
_GROUPS = {
    "files": ("files that the index names are absent", "finish the download"),
    "headers": ("parts of files are damaged", "download these files again"),
    "index": ("tensors are in the index but not in the file that it names", "the index is of other files"),
    "missing": ("tensors that the plan reads are missing", "check that the config is this checkpoint's"),
    "extra": ("tensors are read by nothing", "check the config, or name their prefix in `ignore`"),
    "shape": ("tensors have another shape", "check that the config is this checkpoint's"),
    "dtype": ("tensors have another dtype", "use a checkpoint that was not converted (plain floats may differ)"),
}
_Findings = dict[str, list[str]]


class Checkpoint:
    """A folder with ``model.safetensors.index.json`` and its files, or with a single ``model.safetensors``.

    ``tensors`` maps the name of each readable tensor to its shape, dtype and place. Damage found on opening
    is kept for ``check``. Raises ``CheckpointError`` when the folder or its index cannot be read at all.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._found: _Findings = {}
        self._unreadable: set[str] = set()  # in the index, but absent or damaged
        self._unindexed: dict[str, str] = {}  # in a file, but not in the index -> file
        self._names_known = True  # false when there is no index and the only header is damaged
        self._open: dict[str, Any] = {}
        self._read_headers(self._read_index())

    def find(self, name: str) -> TensorInfo | None:
        """Shape, dtype and place of a readable tensor."""
        return self.tensors.get(name)

    def read(self, name: str, box: Box) -> Tensor:
        """The part ``box`` of tensor ``name``, on the CPU; only its bytes are touched. Files stay open."""
        file = self.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            part = self._open[file].get_slice(name)[tuple(slice(*r) for r in box)]
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file}: tensor {name} cannot be read: {error}") from error
        if list(part.shape) != sizes(box):
            raise CheckpointError(f"{self.folder / file}: tensor {name} changed since the file was opened")
        return part

    def close(self) -> None:
        """Drop the open files. Tensors that were loaded stay valid."""
        self._open.clear()

    def load(
        self,
        weights: Mapping[str, Loadable],
        rank: int = 0,
        *,
        device: str | torch.device = "cpu",
        progress: bool = True,
    ) -> dict[str, Tensor]:
        """``load_weights`` from this folder; each file is opened once and closed at the end."""
        try:
            return load_weights(self, weights, rank, device=device, progress=progress)
        finally:
            self.close()

    def check(self, weights: Mapping[str, Loadable], ignore: Iterable[str] = NOT_DECODED) -> str:
        """Compare the folder with what ``weights`` read; prefixes in ``ignore`` may be extra.

        Returns a line that names the tensors which loading may round, empty when there are none.
        Raises one ``CheckpointError`` that lists, by group, all that is absent, damaged or different.
        """
        found: _Findings = {group: list(lines) for group, lines in self._found.items()}
        named: set[str] = set()
        rounded: Kinds = {}
        missing: list[tuple[tuple[str, ...], str]] = []
        for weight in weights.values():
            for names, shape, dtype in stored_tensors([weight.recipe]):
                name = next((n for n in names if n in self.tensors), None)
                if name is None:
                    known = self._names_known and not self._unreadable.intersection(names)
                    if known and names[0] not in named:
                        missing.append((names, f"{dtype} {list(shape)}"))
                    named.update(names)
                    continue
                info = self.tensors[name]
                if is_rounded(info.dtype, weight.dtype):
                    rounded[name] = (info.dtype, weight.dtype)
                if name not in named:
                    named.add(name)
                    _compare(name, info, shape, dtype, found)
        self._look_at_the_rest(named, missing, ignore, found)
        if any(found.values()):
            raise CheckpointError(f"checkpoint {self.folder} does not fit the plan\n{_report(found)}")
        return rounding_note(rounded, "will be read as")

    def _look_at_the_rest(self, named: set[str], missing: list[tuple[tuple[str, ...], str]], ignore: Iterable[str],
                          found: _Findings) -> None:
        """Puts what is missing and what nothing reads into ``found``."""
        extra = {name: info.file for name, info in self.tensors.items()} | self._unindexed
        extra = {n: f for n, f in extra.items() if n not in named and not n.startswith(tuple(ignore))}
        for number, (names, what) in enumerate(missing):
            hint = self._hint(names, extra) if number < _SHOWN else ""
            found.setdefault("missing", []).append(f"{' or '.join(names)}, {what}{hint}")
        if extra:
            found["extra"] = [f"{name} in {file}" for name, file in sorted(extra.items())]

    def _read_index(self) -> dict[str, str] | None:
        """Tensor name -> file name; None when there is no index but a single file."""
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return None
            raise CheckpointError(
                f"{self.folder} has neither {INDEX} nor {SINGLE}: name the folder of a safetensors checkpoint"
            )
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not a safetensors index ({type(error).__name__}: {error}): download it again"
            ) from error

    def _read_headers(self, index: dict[str, str] | None) -> None:
        expected: dict[str, set[str]] = {} if index is not None else {SINGLE: set()}
        for name, file in (index or {}).items():
            expected.setdefault(file, set()).add(name)
        for file, names in sorted(expected.items()):
            path = self.folder / file
            if not path.is_file():
                self._add("files", f"{file}, with {len(names)} tensors")
                self._unreadable |= names
                continue
            header = read_header(path)
            for problem in header.problems:
                self._add("headers", problem)
            if index is None:
                names = header.tensors.keys() | header.damaged
                self._names_known = header.readable
            for name in sorted(names - header.tensors.keys()):
                self._unreadable.add(name)
                if header.readable and name not in header.damaged:
                    self._add("index", f"{name} in {file}")
            for name, info in header.tensors.items():
                if name in names:
                    self.tensors[name] = info
                else:
                    self._unindexed[name] = file

    def _add(self, group: str, line: str) -> None:
        self._found.setdefault(group, []).append(line)

    def _hint(self, names: tuple[str, ...], extra: Mapping[str, str]) -> str:
        for name in names:
            if name in self._unindexed:
                return f"; {name} is in {self._unindexed[name]} but not in the index"
        numbers = re.findall(r"\d+", names[0])
        alike = [other for other in extra if re.findall(r"\d+", other) == numbers]
        close = difflib.get_close_matches(names[0], alike[:2000], n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""


def _compare(name: str, info: TensorInfo, shape: tuple[int, ...], dtype: str, found: _Findings) -> None:
    if shape != info.shape:
        found.setdefault("shape", []).append(f"{name} in {info.file}: expected {list(shape)}, found {list(info.shape)}")
    if not can_stand_for(info.dtype, dtype):
        found.setdefault("dtype", []).append(f"{name} in {info.file}: expected {dtype}, found {info.dtype}")


def _report(found: _Findings) -> str:
    lines: list[str] = []
    for group, (heading, fix) in _GROUPS.items():
        entries = found.get(group, [])
        if not entries:
            continue
        lines.append(f"  {heading} ({len(entries)}):")
        lines += [f"    {entry}" for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(f"    ... and {len(entries) - _SHOWN} more")
        lines.append(f"    fix: {fix}")
    return "\n".join(lines)
