"""What the CuTe DSL of this machine can do. ``k3plan doctor`` asks; nothing else depends on it."""
from __future__ import annotations

from importlib.metadata import version

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


@cute.kernel
def _store_one(mX: cute.Tensor):
    mX[0] = cutlass.Float32(1.0)


@cute.jit
def _launch(mX: cute.Tensor):
    _store_one(mX).launch(grid=(1, 1, 1), block=(32, 1, 1))


def probe() -> dict[str, str]:
    """``version``, and per target "" or the reason why a one-line kernel does not compile for it.

    Needs no GPU: the DSL carries its own assembler.
    """
    found = {"version": version("nvidia-cutlass-dsl")}
    for target in TARGETS:
        try:
            cute.compile[cute.GPUArch(target)](_launch, make_fake_compact_tensor(cutlass.Float32, (4,)))
            found[target] = ""
        except Exception as error:
            found[target] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found
