"""What a GPU core dump says: the kernel that faulted, its grid, the exception. Read with cuda-gdb where there is one.

The dump is written by the driver (``crash`` asks for it); its format is NVIDIA's, so nothing here parses the file.
"""
from __future__ import annotations

import glob
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TOOLKITS = "/usr/local/cuda*/bin/cuda-gdb"
SECONDS = 120
SETTINGS = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    # no memory contents: a dump of a full device would be 140 GB. no abort: the command shall say its CUDA error itself
    "CUDA_COREDUMP_GENERATION_FLAGS": ("skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory,"
                                       "skip_abort"),
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
}


@dataclass(frozen=True)
class Fault:
    """A kernel on the device when the dump was made; ``grid`` is zero where the dump does not tell it. ``exception`` is
    empty for one that only runs; ``function`` is empty where the kernel had ended before its fault was known."""

    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    exception: str = ""

    def __str__(self) -> str:
        at = f" on a grid of {self.grid}" if any(self.grid) else ""
        return f"{self.function or 'a kernel that had ended'}{at}" + (f": {self.exception}" if self.exception else "")


def find_gdb() -> str | None:
    """cuda-gdb on the path or of the newest toolkit in the usual place; None where there is none."""
    return shutil.which("cuda-gdb") or max(glob.glob(TOOLKITS), default=None)


def read_core(path: Path, gdb: str) -> list[Fault]:
    """Kernels in a core dump, the faulting one first. What cuda-gdb said is kept beside the dump."""
    run = [gdb, "--batch", "-ex", f"target cudacore {path}", "-ex", "info cuda kernels"]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    path.with_name(f"gdb.{path.name}.txt").write_text(done.stdout + done.stderr)
    return parse(done.stdout + done.stderr)


def parse(text: str) -> list[Fault]:
    """Faults from what cuda-gdb prints."""
    named = re.search(r"CUDA Exception: (.+)", text) or re.search(r"CUDA_EXCEPTION_\d+, (.+)", text)
    exception = named.group(1).strip().rstrip(".") if named else ""
    found = []
    # with a grid, or as a plain frame of a kernel with line numbers
    at = re.search(r"([A-Za-z_]\w*)(?:\([^)]*\))?\s*<<<\((\d+),(\d+),(\d+)\),\((\d+),(\d+),(\d+)\)", text)
    frame = re.search(r"^#0\s+(?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)\s*\(", text, re.M)
    if at:
        name, *numbers = at.groups()
        found.append(Fault(name, _three(numbers[:3]), _three(numbers[3:]), exception))
    row = r"^\s*\*?\s*\d+.*?\((\d+),(\d+),(\d+)\)\s+\((\d+),(\d+),(\d+)\)\s+([A-Za-z_]\w*)"
    for match in re.finditer(row, text, re.M):
        *numbers, name = match.groups()
        faulted = exception if not found and (frame is None or frame.group(1) == name) else ""
        fault = Fault(name, _three(numbers[:3]), _three(numbers[3:]), faulted)
        if not any(f.function == fault.function and f.grid == fault.grid for f in found):
            found.append(fault)
    if exception and not any(f.exception for f in found):
        found.insert(0, Fault(frame.group(1) if frame else "", (0, 0, 0), (0, 0, 0), exception))
    return found


def _three(numbers: list[str]) -> tuple[int, int, int]:
    x, y, z = map(int, numbers)
    return x, y, z
