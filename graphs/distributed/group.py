"""The processes of one plan, a rank each on one host: joining, agreeing, and failing together.

Ranks talk through the launcher's store, which outlives any of them; no collective is needed to find out that a rank is
missing. What ranks compute and how is not decided here.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.errors import BindError, RankError
from ...compiler.knobs import started_as_rank, switch_off_multicast
from .watch import Watch, hold_termination

PATIENCE = 120.0  # seconds that a living rank may be behind another at a meeting
LOOK = 0.01  # seconds between looks at the store


@dataclass
class Group:
    """This process's place among the ranks."""

    rank: int
    ranks: int
    device: torch.device
    store: Any
    patience: float = PATIENCE
    watch: Watch | None = None
    _meetings: int = field(default=0, repr=False)

    @classmethod
    def join(cls, device: str) -> Group:
        """Joins the ranks that torchrun has started: NCCL and a GPU each for "cuda", gloo for "cpu".

        From here on a rank that dies or fails ends the others (``watch.py``). Raises BindError when torchrun has not
        started this process, or there is no GPU for it.
        """
        switch_off_multicast()
        if not started_as_rank():
            raise BindError("this process was not started as one rank of several\n  fix: use k3plan launch")
        # before any thread is made, so that every thread leaves the signal to the watch
        hold_termination()
        local = dist.get_node_local_rank()
        if device == "cuda" and local >= torch.cuda.device_count():
            raise BindError(f"rank {local} has no GPU, this host shows {torch.cuda.device_count()}\n"
                            "  fix: start as many ranks as there are GPUs")
        where = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(where)
        dist.init_process_group("nccl" if device == "cuda" else "gloo",
                                device_id=where if device == "cuda" else None)
        store: Any = dist.distributed_c10d._get_default_store()
        group = cls(dist.get_rank(), dist.get_world_size(), where, dist.PrefixStore("k3plan", store))
        # a connection of its own: one that waits holds up every other user
        group.watch = Watch(group.rank, group.ranks, dist.PrefixStore("k3plan", store.clone()))
        group.watch.start()
        return group

    def leave(self) -> None:
        """Ends the group; every rank calls it."""
        self.exchange("leaving", {})
        if self.watch is not None:
            self.watch.stop()
        dist.destroy_process_group()

    def watch_for(self, report: Callable[[], list[str]]) -> None:
        """What this rank says of itself when it is ended because of another."""
        if self.watch is not None:
            self.watch.report = report

    def refuse(self, reason: str) -> None:
        """Tells the other ranks that this one will not go on, wherever they are."""
        with suppress(dist.DistError, RuntimeError):
            self.store.set(f"refused/{self.rank}", reason)

    def exchange(self, what: str, fact: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in rank order. Raises RankError: a rank has refused, or does not come in time."""
        self._meetings += 1
        key = f"{what}/{self._meetings}"
        self.store.set(f"{key}/{self.rank}", json.dumps(fact))
        deadline, waiting = time.monotonic() + self.patience, list(range(self.ranks))
        while waiting := [rank for rank in waiting if not self.store.check([f"{key}/{rank}"])]:
            for rank in range(self.ranks):
                if rank != self.rank and self.store.check([f"refused/{rank}"]):
                    raise RankError(f"rank {rank} refused, so all ranks stop. Its reason:\n"
                                    f"{self.store.get(f'refused/{rank}').decode()}")
            if time.monotonic() > deadline:
                raise RankError(f"rank {' and '.join(map(str, waiting))} did not come to '{what}' within "
                                f"{self.patience:.0f} s\n  fix: look at that rank's log")
            time.sleep(LOOK)
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.ranks)]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """All ranks go on, or all raise the same RankError: which rank differs from rank 0, and in what."""
        said = self.exchange("agreement", {name: str(value) for name, value in facts.items()})
        for rank, other in enumerate(said):
            for name in dict.fromkeys([*said[0], *other]):
                first, its = (spoken.get(name, "not said") for spoken in (said[0], other))
                if first != its:
                    raise RankError(f"ranks 0 and {rank} do not agree: {name} is {first} on rank 0 and {its} on rank "
                                    f"{rank}\n  fix: start every rank with the same plan, k3plan and libraries")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that every rank does by itself. When it fails on one, all ranks raise, with that rank's reason."""
        try:
            yield
        except Exception as error:
            self.refuse(f"{what}: {type(error).__name__}: {error}")
            raise
        self.exchange(what, {})
