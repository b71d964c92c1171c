"""The tail of a sparse layer handed to the next layer's attention residuals by mailbox, in one launch.

Contract: ``x``, ``other``, ``norm`` and ``up_weight`` are those of ``moe_tail.py`` (there ``weight``); its result,
every rank's finished columns side by side, is the ``delta`` of what follows: with ``prefix``, the finished blocks
(``rest``), ``score`` and ``weight``, ``p`` and ``h`` are those of ``all_reduce_attn_res.py``. The gathered row is never
a tensor.

Layout: two kinds of clusters. The first ``tail.clusters`` of a grid are those of the tail; they leave when their
columns are on their way to all ranks. The last T mix a row each: a thread takes the fragment of 8 columns that it mixes
straight from the mailbox. Until it comes they have read the blocks and multiplied them with each other, settled ones
before the wait for the producers in a ``settled`` configuration (as ``all_reduce_attn_res.py``; not timed yet). A row
needs fewer threads than the tail gives its blocks; the others leave at once.

What it saves at one row of a TP16 rank of Kimi K3: storing the gathered row, one launch, and the loads of the row, its
prefix and blocks behind that; bytes are the same but for the row's, 29 KB of 7 MB; hops are the same two.

Waits: (0) and (1) as in ``moe_tail.py``, (2) "finished columns" by the rows' clusters. The tail's blocks wait for no
cluster that mixes and come before them in the order in which blocks start, so only they need to be resident together.
The launch for all ranks of one process is three where their tails would not fit at once.
Epochs: one for each block; the tail's blocks arm what the rows' clusters read.
Numerics: as the two kernels; the finished columns are bf16 when they are added to the prefix.
Measured in loopback on one H200, TP16, weights cold, with dependent launch: 8 rows 7.9 us with one block and 8.7 with
eight; the tail and the mix as two launches 9.9 and 10.6. Compared there at TP 8 and 16, 1 to 8 rows, all ranks of a
group in stages and in loopback.
"""
# ruff: noqa: SIM102 - what is known while the kernel is traced stands alone
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .all_reduce_attn_res import COLLECT as COLLECT_ROW
from .all_reduce_attn_res import MIXED, mix_row, open_row, tensors_of
from .all_reduce_attn_res import PUBLISH as NO_ROW
from .all_reduce_attn_res import Config as MixConfig
from .all_reduce_attn_res import Static as Mix
from .all_reduce_attn_res import static_of as static_of_mix
from .launching import KernelLaunch, start_dependents
from .mailbox import Addresses, addresses, columns_of, fits_at_once
from .moe_tail import COLLECT, MIDDLE, PUBLISH, WAITS, Config, open_tail, run_tail
from .moe_tail import Static as Tail
from .moe_tail import static_of as static_of_tail
from .moe_tail_attn_res_menu import mixing_threads
from .moe_tail_menu import message

__all__ = ["WAITS", "bind"]
NAMES = {"x": "x", "other": "other", "norm": "norm", "up": "up_weight"}


@dataclass(frozen=True)
class Parameters:
    """What the two kinds of clusters are compiled for."""

    tail: Tail
    mix: Mix

    @property
    def shared(self) -> int:
        return max(self.tail.shared, self.mix.shared)

    def at(self, phase: int) -> Parameters:
        """One of the tail's phases, in which the rows' clusters collect or do nothing."""
        last = COLLECT_ROW if phase == COLLECT else NO_ROW
        return Parameters(replace(self.tail, phase=phase), replace(self.mix, phase=last))


@cute.kernel
def _moe_tail_attn_res(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.tail.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, index, number = cute.arch.block_idx()
    at = Addresses(arguments, names, p.tail.columns, index)
    if cutlass.const_expr(p.tail.phase != COLLECT):
        if number < p.tail.clusters:
            if cutlass.const_expr(p.tail.phase != PUBLISH):
                if thread == 0:
                    open_tail(part, p.tail)
            run_tail(at, thread, part, number, p.tail, collect=False)
    if cutlass.const_expr(p.mix.phase != NO_ROW):
        if (number >= p.tail.clusters) & (thread < p.mix.threads):
            if cutlass.const_expr(p.mix.cluster > 1):
                if thread == 0:
                    open_row(p.mix)
            mix_row(at, thread, part, number - p.tail.clusters, number * p.mix.cluster + part, p.mix,
                           publish=False)


def bind(calls: Sequence[Call], links: Sequence[Link], *, multicast: int = 0) -> Launch:
    """The launch for the ranks of this process; ``links`` and ``multicast`` as in ``moe_tail.bind``."""
    settled = bool(calls[0].config.get("settled"))
    config = Config(**{name: value for name, value in calls[0].config.items() if name != "settled"})
    h = calls[0].tensors["h"]
    tail, tensors = static_of_tail(calls, links, config, NAMES, multicast=bool(multicast))
    wanted = message(tail.rows, tail.latent, tail.stripe)
    threads = mixing_threads(h.shape[1], config.cluster)
    assert threads <= tail.threads, f"{threads} threads to mix a row, blocks of {tail.threads}"
    mixing = MixConfig(config.cluster, threads, settled=settled)
    mix = static_of_mix(calls, links, mixing, wanted, multicast=bool(multicast))
    assert mix.width == tail.ranks * tail.stripe, f"rows of {mix.width}, {tail.ranks} times {tail.stripe} columns"
    tensors = [one | more for one, more in zip(tensors, tensors_of(calls, MIXED), strict=True)]
    columns = columns_of(tuple(tensors[0]), tail.ranks)
    p = Parameters(replace(tail, columns=columns), replace(mix, columns=columns, stripe=tail.stripe // 8,
                                                           base=tail.latents + tail.stripes))
    launch = KernelLaunch(
        _moe_tail_attn_res, (config.cluster, len(calls), tail.clusters + tail.rows), tail.threads,
        addresses(calls, links, tensors, multicast), p, cluster=(config.cluster, 1, 1), shared=p.shared,
        dependent=tail.dependent)
    if len(calls) == 1 or fits_at_once(len(calls) * tail.clusters * config.cluster, h.device):
        return launch
    return LaunchSequence(tuple(replace(launch, parameters=p.at(phase))
                                for phase in (PUBLISH, MIDDLE, COLLECT)))
