"""Builds a bound launch for a GPU that is not here, and reads from the binary what it would use of it.

Registers and spills come from the assembler's own record in the cubin, shared memory from Triton. Decides nothing
about what is compiled: the cross-compile test binds kernels to tensors without storage and passes the launches in.
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..compiler.launches import Usage
from .launching import KernelLaunch

TARGETS: dict[str, GPUTarget] = {
    "sm_90a": GPUTarget("cuda", 90, 32), "sm_100a": GPUTarget("cuda", 100, 32), "sm_103a": GPUTarget("cuda", 103, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# bytes a block may ask for: 227 KB on NVIDIA, 160 KB of LDS
SHARED_LIMIT = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448, "gfx950": 163840}

_POINTER = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv", torch.int16: "*i16",
}


def compile_for(launch: KernelLaunch, target: str) -> Any:
    """Triton's compiled kernel of one launch for a key of ``TARGETS``. Triton caches the result by content."""
    backend = TARGETS[target].backend
    options = {k: v for k, v in launch.options.items() if backend == "cuda" or k != "launch_pdl"}
    options |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    if backend != "cuda":
        del options["enable_fp_fusion"]
    return triton.compile(_source(launch, backend), target=TARGETS[target], options=options)


def compile_launch(launch: KernelLaunch, target: str) -> Usage:
    """What one launch would use on ``target``."""
    compiled = compile_for(launch, target)
    if TARGETS[target].backend == "cuda":
        registers, spilled = _cubin_usage(compiled.asm["cubin"])
    else:
        registers, spilled = _gcn_usage(compiled.asm["amdgcn"])
    return Usage(registers, compiled.metadata.shared, spilled)


def _source(launch: KernelLaunch, backend: str) -> ASTSource:
    """Signature as the runtime would specialise it: pointers and sizes that divide by 16, ones as constants."""
    names = launch.kernel.arg_names
    constants = dict(launch.constants)
    if backend != "cuda":
        # the switches of what only NVIDIA has: dependent launch, and assembly where there is a portable form
        switches = {"DEPENDENT_LAUNCH": False, "PORTABLE": True}
        constants |= {name: value for name, value in switches.items() if name in constants}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    marked = {p.name for p in launch.kernel.params if p.is_constexpr}
    for index, name in enumerate(names):
        if name in launch.pointers:
            tensor = launch.pointers[name]
            signature[name] = _POINTER[tensor.dtype]
            if tensor.storage_offset() * tensor.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in marked or not isinstance(constants[name], int) or constants[name] == 1:
            signature[name] = "constexpr"
        else:
            signature[name] = "i32"
            if constants[name] % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items() if signature[name] == "constexpr"}
    return ASTSource(launch.kernel, signature, constexprs=values, attrs=attributes)


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of the one kernel in ``cubin``."""
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", _cuobjdump(cubin, "--dump-resource-usage"))
    assert found, "no resource usage in the cubin"
    frame = int(found[2]) + int(found[3])
    # a frame that no instruction touches is not a spill
    if frame and not re.search(r"\b(STL|LDL)\b", _cuobjdump(cubin, "-sass")):
        frame = 0
    return int(found[1]), frame


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _gcn_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and spilled bytes from the metadata in the assembly."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    assert registers, "no register counts in the assembly"
    assert spilled, "no spill counts in the assembly"
    return int(registers[1]), 4 * int(spilled[1])
