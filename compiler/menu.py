"""The menu that every target has: each op by itself, as the torch function that is its meaning."""
from __future__ import annotations

from .kernel import KernelDef
from .ops import OPS

LIBRARY_PRODUCT = "op:linear"  # entry of the library's matrix product


def op_kernels() -> list[KernelDef]:
    """One kernel an op, id ``torch.<op>``; views need none."""
    kernels = []
    for name, definition in OPS.items():
        if definition.kind == "view":
            continue
        outs = ", ".join(f"o{i}" for i in range(definition.outputs))
        kernels.append(KernelDef(
            id=f"torch.{name}", pattern=f"{outs} = {name}(...)\n-> {outs}", entry=f"op:{name}",
            note="collective by the transport" if definition.kind == "comm" else "torch, one op",
        ))
    return kernels
