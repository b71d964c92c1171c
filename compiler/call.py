"""What the runtime hands to a kernel when it binds a launch. The only type that kernel files share with it."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Launch = Callable[[], None]


@dataclass(frozen=True)
class Call:
    """One planned launch on one rank.

    ``tensors`` maps the names of the kernel's pattern to tensors: inputs, and those exports that are read
    outside (the others are absent: do not write them). Views may be strided along any but the last dim.
    ``rest`` are the inputs that the pattern takes by ``...``. ``attrs`` maps the first output name of each
    pattern line to that node's attributes; an absent optional line has no entry. ``scratch`` are tensors that
    the kernel asked for; those of kind "zeroed" were zero before the first launch and the kernel must leave
    them zero, unless they are "kept". ``config`` is the tuned configuration of the plan.

    ``settled`` are the activations that are certainly written before this launch can start, as ``settled.py`` proves of
    the plan, by their names ("...2" is ``rest[2]``): a kernel may read them before it waits, past the first-level
    cache. What no launch of a step writes, such as a weight, may be read there anyway and is not named.

    ``bind(call)`` of a kernel file checks its assumptions (AssertionError with values: the plan was wrong),
    compiles nothing at run time beyond the first call, and returns a function without arguments that launches
    on the current stream, allocates nothing, reads nothing back and takes no decision on the host. A kernel with a
    collective inside is bound for all ranks of the process at once: ``bind(calls, links)``, with the links of each
    scratch tensor whose name ends in "mailbox" (one list, or a list of lists where there are several).
    """

    tensors: Mapping[str, torch.Tensor]
    rest: tuple[torch.Tensor, ...] = ()
    attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scratch: Mapping[str, torch.Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    dependent_launch: bool = False  # programmatic dependent launch edges before and after this launch
    settled: frozenset[str] = frozenset()
    ranks: int = 1
    number: int = 0  # of the launch in its plan, for messages
    wait_limit: int = 0  # looks at a mailbox after which a wait gives up and reports (debug); 0: none

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of a pattern name, or None when nothing outside reads it."""
        return self.tensors.get(name)


@dataclass(frozen=True)
class Scratch:
    """Workspace that a kernel asks for: shape, dtype, and whether it must be zero before the first launch."""

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False  # zeroed scratch keeps its address for the life of the plan
    kept: bool = False  # zeroed once and then the kernel's own, such as epochs; only launches of one kernel share it


@dataclass(frozen=True)
class Link:
    """A rank's place in its group: its number, and the mailbox of each rank at the address where it writes."""

    rank: int
    peers: tuple[int, ...]


def emulated_links(mailboxes: Sequence[torch.Tensor]) -> list[Link]:
    """All ranks of the group in this process."""
    return [Link(rank, tuple(box.data_ptr() for box in mailboxes)) for rank in range(len(mailboxes))]


def loopback_link(mailbox: torch.Tensor, rank: int = 0) -> Link:
    """One rank alone: what it sends to a peer comes back as if that peer had sent it."""
    _, ranks, slot = mailbox.shape
    size = slot * mailbox.element_size()
    return Link(rank, tuple(mailbox.data_ptr() + (peer - rank) * size for peer in range(ranks)))
