"""A sparse layer behind its router in one launch: MXFP4 experts, the shared expert's down-projection, and the tail.

Contract: ``x``, ``ids``, ``weights``, ``w1 w3 s1 s3 w2 s2``, ``rank``, ``a`` and ``w`` as in ``moe_experts.py``; with
this rank's parts of the latent and of the shared columns, which are no tensors here, ``norm``, ``up_weight`` and the
result ``g`` as in ``moe_tail.py`` (there ``weight``): sums over the ranks, norm, this rank's stripe of the
up-projection plus its shared columns, gathered.

Layout: the blocks and warps of ``moe_experts.py``, one block on each multiprocessor, until a block has its columns of
the latent. They go to the same block of all ranks, which adds up these columns and no others; the sum, rounded, goes to
all blocks of its rank (a hop through L2), each of which multiplies it with its 4 or 8 rows of the up-projection; those
were copied to shared memory before the wait for the producers. The finished columns go to all ranks, whose threads
store a fragment each. Parts of the shared columns go from the finishers' registers to the rank that owns them.

``few``: 56 blocks in place of 112 finish 8 columns of a rank each and share the sums over the ranks as well; the other
76 leave once their parts are sent, a tail earlier, and the next layer's in-projection has their shared memory. Those
that stay are 2.4 us slower for what it copies meanwhile (16.0 us in a step without, 18.4 with), the residuals and the
projection behind them 4.5 us shorter. With the attention residuals the last of the others mix a row each, whose blocks
of layers they have fetched and folded by the time its columns come (emulated and compiled, not timed). 24 bytes of a
thread's registers go to local memory; the other forms have 8 or 24.

What it saves against the experts and ``moe_tail``: the end of a launch and the begin of the next, whose blocks find no
room before the experts' have left (6.9 us in a step for what takes 4.9 in a chain of its like; one H200, TP16, one
row), and the latent's way through memory. What it costs: the hop of the summed latent, and the shared memory that the
next layer's in-projection fills ahead while a small tail runs: here the blocks keep it until their columns are sent.
Measured on an H200 (TP16, loopback, cold): 15.7 us at one row (14.9 in the step) and 53.6 at 8, with the attention
residuals 20.2 and 56.5. A step of one row is as long with it as with two launches (to 2 %), one of 8 longer.

Waits: those of ``moe_experts.py``, then (0) "parts of the latent", (1) "parts of the shared columns", (2) "summed
latent" of this rank, (3) "finished columns" of all ranks. No block waits in a stage before it has sent all that it has
to send in the stages before, so the launch ends if all blocks of a rank run at once and every rank has begun its own.
Several ranks of one process are four launches, one for each wait.
Epochs: one for each block, counted as its last act; they tell the two parts of the activations apart as well.
Numerics: as the two kernels'; the latent times the norm's weight is rounded to bf16, as one who norms first would.
Bytes of a TP16 rank of Kimi K3 at one row: 23 MB of experts with the shared one, 3.2 MB of the up-projection.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from ...compiler.call import Call, Launch, Link
from ...compiler.launches import LaunchSequence
from ..all_reduce_attn_res import MIXED, tensors_of
from ..launching import KernelLaunch, await_producers, row_stride, start_dependents
from ..mailbox import Addresses, Mailbox, addresses, columns_of
from ..moe_parts import load_word, store_word
from ..primitives import own_thread
from ..protocol import PROTOCOL
from .call import read_sizes, rounds
from .plan import TOKENS
from .roles import copy_ahead, run_experts, set_up
from .tail import (
    Kept,
    add_shared_columns,
    arm,
    collect,
    copy_up,
    finish_rows,
    gather_latent,
    look_at_shared,
    multiply_up_rows,
    send_finished,
    send_parts,
    set_up_tail,
    sum_parts,
)
from .tail_mix import mix_row
from .tail_plan import Config, Mixed, Tail

WAITS = ("parts of the latent", "parts of the shared columns", "summed latent", "finished columns")
WHOLE, EXPERTS, SUM, FINISH, COLLECT = range(5)
# by their names in the kernel; ``rank`` of the mailbox is another
TENSORS = {name: name for name in ("x", "ids", "weights", "w1", "w3", "s1", "s3", "w2", "s2", "a", "w", "norm",
                                   "up_weight")} | {"expert_rank": "rank"}


def _pointers(at: Addresses) -> SimpleNamespace:
    """Tensors as the experts' warps have them: by pointer."""
    return SimpleNamespace(**{tensor: cute.make_ptr(cutlass.Uint8, at[own], cute.AddressSpace.gmem)
                              for own, tensor in TENSORS.items()})


def _mailbox(at: Addresses, block: Any, epoch: Any, p: Tail) -> Mailbox:
    return Mailbox(at, ranks=p.ranks, slot=p.slot, block=block, limit=p.limit, multicast=p.multicast, epoch=epoch)


@cute.jit
def _mix(at: Any, look: Any, wait: Any, report: Any, thread: Any, block: Any, shared: Any, where: cutlass.Constexpr,
         p: cutlass.Constexpr):
    """The last blocks mix a row each."""
    token = p.blocks - 1 - block
    if token < p.tokens:
        mix_row(at, look, wait, report, token, thread, shared, where, p)


def _finish(at: Any, box: Mailbox, thread: Any, block: Any, shared: Any, where: Any, p: Tail) -> None:
    """What is behind the parts that a block sends: sums, stripe, and the gather where no residuals follow."""
    looked = look_at_shared(box, thread, block, p) if p.phase in (WHOLE, FINISH) else None
    if p.phase in (WHOLE, SUM):
        sum_parts(box, thread, block, p)
    if p.phase in (WHOLE, FINISH):
        add_shared_columns(box, looked, thread, block, shared, where, p)
        gather_latent(box, thread, block, shared, where, p)
        cute.arch.sync_threads()
        multiply_up_rows(thread, shared, where, p)
        cute.arch.sync_threads()
        finish_rows(thread, shared, where, p)
        cute.arch.sync_threads()
        send_finished(box, thread, block, shared, where, p)
    if p.phase in (WHOLE, COLLECT) and not isinstance(p, Mixed):
        collect(at, box, thread, block, p)


@cute.jit
def _finish_few(at: Any, thread: Any, block: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """By the blocks that have a part in it; a branch has to make its own mailbox."""
    if block < p.owners:
        _finish(at, _mailbox(at, block, load_word(shared + where["epoch"]), p), thread, block, shared, where, p)


@cute.kernel
def _moe_experts_tail(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    block, index, _ = cute.arch.block_idx()
    at = Addresses(arguments, names, p.table, index)
    pointers = _pointers(at)
    where = p.place()
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    set_up_tail(at, thread, shared, where, p)
    set_up(thread, shared, where, p)
    cute.arch.sync_threads()
    if cutlass.const_expr(p.phase in (WHOLE, EXPERTS)):
        copy_ahead(pointers, block, thread, shared, where, p)
    if cutlass.const_expr(p.phase in (WHOLE, FINISH)):
        copy_up(at, block, thread, shared, where, p)
    await_producers(p.dependent)
    box = _mailbox(at, block, None, p)
    if cutlass.const_expr(p.phase in (WHOLE, EXPERTS)):
        # what a mailbox knows is not to take registers of the experts' warps: it is made anew behind them
        store_word(shared + where["epoch"], box.epoch, Int32(thread == 0))
        kept = Kept(box, shared, where, p)
        run_experts(pointers, at["act"], None, box.epoch, kept.side, kept.column, thread, block, shared, where, p)
        # all have read the epoch, the ring and the sums of the experts
        cute.arch.sync_threads()
        thread = own_thread()
        box = _mailbox(at, block, load_word(shared + where["epoch"]), p)
        send_parts(box, thread, block, shared, where, p)
    if cutlass.const_expr(p.phase in (WHOLE, COLLECT)):
        arm(box, thread, block, p)
    if cutlass.const_expr(p.few and p.phase == WHOLE):
        _finish_few(at, thread, block, shared, where, p)
    else:
        _finish(at, box, thread, block, shared, where, p)
    if cutlass.const_expr(p.phase in (WHOLE, COLLECT)):
        if cutlass.const_expr(isinstance(p, Mixed)):
            _mix(at, box.look, box.wait, box.report, thread, block, shared, where, p)
        cute.arch.sync_threads()
        box.count(Int32(thread == 0))


def _static(call: Call, config: Config, ranks: int) -> Tail:
    """What the kernel is compiled for, but for the address table. Checks that the plan's shapes allow it."""
    weight, slot = call.tensors["up_weight"], call.scratch["mailbox"].shape[2]
    own = {"ranks": ranks, "stripe": weight.shape[0], "eps": call.attrs["n"]["eps"], "slot": 4 * slot,
           "limit": call.wait_limit, "rounds": rounds(call), **vars(config)}
    sizes = read_sizes(call, TOKENS)
    static = Mixed(**sizes, **own, **_mix_sizes(call)) if "h" in call.tensors else Tail(
        **sizes, **own, stride_g=row_stride(call.tensors["g"]))
    assert weight.is_contiguous(), f"up_weight {weight.shape} {weight.stride()}"
    assert weight.shape[1] == static.out_width, f"up_weight {weight.shape} for a latent of {static.out_width}"
    result = call.tensors["h" if isinstance(static, Mixed) else "g"]
    assert result.shape == (static.tokens, ranks * static.stripe), f"{result.shape} of {ranks} x {static.stripe}"
    assert static.slot >= static.message * 16, f"slot of {static.slot} bytes for {static.message} fragments"
    assert static.bulk, f"{config}: the copier is one warp"
    assert static.ring_holds, f"{config}: what comes behind the experts does not fit in the ring"
    assert not static.few or 2 * static.latents <= static.owners * static.threads, f"{static.latents} fragments to sum"
    assert static.owners <= static.blocks, f"{static.owners} blocks finish columns, there are {static.blocks}"
    return static


def _mix_sizes(call: Call) -> dict[str, Any]:
    strides = {row_stride(block) for block in call.rest}
    assert len(strides) == 1, f"blocks with strides {strides}"
    return {"finished": len(call.rest), "mix_eps": call.attrs["m"]["eps"], "norm_eps": call.attrs["h"]["eps"],
            "stride_block": strides.pop(), "has_p": call.get("p") is not None,
            **{f"stride_{name}": row_stride(call.tensors[name]) for name in ("prefix", "p", "h")
               if call.get(name) is not None}}


def _tensors(call: Call) -> dict[str, torch.Tensor]:
    """By their names in the kernel."""
    (wide,) = tensors_of([call], ("norm", "up_weight", *(MIXED if "h" in call.tensors else ("g",))))
    wrong = [name for name, tensor in wide.items()
             if tensor.dtype != (torch.float32 if name == "score" else torch.bfloat16)]
    assert not wrong, f"{wrong} are no bf16"
    return {own: call.tensors[name] for own, name in TENSORS.items()} | {"act": call.scratch["act"]} | wide


def bind(calls: Sequence[Call], links: Sequence[Link], *, multicast: int = 0) -> Launch:
    """The launch for the ranks of this process; ``links`` are those of their mailboxes. ``multicast`` is not used:
    parts go to one rank or from thread to thread."""
    first = calls[0]
    parities, ranks, _ = first.scratch["mailbox"].shape
    assert parities == PROTOCOL.parities, f"mailbox of {parities} parts"
    assert all(len(link.peers) == ranks for link in links), f"links to {[len(k.peers) for k in links]} of {ranks} ranks"
    tensors = [_tensors(call) for call in calls]
    static = replace(_static(first, Config(**first.config), ranks), table=columns_of(tuple(tensors[0]), ranks))
    launch = KernelLaunch(
        _moe_experts_tail, (static.blocks, len(calls), 1), static.threads, addresses(calls, links, tensors), static,
        shared=static.place()["end"], dependent=static.dependent)
    if len(calls) == 1:
        return launch
    return LaunchSequence(tuple(replace(launch, parameters=replace(static, phase=phase))
                                for phase in (EXPERTS, SUM, FINISH, COLLECT)))
