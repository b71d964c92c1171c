"""Frozen measurements: which configuration of a kernel was fastest at a shape, and how long it took.

Tables are files beside the kernels (``ops_triton/tuned/<gpu>.json``), filled by ``k3plan tune``, never at run
time. A shape that is not in the table takes the configuration of the nearest one, and the plan says so; its time
is then predicted, by the model and by how far the model was off at that nearest shape.
"""
from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from .kernel import Region

# a shape is comparable to a timed one when no size is more than twice or less than half of that one's
COMPARABLE_OCTAVES = 1.0
# how often an input repeats adds loads and not dependent steps: an octave of it is a tenth of one of a size
REPEATS = 0.1


@dataclass(frozen=True)
class Tuned:
    """One line of a table. ``us`` is the median under CUDA-graph replay with cold weights."""

    kernel: str
    key: str
    config: Mapping[str, Any]
    us: float
    source: str  # GPU, versions and date of the measurement; a line may have its own
    model_us: float | None = None  # what the cost model said of this shape when it was timed
    in_step: bool = False  # whether ``us`` is what the launch takes in a captured step, and not in a chain of its like


@dataclass(frozen=True)
class Setting:
    """The configuration that a launch gets and why; ``measured`` when the very shape was timed, else ``near`` is the
    line of the nearest shape, if any."""

    config: Mapping[str, Any]
    source: str
    measured: Tuned | None = None
    near: Tuned | None = None
    comparable: bool = False  # whether ``near`` is near enough to say that the kernel was timed at such a shape


def shape_key(region: Region) -> str:
    """Shapes of a region's inputs in pattern order, index tensors left out; the dtype where it is not bf16, and where
    an op rounds its rows to another: ``8x3584:mxfp8``."""
    rounded = {node.inputs[0]: node.attrs["activation"] for node in region.nodes if "activation" in node.attrs}
    parts = []
    for name in region.inputs:
        value = region.graph.values[name]
        if value.role != "index":
            text, dtype = "x".join(map(str, value.shape)), rounded.get(name, value.dtype)
            parts.append(text if dtype == "bf16" else f"{text}:{dtype}")
    return ",".join(parts)


class Calibration:
    """What kernels took on another GPU, where a launch pays ``in_step_us`` in a step beyond its model."""

    def __init__(self, gpu: str, lines: Iterable[Tuned], in_step_us: float) -> None:
        self.gpu, self._in_step_us = gpu, in_step_us
        self.lines = [line for line in lines if line.model_us]
        self._found: dict[tuple[str, str], tuple[float, bool, str]] = {}

    def scale(self, kernel: str, key: str, us: float, in_step_us: float) -> tuple[float, str]:
        """Us of a launch in a step of this GPU, whose model says ``us`` and ``in_step_us`` beyond it: times what the
        kernel took there of its model's price at the nearest shape of any dtype, with the words for it. Less where its
        weights were on the chip before its turn. A kernel that was not timed there has the least of those with inputs
        like its own, or the median of all: nobody gains by not being timed."""
        if (kernel, key) not in self._found:
            self._found[kernel, key] = self._find(kernel, key)
        factor, in_step, where = self._found[kernel, key]
        if in_step:
            return (us + in_step_us) * factor, f"x {factor:.2f} in a step, {where}"
        return us * factor + in_step_us, f"x {factor:.2f}, {where}, {in_step_us:.2f} us in a step"

    def _find(self, kernel: str, key: str) -> tuple[float, bool, str]:
        own = [line for line in self.lines if line.kernel == kernel]
        found, where = self._nearest(key, own), f"as on {self.gpu} at the nearest measured shape"
        if found is None:
            found, where = self._nearest(key, self.lines), f"as others with such inputs on {self.gpu}"
            own = [line for line in self.lines if found is not None and line.kernel == found.kernel]
        if found is None:
            return statistics.median(map(self._factor, self.lines)), False, f"the median of {self.gpu}"
        # launches that differ in how often an input repeats are few of each in a step: one share says little
        factors = [self._factor(line) for line in own if line.in_step == found.in_step
                   and distance(line.key, found.key) < COMPARABLE_OCTAVES / 2]
        return statistics.median(factors), found.in_step, where

    def _nearest(self, key: str, lines: Iterable[Tuned]) -> Tuned | None:
        """The line nearest in sizes, of equally near ones that with the least factor."""
        near = min(((distance(_sizes(line.key), _sizes(key)), self._factor(line), i, line)
                    for i, line in enumerate(lines)), default=None)
        return None if near is None or not math.isfinite(near[0]) else near[3]

    def _factor(self, line: Tuned) -> float:
        assert line.model_us is not None
        return line.us / (line.model_us + (self._in_step_us if line.in_step else 0.0))


class Tuning:
    """All tables of one GPU. ``calibration`` is of another one, for kernels that were not timed on this one."""

    def __init__(self, lines: Iterable[Tuned] = (), calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self._exact: dict[tuple[str, str], Tuned] = {}
        self._by_kernel: dict[str, list[Tuned]] = {}
        for line in lines:
            self._exact[line.kernel, line.key] = line
            self._by_kernel.setdefault(line.kernel, []).append(line)
        self._settings: dict[tuple[str, str], Setting] = {}

    @property
    def measured(self) -> bool:
        """Whether anything was timed on this GPU."""
        return bool(self._exact)

    def setting(self, region: Region) -> Setting:
        """Configuration of ``region``: its own, the nearest shape's, or the kernel's first candidate."""
        key = shape_key(region)
        at = region.kernel.id, key
        if at not in self._settings:
            self._settings[at] = self._choose(region, key)
        return self._settings[at]

    def _choose(self, region: Region, key: str) -> Setting:
        exact = self._exact.get((region.kernel.id, key))
        candidates = list(region.kernel.configs(region)) if region.kernel.configs else [{}]
        # a line whose configuration is no candidate any more was measured with another kernel
        if exact is not None and exact.config in candidates:
            return Setting(exact.config, f"tuned at this shape; {exact.source}", exact)
        near = min(self._by_kernel.get(region.kernel.id, ()), key=lambda t: distance(t.key, key), default=None)
        apart = None if near is None else octaves(near.key, key)
        comparable = apart is not None and max(apart, default=0.0) <= COMPARABLE_OCTAVES
        if near is not None and near.config in candidates and apart is not None:
            return Setting(near.config, f"tuned at the nearest shape {near.key}", near=near, comparable=comparable)
        # the nearest shape's configuration is none of this shape's, but how far the model was off there still tells
        return Setting(candidates[0], "first candidate, not tuned" if candidates[0] else "",
                       near=near if apart is not None else None, comparable=comparable)


@cache
def _sizes(key: str) -> str:
    """A shape key without dtypes."""
    return re.sub(r":\w+", "", key)


def distance(left: str, right: str) -> float:
    """How far two shape keys are: sum of the octaves between their sizes; infinite for other ranks or dtypes."""
    apart = octaves(left, right)
    return math.inf if apart is None else sum(apart)


def octaves(left: str, right: str) -> list[float] | None:
    """Octaves between the sizes of two shape keys, inputs that repeat taken once; None for other ranks or dtypes."""
    a, b = _runs(left), _runs(right)
    if len(a) != len(b):
        return None
    found = []
    for (part, count), (other, other_count) in zip(a, b, strict=True):
        (shape, _, dtype), (other_shape, _, other_dtype) = part.partition(":"), other.partition(":")
        sizes, others = shape.split("x"), other_shape.split("x")
        if dtype != other_dtype or len(sizes) != len(others):
            return None
        found += [abs(math.log2(int(m) / int(n))) for m, n in zip(sizes, others, strict=True)]
        found.append(REPEATS * abs(math.log2(count / other_count)))
    return found


@cache
def _runs(key: str) -> tuple[tuple[str, int], ...]:
    """Parts of a shape key, each with how often it stands there in a row."""
    return tuple((part, len(list(same))) for part, same in groupby(key.split(",")))
