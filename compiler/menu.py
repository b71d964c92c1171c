"""The menu that every target has: each op by itself, as the torch function that is its meaning."""
from __future__ import annotations

from .kernel import KernelDef
from .ops import OPS

# ops by the number of their outputs, where it is not one
OUTPUTS = {"kda_conv": 4, "kda_delta_rule": 2, "kda_verify": 3, "router_topk": 2, "experts_gate_up": 2}


def op_kernels() -> list[KernelDef]:
    """One kernel an op, id ``torch.<op>``; views need none."""
    kernels = []
    for name, definition in OPS.items():
        if definition.kind == "view":
            continue
        outs = ", ".join(f"o{i}" for i in range(OUTPUTS.get(name, 1)))
        kernels.append(KernelDef(
            id=f"torch.{name}", pattern=f"{outs} = {name}(...)\n-> {outs}", entry=f"op:{name}",
            note="collective by the transport" if definition.kind == "comm" else "torch, one op",
        ))
    return kernels
