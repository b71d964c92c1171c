"""Every environment flag of k3plan, declared once. Nothing else in the package reads the environment.

A flag is for looking inside or for a machine's peculiarities. What a plan computes is never a flag: that
belongs in the plan file, where the plan's key covers it.
"""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from .errors import BindError

PREFIX = "K3PLAN_"


@dataclass(frozen=True)
class Knob:
    """One environment variable: ``read`` gives its text, or ``default`` when it is unset or empty."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        return os.environ.get(self.name) or self.default


LAUNCH_LOG = Knob("K3PLAN_LAUNCH_LOG", "", "file that names each launch before it starts and after it has ended; steps "
                  "then run one launch at a time (k3plan graph crash sets it)")
CACHE = Knob("K3PLAN_CACHE", "~/.cache/k3plan", "folder where compiled CuTe DSL kernels are kept, or off")
# a multiprocessor that is to be divided otherwise must first be empty, so kernels of different needs do not overlap
CARVEOUT = Knob("K3PLAN_CARVEOUT", "", "percent of a multiprocessor's memory, 0 to 100, that every kernel of ours "
                "prefers as shared memory, in place of what the driver finds best for each")
KNOBS: tuple[Knob, ...] = (LAUNCH_LOG, CACHE, CARVEOUT)


def carveout() -> int | None:
    """Percent that ``CARVEOUT`` asks for, None when it is unset. Raises BindError for anything else."""
    text = CARVEOUT.read()
    if text and not (text.isdecimal() and int(text) <= 100):
        raise BindError(f"{CARVEOUT.name} is {text!r}, not a percentage\n  fix: unset it, or give it 0 to 100")
    return int(text) if text else None


# of the libraries that k3plan drives: NVLink multicast can take the GPUs of a shared host out of service
WITHOUT_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


def switch_off_multicast() -> None:
    """For this process and those that it starts; before torch.distributed is used."""
    os.environ.update(WITHOUT_MULTICAST)


def rank_environment() -> dict[str, str]:
    """The environment of processes that are to be the ranks of a plan."""
    return {**os.environ, **WITHOUT_MULTICAST, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: "}


def worker_environment() -> dict[str, str]:
    """The environment of a process that is to find every module where this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def started_as_rank() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def unknown() -> list[str]:
    """Variables that are set, look like ours and are not: most likely a misspelled or withdrawn flag."""
    known = {knob.name for knob in KNOBS}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
