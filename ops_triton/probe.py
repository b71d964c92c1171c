"""What the Triton of this machine can do. ``k3plan doctor`` asks; nothing else depends on it."""
from __future__ import annotations

from importlib.metadata import version

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# by compute capability; Triton compiles these for sm_90a, sm_100a and sm_103a
CAPABILITIES = (90, 100, 103)


def _add_one(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr) + 1.0)


def probe() -> dict[str, str]:
    """``version``, and per target "" or the reason why a one-line kernel does not compile for it.

    Needs no GPU: Triton carries its own assembler.
    """
    # made here and not with @triton.jit, which returns an interpreted function under TRITON_INTERPRET
    source = ASTSource(JITFunction(_add_one), signature={"x_ptr": "*fp32", "y_ptr": "*fp32"})
    found = {"version": version("triton")}
    for capability in CAPABILITIES:
        target = GPUTarget("cuda", capability, 32)
        try:
            triton.compile(source, target=target, options={"enable_fp_fusion": True})
            found[f"sm_{capability}a"] = ""
        except Exception as error:
            found[f"sm_{capability}a"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found
