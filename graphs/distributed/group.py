"""The processes of one plan, a rank each on one host: joining, agreeing, and failing together.

Ranks talk through the launcher's store, which outlives any of them; no collective is needed to find out that a rank is
missing. What ranks compute and how is not decided here.
"""
from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.errors import BindError, RankError
from ...compiler.knobs import switch_off_multicast

PATIENCE = 60.0  # seconds that a rank may be behind another at a meeting


@dataclass
class Group:
    """This process's place among the ranks."""

    rank: int
    ranks: int
    device: torch.device
    store: Any
    patience: float = PATIENCE
    _meetings: int = field(default=0, repr=False)

    @classmethod
    def join(cls, device: str) -> Group:
        """Joins the ranks that torchrun has started: NCCL and a GPU each for "cuda", gloo for "cpu".

        Raises BindError when torchrun has not started this process, or there is no GPU for it.
        """
        switch_off_multicast()
        if not dist.is_torchelastic_launched():
            raise BindError("this process was not started as one rank of several\n  fix: use k3plan launch")
        local = dist.get_node_local_rank()
        if device == "cuda" and local >= torch.cuda.device_count():
            raise BindError(f"rank {local} has no GPU, this host shows {torch.cuda.device_count()}\n"
                            "  fix: start as many ranks as there are GPUs")
        where = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(where)
        dist.init_process_group("nccl" if device == "cuda" else "gloo",
                                device_id=where if device == "cuda" else None)
        store = dist.PrefixStore("k3plan", dist.distributed_c10d._get_default_store())
        return cls(dist.get_rank(), dist.get_world_size(), where, store)

    def leave(self) -> None:
        """Ends the group; every rank calls it."""
        dist.destroy_process_group()

    def exchange(self, what: str, fact: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in rank order. Raises RankError naming the ranks that say nothing in time."""
        self._meetings += 1
        key = f"{what}/{self._meetings}"
        self.store.set(f"{key}/{self.rank}", json.dumps(fact))
        deadline, said = time.monotonic() + self.patience, []
        for rank in range(self.ranks):
            left = max(0.01, deadline - time.monotonic())
            try:
                self.store.wait([f"{key}/{rank}"], timedelta(seconds=left))
            except dist.DistStoreError:
                silent = [r for r in range(rank, self.ranks) if not self.store.check([f"{key}/{r}"])]
                raise RankError(f"rank {_names(silent)} did not come to '{what}' within {self.patience:.0f} s\n"
                                "  fix: look at that rank's log") from None
            said.append(json.loads(self.store.get(f"{key}/{rank}")))
        return said

    def agree(self, facts: Mapping[str, Any]) -> None:
        """All ranks go on, or all raise the same RankError: which rank differs from rank 0, and in what."""
        said = self.exchange("agreement", {name: str(value) for name, value in facts.items()})
        for rank, other in enumerate(said):
            for name in dict.fromkeys([*said[0], *other]):
                mine, its = (facts_of.get(name, "nothing") for facts_of in (said[0], other))
                if mine != its:
                    raise RankError(f"ranks 0 and {rank} do not agree: {name} is {mine} on rank 0 and {its} on rank "
                                    f"{rank}\n  fix: start every rank with the same plan, k3plan and libraries")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that every rank does by itself. When it fails on one, it raises on all, with that rank's reason."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.exchange(what, {"error": f"{type(failure).__name__}: {failure}" if failure else ""})
        if failure is not None:
            raise failure
        failed = [(rank, fact["error"]) for rank, fact in enumerate(said) if fact["error"]]
        if failed:
            rank, reason = failed[0]
            raise RankError(f"rank {rank} refused at '{what}', so all ranks stop. Its reason:\n{reason}")


def _names(ranks: list[int]) -> str:
    return " and ".join(map(str, ranks))
