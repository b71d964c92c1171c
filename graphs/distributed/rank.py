"""One rank of a plan between processes: agreed on, bound, compiled, and able to say how far its launches got."""
from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError, RankError
from ...compiler.ops import OPS
from ...compiler.plan import Launch, LaunchPlan
from ..bind import Executable, bind
from ..load import TensorSource
from ..random_weights import RankRandom
from ..transport import Transport
from .group import Group
from .library import Library
from .symmetric import Symmetric


def make_transport(group: Group, wanted: str = "auto") -> Library:
    """"symmetric" or "library" (torch.distributed); "auto" is symmetric between GPUs. Raises BindError: no such one."""
    if wanted not in ("auto", "symmetric", "library"):
        raise BindError(f"no transport {wanted!r} between processes\n  fix: use auto, symmetric or library")
    symmetric = wanted == "symmetric" or (wanted == "auto" and group.device.type == "cuda")
    if symmetric and group.device.type != "cuda":
        raise BindError("symmetric memory is memory of GPUs\n  fix: use the library transport on a CPU")
    return Symmetric(group) if symmetric else Library(group)


def bind_rank(plan: LaunchPlan, source: TensorSource | RankRandom, group: Group, transport: Transport, *,
              k3plan_version: str = "", wait_limit: int = 0, shared: Executable | None = None) -> Executable:
    """``bind`` for this process's rank. Returns when every rank has agreed, bound and compiled; nothing was launched.

    Raises what ``bind`` raises, and RankError on every other rank when one differs or fails.
    """
    group.agree(facts(plan, transport, k3plan_version))
    with group.together("binding"):
        if transport.name == "symmetric":
            check_reach(group)
        executable = bind(plan, source, device=group.device, transport=transport, wait_limit=wait_limit, shared=shared)
    with group.together("compiling"):
        for step in executable.steps:
            # a first launch would compile while a peer already waits inside its own
            compile_launch: Callable[[], None] = getattr(step, "compile", lambda: None)
            compile_launch()
    group.watch_for(Progress(executable).lines)
    print(f"rank {group.rank} of {group.ranks} is process {os.getpid()}, bound to plan {plan.key}", flush=True)
    return executable


def facts(plan: LaunchPlan, transport: Transport, k3plan_version: str) -> dict[str, str]:
    """What must be equal on all ranks before they wait for each other."""
    return {
        "the plan's key": plan.key, "the transport": transport.name, "k3plan": k3plan_version,
        "the kernels' source": kernel_digest(plan), "torch": torch.__version__, "triton": _version("triton"),
        "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"), "the host": socket.gethostname(),
        "the GPU": torch.cuda.get_device_name() if plan.spec.gpu != "cpu" and torch.cuda.is_available() else "none",
    }


def kernel_digest(plan: LaunchPlan) -> str:
    """A hash of the packages whose kernels the plan launches, and of all below them: a kernel uses files of both."""
    modules = {choice.entry.partition(":")[0] for choice in plan.choices if not choice.entry.startswith("op:")}
    packages = {".".join(name.split(".")[:2]) for name in modules}
    folders = {Path(spec.origin).parent for name in packages if (spec := find_spec(name)) and spec.origin}
    digest = hashlib.sha256()
    for above, path in sorted((folder, path) for folder in folders for path in folder.rglob("*.py")):
        digest.update(str(path.relative_to(above)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_reach(group: Group) -> None:
    """Raises BindError when this GPU cannot address the memory of another rank's."""
    own = group.device.index
    for peer in range(group.ranks):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise BindError(f"GPU {own} cannot address the memory of GPU {peer}\n"
                            "  fix: use GPUs that NVLink joins, or the library transport")


class Progress:
    """Reads, while kernels hang, what the collective kernels of this rank have counted."""

    def __init__(self, executable: Executable) -> None:
        self.plan = executable.plan
        tensors = executable.ranks[0].tensors
        self._words = {name: tensors[name] for name in _kept_words(self.plan)}
        self._stream = torch.cuda.Stream() if self._words else None
        self._host = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in self._words.items()}

    def read(self, seconds: float = 2.0) -> dict[str, Tensor]:
        """Epochs and health words by tensor name. Raises RankError when the device does not answer."""
        if self._stream is None:
            return {}
        with torch.cuda.stream(self._stream):
            for name, words in self._words.items():
                self._host[name].copy_(words, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        deadline = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > deadline:
                raise RankError("the device does not answer a copy")
            time.sleep(0.01)
        return self._host

    def lines(self) -> list[str]:
        """What happened on this rank, for a person."""
        words = self.read()
        found = [text for name, t in words.items() if name.endswith("health") and (text := describe(self.plan, t))]
        for name, epochs in words.items():
            if name.endswith("epochs") and epochs.numel():
                low, high = counted(epochs)
                within = "" if low == high else f", inside launch {low + 1} of it"
                found.append(f"{name.removesuffix('.epochs')}: {low} launches over{within}")
        return found or ["no launch of this plan waits for another rank"]

    def check(self) -> None:
        """Raises RankError when a bounded wait of this rank has given up."""
        for name, words in self.read().items():
            if name.endswith("health") and (text := describe(self.plan, words)):
                raise RankError(text)


def counted(epochs: Tensor) -> tuple[int, int]:
    """Launches that all blocks of a kernel have ended, and that any has. A kernel has as many counts as the most blocks
    of any GPU; where some block is at 2, a block at 0 is none, since no block is two launches ahead of another."""
    high = int(epochs.max())
    return int(epochs[epochs > 0].min()) if high > 1 else int(epochs.min()), high


def clear_exchange(executable: Executable, group: Group) -> None:
    """Forgets a step that was aborted on some rank: mailboxes, epochs and reports begin anew on all. A meeting.

    No rank may have a launch of the plan under way; the states of the sequences are not repaired.
    """
    plan, tensors = executable.plan, executable.ranks[0].tensors
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.exchange("step abandoned", {})
    for launch in plan.launches:
        if any(OPS[op].kind == "comm" for op in plan.choice(launch).ops):
            for name in launch.scratch.values():
                if plan.buffers[plan.tensors[name].buffer].kind == "zeroed":
                    tensors[name].zero_()
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.exchange("exchange cleared", {})


def describe(plan: LaunchPlan, health: Tensor) -> str:
    """The health words of a kernel (``ops_triton/exchange.py``) in words; empty while nothing is wrong."""
    rank, number, epoch, block, missing, silent, *_ = health.tolist()
    if rank == 0:
        return ""
    peers = [str(bit) for bit in range(32) if silent >> bit & 1]
    launch = plan.launches[number]
    return (f"rank {rank - 1} gave up in launch {number} ({launch.id}, {plan.choice(launch).kernel}), epoch {epoch}, "
            f"block {block}: {missing} words from rank {' and '.join(peers)} never came")


def _kept_words(plan: LaunchPlan) -> Iterator[str]:
    """Tensors of the collective kernels that count or report, each once."""
    def of(launch: Launch) -> dict[str, Any]:
        if not any(OPS[op].kind == "comm" for op in plan.choice(launch).ops):
            return {}
        return {t: None for n, t in launch.scratch.items() if n.endswith(("epochs", "health")) and n != "row_epochs"}

    yield from dict.fromkeys(tensor for launch in plan.launches for tensor in of(launch))
