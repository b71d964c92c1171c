"""Mailboxes between ranks: the device half of ``protocol.py``, as functions that a kernel calls while it is traced.

A mailbox is i32 [3, ranks, slot] on each rank, zero at first. A message of a rank lies in its slot as fragments of 16
bytes; every word is the complement of its payload and never zero, and zero is a word that has not come: data and flag
are one word, so that no fence is needed and no width of store is assumed to arrive whole. A reader that finds zeros
looks again. The epoch is counted on the device, by each block of threads for itself, so that a captured graph replays.

Rules for a kernel that uses it (why: ``docs/cute.md``)
1. It waits for its producers (``await_producers``) before it reads the epoch, publishes or arms.
2. A block publishes all that it has to before its first wait of the same stage.
3. Every fragment that is read is armed again in each launch, in the part of the epoch before, by anyone.
4. Each block counts its epoch up once a launch, as its last act.
With ``limit`` > 0 a wait looks that often, then reports in ``health`` and goes on with NaN. In later launches the rank
sends nothing, waits for nothing and reads only NaN, until the host has cleared mailboxes, epochs and health of all
ranks.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cutlass import Float32, Int32, Int64, Uint32

from ..compiler.call import Call, Link
from .primitives import lane_xor, pack, ptx, select, store_words, unpack
from .protocol import FRAGMENT_BYTES, HEALTH_WORDS, PROTOCOL

Words = list[Any]  # 4 Int32
LANES = 32


def fma(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return ptx("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c], pure=True)


def hold_back(words: Words, epoch: Any, epochs: Any) -> Words:
    """``words``, whose use begins after the stores above: what is in no hurry is not to delay them. The assembler moves
    nothing over what is a wait as far as it can see: an ``epoch`` (at address ``epochs``) is never negative."""
    found: Words = []
    for start in range(0, len(words), LANES):
        some = words[start : start + LANES]
        count = len(some)
        touched = " ".join(f"xor.b32 ${i}, ${i}, e;" for i in range(count))
        found += ptx(f"""{{ .reg .pred p; .reg .b32 e; mov.b32 e, ${2 * count};
            again: setp.ge.s32 p, e, 0; @p bra done;
            ld.volatile.global.b32 e, [${2 * count + 1}]; {touched} bra again; done: }}""",
                     [Int32] * count, [*some, epoch, epochs], tied=count)
    return found


def rounded(values: Sequence[Any]) -> list[Any]:
    """fp32 rounded to the values of bf16."""
    return unpack(pack(values))


def sum_over_lanes(values: Sequence[Any], lane: Any) -> list[Any]:
    """Sums over the 32 lanes of each of ``values``, 32 at a time: lane l holds the sums l, l + 32, ...

    A step halves the values that a lane is responsible for, so that n values cost n shuffles and not 5 n.
    """
    found = []
    for start in range(0, len(values), 32):
        held = list(values[start : start + 32])
        count = 1 << (len(held) - 1).bit_length()
        held += [Float32(0.0)] * (count - len(held))
        step = count // 2
        while step:
            upper = (lane & step) != 0
            kept = [select(upper, held[i + step], held[i]) for i in range(step)]
            sent = [select(upper, held[i], held[i + step]) for i in range(step)]
            held = [k + lane_xor(s, step) for k, s in zip(kept, sent, strict=True)]
            step //= 2
        total = held[0]
        step = count
        while step < 32:
            total = total + lane_xor(total, step)
            step *= 2
        found.append(total)
    return found


# what the mailboxes need of the GPU and no other kernel does


def _guarded(text: str, guard: Any, number: int) -> str:
    """``text``, executed where operand ``number`` is not zero, if there is a guard."""
    return text if guard is None else f"{{ .reg .pred g; setp.ne.b32 g, ${number}, 0; @g {text} }}"


def load_number(at: Any, kind: Any = Int32) -> Any:
    """One number of memory that other kernels or the host write."""
    return ptx(f"ld.global.b{kind.width} $0, [$1];", [kind], [at])


def store_number(at: Any, value: Any, guard: Any) -> None:
    """Stores an Int32 where ``guard`` (Int32) is not zero."""
    ptx(_guarded("st.global.b32 [$0], $1;", guard, 2), [], [at, value, guard])


def encode(word: Any) -> Any:
    """What travels for a word: ``protocol.encode``."""
    return ptx("{ .reg .b32 c; not.b32 c, $1; max.u32 $0, c, 1; }", [Int32], [word], pure=True)


def send_words(at: Any, words: Words, guard: Any, *, multicast: bool = False) -> None:
    """Stores 4 words in a peer's memory, or in that of all ranks, where ``guard`` (Int32, or None) is not zero."""
    more = [] if guard is None else [guard]
    if multicast:
        # a store of bits: the type of the vector only says where they go
        text = "multimem.st.relaxed.sys.global.v4.f32 [$0], {$1, $2, $3, $4};"
        ptx(_guarded(text, guard, 5), [], [at, *(word.bitcast(Float32) for word in words), *more])
    else:
        ptx(_guarded("st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};", guard, 5), [], [at, *words, *more])


def look_at(at: Any, guard: Any = None) -> Words:
    """4 words that a peer may have written; ones, which are waited for no longer, where ``guard`` (Int32) is zero."""
    if guard is None:
        return ptx(f"{_LOOK} [$4];", [Int32] * 4, [at])
    ones = " ".join(f"mov.b32 ${i}, 1;" for i in range(4))
    return ptx(f"{{ .reg .pred g; setp.ne.b32 g, $5, 0; {ones} @g {_LOOK} [$4]; }}", [Int32] * 4, [at, guard])


def wait_for(places: Sequence[Any], words: Words) -> Words:
    """Looks again, at all that is late at once, until none of the 4 words of each place is zero."""
    return ptx(f"{{ .reg .pred p, q; again: setp.ne.b32 q, 0, 0; {_round(len(places), len(words))} @q bra again; }}",
               [Int32] * len(words), [*words, *places], tied=len(words))


def wait_bounded(places: Sequence[Any], words: Words, looks: Any, limit: int) -> tuple[Words, Any]:
    """The same, until ``looks`` has been counted up to ``limit``."""
    count = len(words)
    # a round is predicate r's, and without it nothing is loaded
    *words, looks = ptx(
        f"{{ .reg .pred p, q, r; again: setp.ne.b32 q, 0, 0; setp.lt.s32 r, ${count}, {limit}; "
        f"{_round(len(places), count + 1, bounded=True)} and.pred q, q, r; @q add.s32 ${count}, ${count}, 1; "
        "@q bra again; }", [Int32] * (count + 1), [*words, looks, *places], tied=count + 1)
    return words, looks


def _round(places: int, results: int, *, bounded: bool = False) -> str:
    """Loads what is late of each place; predicate q is true where something was. One that came while another was
    waited for costs no journey of its own: ranks that were slow together are one journey, not one each."""
    steps = []
    for i in range(places):
        w = [f"${4 * i + j}" for j in range(4)]
        steps.append(
            f"setp.eq.b32 p, {w[0]}, 0; setp.eq.or.b32 p, {w[1]}, 0, p; setp.eq.or.b32 p, {w[2]}, 0, p; "
            f"setp.eq.or.b32 p, {w[3]}, 0, p; or.pred q, q, p; {'and.pred p, p, r; ' if bounded else ''}"
            f"@p ld.relaxed.sys.global.v4.b32 {{{', '.join(w)}}}, [${2 * results + i}];")
    return " ".join(steps)


_LOOK = "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3},"


def store_report(at: Any, values: Sequence[Any], missing: Any) -> None:
    """Stores ``values`` (Int32, the first not zero) at ``at`` where ``missing`` is not zero and nobody has before."""
    assert len(values) <= HEALTH_WORDS, f"{len(values)} words"
    rest = " ".join(f"@p st.global.b32 [$0+{4 * i}], ${i + 1};" for i in range(1, len(values)))
    ptx(f"{{ .reg .pred p; .reg .b32 o; setp.ne.b32 p, ${len(values) + 1}, 0; mov.b32 o, 1; "
        f"@p atom.cas.b32 o, [$0], 0, $1; setp.eq.and.b32 p, o, 0, p; {rest} }}", [], [at, *values, missing])


# addresses


def addresses(calls: Sequence[Call], links: Sequence[Link], tensors: Sequence[Mapping[str, torch.Tensor]],
              multicast: int = 0) -> dict[str, torch.Tensor | int]:
    """The arguments of a kernel for the ranks of this process: for one rank its addresses themselves, for several a
    table with a row for each. ``tensors`` are those that the kernel names, of each rank."""
    rows = []
    for call, link, named in zip(calls, links, tensors, strict=True):
        own = {name: tensor.data_ptr() for name, tensor in named.items()}
        own |= {name: call.scratch[name].data_ptr() for name in ("mailbox", "epochs", "health")}
        own |= {"rank": link.rank, "number": call.number, "multicast": multicast}
        rows.append(own | {f"peer{rank}": address for rank, address in enumerate(link.peers)})
    device = calls[0].scratch["mailbox"].device
    table = torch.tensor([list(row.values()) for row in rows], dtype=torch.int64, device=device)
    if len(rows) == 1:
        return {"table": table} | rows[0]
    # the names are arguments of the one-rank form only; here they tell the order of the columns
    return {"table": table}


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes between rows, or of the whole vector."""
    return (tensor.stride(0) if tensor.dim() > 1 else tensor.numel()) * tensor.element_size()


def fits_at_once(blocks: int, device: torch.device) -> bool:
    """Whether ``blocks`` blocks that wait for each other surely run at the same time: one on each multiprocessor, an
    eighth left free for clusters that do not come out even. True for a GPU that is not here."""
    if device.type != "cuda":
        return True
    return blocks <= torch.cuda.get_device_properties(device).multi_processor_count * 7 // 8


def columns_of(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Columns of the table of ``addresses``."""
    return (*names, "mailbox", "epochs", "health", "rank", "number", "multicast", *(f"peer{r}" for r in range(ranks)))


class Addresses:
    """While a kernel is traced: the addresses of the rank that this block works for, i64 each."""

    def __init__(self, arguments: Sequence[Any], names: Sequence[str], columns: Sequence[str], index: Any) -> None:
        self.direct = dict(zip(names, arguments, strict=True))
        self.columns = tuple(columns)
        self.row = self.direct["table"].toint() + Int64(index) * (8 * len(self.columns))

    def __getitem__(self, name: str) -> Any:
        if name in self.direct:
            return self.direct[name]
        return self._load(self.columns.index(name))

    def peer(self, number: Any) -> Any:
        """The mailbox of a rank whose number (Int32) only the running kernel knows."""
        return self._load(Int64(number) + self.columns.index("peer0"))

    def _load(self, column: Any) -> Any:
        return load_number(self.row + 8 * column, Int64)


class Mailbox:
    """While a kernel is traced: the mailboxes of this rank and of its peers in one launch.

    ``slot`` is bytes, ``block`` the number of this block of threads in its launch: its epoch. ``multicast``: stores go
    to one address that the switch repeats for every rank (``multimem``), compiled and never run by k3plan's tests.
    ``epoch`` is what the block has read already.
    """

    def __init__(self, at: Addresses, *, ranks: int, slot: int, block: Any, limit: int,
                 multicast: bool = False, epoch: Any = None) -> None:
        self.ranks, self.slot, self.block, self.limit = ranks, slot, block, limit
        self.own, self.rank = at["mailbox"], at["rank"]
        self.epochs = at["epochs"] + Int64(block) * 4
        self.epoch = load_number(self.epochs) if epoch is None else epoch
        self.multicast = at["multicast"] if multicast else None
        self.at = at
        if limit:
            self.health, self.number = at["health"], at["number"]
            # with a report nothing that comes is read as data any more
            self.sound = load_number(self.health) == 0
            self.looks = select(self.sound, Int32(0), Int32(limit))
        part = Uint32(self.epoch) % PROTOCOL.parities
        armed = (Uint32(self.epoch) + (PROTOCOL.parities - PROTOCOL.rearm_lag)) % PROTOCOL.parities
        self.part = Int64(part) * (ranks * slot)
        self.armed = Int64(armed) * (ranks * slot)
        self.mine = self.part + self.rank * slot

    def send(self, fragment: Any, words: Words, peer: Any = None, guard: Any = None) -> None:
        """This rank's fragment number ``fragment`` (Int32) into the mailbox of ``peer``, or of every rank."""
        if self.limit:
            # a rank that waits no more may run ahead of its peers, into what they have still to read
            guard = Int32(self.sound) if guard is None else guard & Int32(self.sound)
        coded = [encode(word) for word in words]
        offset = self.mine + Int64(fragment) * FRAGMENT_BYTES
        if self.multicast is not None and peer is None:
            send_words(self.multicast + offset, coded, guard, multicast=True)
            return
        for target in [self.at[f"peer{rank}"] for rank in range(self.ranks)] if peer is None else [peer]:
            send_words(target + offset, coded, guard)

    def arm(self, sender: Any, fragment: Any, guard: Any = None) -> None:
        """Zeroes the fragment of ``sender`` in the part of the epoch before."""
        at = self.own + self.armed + Int64(sender) * self.slot + Int64(fragment) * FRAGMENT_BYTES
        store_words(at, [Int32(0)] * 4, guard=guard)

    def look(self, sender: Any, fragment: Any, guard: Any = None) -> tuple[Any, Words]:
        """A first look at a fragment, where ``guard`` (Int32) is not zero: give what is awaited together to ``wait``.
        Several looks are on their way together."""
        at = self.own + self.part + Int64(sender) * self.slot + Int64(fragment) * FRAGMENT_BYTES
        return at, look_at(at, guard)

    def wait(self, looked: Sequence[tuple[Any, Words]]) -> list[Words]:
        """The payloads of fragments, looked at together until all are whole; NaN after a wait that gave up."""
        places, words = [at for at, _ in looked], [word for _, four in looked for word in four]
        if self.limit:
            words, self.looks = wait_bounded(places, words, self.looks, self.limit)
            words = [select(self.sound, word ^ Int32(-1), Int32(-1)) for word in words]
        else:
            words = [word ^ Int32(-1) for word in wait_for(places, words)]
        return [words[i : i + 4] for i in range(0, len(words), 4)]

    def report(self, received: Sequence[tuple[Any, Words]], wait: int) -> None:
        """With a limit: the first thread of the rank that misses fragments says which. ``received``: senders and what
        ``wait`` returned (a missing word reads as all ones); ``wait`` is the number of the wait in the kernel."""
        if not self.limit:
            return
        missing, senders = Int32(0), Int32(0)
        for sender, words in received:
            lost = (words[0] == -1) | (words[1] == -1) | (words[2] == -1) | (words[3] == -1)
            missing = missing + select(lost, Int32(1), Int32(0))
            senders = senders | select(lost, Int32(1) << Int32(sender), Int32(0))
        who = [Int32(self.rank) + 1, Int32(self.number), self.epoch, Int32(self.block)]
        store_report(self.health, [*who, missing, senders, Int32(wait)], missing)

    def count(self, guard: Any) -> None:
        """Counts the epoch of this block up; ``guard`` (Int32) is not zero in one thread of it."""
        following = self.epoch + 1
        store_number(self.epochs, select(following == PROTOCOL.wrap, Int32(0), following), guard)
