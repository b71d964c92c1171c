"""``cute.moe_experts_block_scaled`` on a GPU that has its tensor cores, at Kimi K3's shapes with fewer experts.

No machine of ours has one: these cases have never run. They are what to run first where there is one.
"""
from __future__ import annotations

from dataclasses import replace

import kernel_check
import pytest
import real_shapes
import torch
from test_moe import EXPERTS, RealSetting

from k3plan.ops_cute.experts import moe_experts_block_scaled_menu as menu


def cases() -> list[kernel_check.Case]:
    model = replace(real_shapes._spec(1, 1, kernel_check.WHOLE).model, experts=EXPERTS)
    settings = [RealSetting(f"k3-tp{tp}-{experts}-S{rows}-{numerics.expert_activation}", model, tp, rows, 1, experts,
                            numerics)
                for tp, experts in ((16, "tp"), (8, "tp"), (16, "ep"))
                for rows, numerics in ((1, kernel_check.FP8), (8, kernel_check.FP8), (64, kernel_check.FP8),
                                       (9, kernel_check.PLAIN), (64, kernel_check.PLAIN))]
    return kernel_check.cases(menu.KERNELS, settings)


def test_every_setting_has_a_case() -> None:
    assert {case.region.kernel.id for case in cases()} == {kernel.id for kernel in menu.KERNELS}


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_experts_at_real_shapes(case: kernel_check.Case, device: str) -> None:
    if torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs sm_100 or sm_103")
    kernel_check.check(case, device, launches=3)
