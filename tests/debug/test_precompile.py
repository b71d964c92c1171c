"""Equal launches are compiled once, and a compiler's error is not lost in a thread."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from k3plan.compiler.launches import LaunchSequence
from k3plan.graphs.precompile import compile_launches
from k3plan.ops_triton.attn_res import _norm
from k3plan.ops_triton.launching import KernelLaunch


@dataclass
class Launch:
    name: str
    log: list[str] = field(default_factory=list)

    def signature(self) -> str:
        return self.name

    def compile(self) -> None:
        self.log.append(self.name)
        if self.name == "bad":
            raise ValueError("no such instruction")


def test_each_kernel_once() -> None:
    log: list[str] = []
    a, b, again = (Launch(name, log) for name in ("a", "b", "a"))
    step = SimpleNamespace(steps=(a, LaunchSequence((b, again)), lambda: None))
    assert compile_launches([step, step]) == 2
    assert sorted(log) == ["a", "b"]


class Many(Launch):
    """A kind that compiles its launches together."""

    @staticmethod
    def compile_many(launches: Sequence[Launch], workers: int) -> None:
        for launch in launches:
            launch.log.append(f"{launch.name} of {len(launches)}")


def test_kinds_that_can_compile_theirs_together() -> None:
    log: list[str] = []
    step = SimpleNamespace(steps=(Many("a", log), Launch("b", log), LaunchSequence((Many("c", log), Many("a", log)))))
    assert compile_launches([step]) == 3
    assert sorted(log) == ["a of 2", "b", "c of 2"]


def test_an_error_comes_out() -> None:
    with pytest.raises(ValueError, match="no such instruction"):
        compile_launches([SimpleNamespace(steps=(Launch("good"), Launch("bad")))])


def test_what_makes_another_kernel() -> None:
    x = torch.zeros(64)
    launch = KernelLaunch(_norm, (1,), {"x": x}, {"D": 32}, 4, 1, {})
    assert launch.signature() == KernelLaunch(_norm, (9,), {"x": x[16:]}, {"D": 32}, 4, 1, {}).signature()
    for other in (KernelLaunch(_norm, (1,), {"x": x}, {"D": 64}, 4, 1, {}),
                  KernelLaunch(_norm, (1,), {"x": x[1:]}, {"D": 32}, 4, 1, {}),
                  KernelLaunch(_norm, (1,), {"x": x.bfloat16()}, {"D": 32}, 4, 1, {}),
                  KernelLaunch(_norm, (1,), {"x": x}, {"D": 32}, 8, 1, {}),
                  KernelLaunch(_norm, (1,), {"x": x}, {"D": 32}, 4, 1, {"launch_pdl": True})):
        assert other.signature() != launch.signature()
    assert len(LaunchSequence((launch, launch)).launches) == 2
