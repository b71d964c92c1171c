"""The CuTe DSL kernels that the emulator can run, on a CPU, against the ops' meaning: small models and real shapes."""
from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import kernel_check
import pytest
import torch

pytest.importorskip("cutlass")

import emulator
import test_on_device

from k3plan.compiler.kernel import KernelDef
from k3plan.graphs import launch as launching
from k3plan.ops_cute.kernels import KERNELS

MODULES = ("attn_res", "kda_decode", "skinny_linear")
PROMPT_CASES = 3  # of each kernel; the others, and those with a large weight, are marked slow
PROMPT_BYTES = 12_000_000


def emulated(kernel: KernelDef) -> bool:
    return kernel.entry.partition(":")[0].rpartition(".")[2] in MODULES


def _params(cases: list[kernel_check.Case], prompt: int) -> list[Any]:
    turn: dict[str, int] = {}
    found = []
    for case in cases:
        kernel = case.region.kernel.id
        large = any(case.region.graph.values[n].nbytes > PROMPT_BYTES for n in case.region.inputs)
        turn[kernel] = turn.get(kernel, 0) + (not large)
        slow = large or turn[kernel] > prompt
        found.append(pytest.param(case, id=case.name, marks=[pytest.mark.slow] if slow else []))
    return found


MINE = [kernel for kernel in KERNELS if emulated(kernel)]
SMALL = _params(kernel_check.cases(MINE), PROMPT_CASES)
REAL = _params([
    # 64 sequences take 20 s and have nothing that 8 have not
    *kernel_check.cases(MINE, [setting for setting in test_on_device.settings() if setting.sequences < 64]),
    *(case for case in test_on_device.WHOLE_STEPS if emulated(case.region.kernel)),
], 1)


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {}

    def entry_point(entry: str) -> Any:
        module, _, name = entry.partition(":")
        if module not in modules:
            modules[module] = emulator.load(importlib.import_module(module))
        bind = getattr(modules[module], name)
        return lambda call: partial(emulator.run, bind(call))

    monkeypatch.setattr(launching, "entry_point", entry_point)


@pytest.mark.parametrize("case", SMALL)
def test_small_models(case: kernel_check.Case) -> None:
    kernel_check.check(case)


@pytest.mark.parametrize("case", REAL)
def test_real_shapes(case: kernel_check.Case) -> None:
    kernel_check.check(case)


def test_the_emulator_sees_an_access_outside_a_tensor() -> None:
    grid = emulator.Grid((1, 1, 1), (1, 1, 1), 32, 0)
    emulator._now.append(grid)
    try:
        (start,) = grid.take([torch.zeros(8)])
        emulator.load_words(emulator.Int64(start + 16))
        with pytest.raises(AssertionError, match="outside every tensor"):
            emulator.load_words(emulator.Int64(start + 32))
        with pytest.raises(AssertionError, match="16 bytes at"):
            emulator.load_words(emulator.Int64(start + 4))
    finally:
        emulator._now.pop()


def test_the_emulators_product_is_the_instruction() -> None:
    """The layout of the operands as the instruction's description gives it."""
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    emulator._now.append(emulator.Grid((1, 1, 1), (1, 1, 1), 32, 0))
    try:
        def words(matrix: torch.Tensor, places: list[tuple[int, int]], transposed: bool) -> list[Any]:
            found = []
            for row, column in places:
                pairs = []
                for lane in range(32):
                    r, q = lane // 4, lane % 4
                    one = [(2 * q + i + row, r + column) if transposed else (r + row, 2 * q + i + column)
                           for i in range(2)]
                    pairs += [float(matrix[at]) for at in one]
                values = torch.tensor(pairs).view(32, 2)
                found += emulator.pack([emulator.Float32(values[:, i].numpy()) for i in range(2)])
            return found

        left = words(a, [(0, 0), (8, 0), (0, 8), (8, 8)], False)
        right = words(b, [(0, 0), (8, 0)], True)
        c = emulator.mma(left, right, [emulator.Float32(0.0)] * 4)
        exact = a.float() @ b.float()
        for n, value in enumerate(c):
            for lane in range(32):
                wanted = exact[lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2]
                assert abs(value.a[lane] - float(wanted)) < 1e-4
    finally:
        emulator._now.pop()
