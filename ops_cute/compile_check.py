"""Compiles a bound launch for a GPU that is not here, and reads from the binary what it would use of it.

Registers and local memory stand in the cubin itself (an ELF file; its sections are the CUDA binary format's). Decides
nothing about what is compiled: the cross-compile test binds kernels to tensors without storage and passes the launches
in.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator

from ..compiler.launches import Usage
from .launching import KernelLaunch, compile_kernel

TARGETS = ("sm_90a", "sm_100a", "sm_103a")

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info: registers a thread, bytes of local memory a thread
_INSTRUCTION = 16  # bytes; the lower 12 bits are its operation
# operations by number, the same from sm_90 to sm_103
LOAD = 0x981  # of global memory (LDG)
WAIT, TRIGGER = 0x82E, 0x82D  # griddepcontrol.wait (ACQBULK) and griddepcontrol.launch_dependents (PREEXIT)
_LOCAL = {0x387, 0x983}  # STL and LDL


def compile_launch(launch: KernelLaunch, target: str) -> Usage:
    """Compiles one launch for a name of ``TARGETS``."""
    registers, spilled = cubin_usage(compile_kernel(launch, target).cubin)
    return Usage(registers, launch.shared, spilled)


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, the most of the kernels in ``cubin``. A frame that no instruction
    touches does not count."""
    found: dict[int, int] = {_REGISTERS: 0, _FRAME: 0}
    for name, content in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(content):
                found[attribute] = max(found[attribute], value)
    assert found[_REGISTERS], "no register counts in the cubin"
    return found[_REGISTERS], 0 if _LOCAL.isdisjoint(operations(cubin)) else found[_FRAME]


def operations(cubin: bytes) -> list[int]:
    """Numbers of the operations of the kernels in ``cubin``, in the order of the text."""
    return [content[at] | (content[at + 1] & 15) << 8 for name, content in _sections(cubin)
            if name.startswith(".text.") for at in range(0, len(content), _INSTRUCTION)]


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    assert elf[:5] == b"\x7fELF\x02", "not a 64-bit ELF file"
    start, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    texts = elf[headers[names][4] :]
    for header in headers:
        name = texts[header[0] : texts.index(b"\0", header[0])].decode()
        yield name, elf[header[4] : header[4] + header[5]]


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of the records of .nv.info that count registers or frames, one a function."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        # form 4: ``size`` bytes follow; the others hold their value in the two bytes of ``size``
        if form == 4 and attribute in (_REGISTERS, _FRAME):
            yield attribute, struct.unpack_from("<I", info, at + 8)[0]
        at += 4 + (size if form == 4 else 0)
