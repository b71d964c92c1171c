"""Every kernel of the menus against the meaning of the ops that it computes. See ``tests/kernel_check.py``."""
from __future__ import annotations

from typing import Any

import kernel_check
import pytest
import torch

from k3plan.compiler.ops import OPS

KERNELS = kernel_check.all_kernels()
CASES = kernel_check.cases(KERNELS)


# of each kernel in the interpreter; the others are marked slow, and all run on a device
PROMPT_CASES = 6


def _in_the_interpreter() -> list[Any]:
    turn: dict[str, int] = {}
    found = []
    for case in CASES:
        kernel = case.region.kernel.id
        if not kernel_check.interpreted(case.region.kernel):
            continue
        turn[kernel] = turn.get(kernel, 0) + 1
        marks = [pytest.mark.slow] if turn[kernel] > PROMPT_CASES else []
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


@pytest.mark.parametrize("case", _in_the_interpreter())
def test_kernel(case: kernel_check.Case) -> None:
    kernel_check.check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_on_the_device(case: kernel_check.Case, device: str) -> None:
    kernel_check.check(case, device)


# for real sizes only, so that no small model fits them: tests/cute/test_moe_emulated.py runs them by a warp emulator,
# but for the plain front, which waits for tests/cute/test_on_device.py on a GPU
REAL_SIZES = ("cute.moe_experts", "cute.moe_experts_shared", "cute.moe_front", "cute.moe_front_plain",
              "cute.moe_experts_gathered", "cute.moe_experts_gathered_shared",
              # for sm_100 and sm_103 only: tests/cute/test_blackwell_emulated.py
              "cute.moe_experts_block_scaled", "cute.moe_experts_block_scaled_bf16",
              "cute.moe_experts_block_scaled_shared", "cute.moe_experts_block_scaled_bf16_shared")


def test_every_kernel_has_a_case() -> None:
    tested = {case.region.kernel.id for case in CASES}
    # collectives need several ranks: tests/math/test_collective_kernels.py
    alone = [k for k in KERNELS if not any(OPS[n.op].kind == "comm" for n in k.parsed.variants[0].nodes)]
    missing = [kernel.id for kernel in alone if kernel.id not in tested and kernel.id not in REAL_SIZES]
    assert not missing, f"no small model has a region for {missing}"


def test_the_check_sees_a_wrong_kernel() -> None:
    """One wrong element among 512 must not pass for rounding."""
    exact = torch.randn(8, 64)
    case, name = next((case, name) for case in CASES for name in case.region.outputs
                      if case.region.graph.values[name].dtype == "bf16")
    wrong = exact.clone()
    wrong[0, 0] += 1.0
    with pytest.raises(AssertionError, match="error"):
        kernel_check._check_close(case, name, "here", wrong, exact.bfloat16().float(), exact)
