"""What a kernel's PTX does before it has waited for the launches before it.

A forward walk over the branches tells which instructions can be reached by a way that has not passed
``griddepcontrol.wait``. Pointers are followed from the kernel's parameters through the address arithmetic; in a kernel
that takes its pointers from a table, a pointer is the column that it was loaded from. Decides nothing about what is
allowed.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_ADDRESS = re.compile(r"\[\s*(%\w+|\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
# a parameter's index, and the column of the table where the pointer was loaded through one
Pointer = tuple[int, int | None]
# the same, and bytes that were added as a constant
Origin = tuple[int, int | None, int]


@dataclass(frozen=True)
class Access:
    """A global load ("ld") or anything that writes ("st", "atom", "red") before the wait; no pointer if unknown."""

    kind: str
    pointers: frozenset[Pointer]
    text: str


@dataclass(frozen=True)
class Early:
    """What can happen before the wait. ``exits`` are ways to the end that pass none; ``early`` of the ``triggers`` can
    be reached before it."""

    waits: int
    triggers: int
    accesses: tuple[Access, ...]
    exits: int
    early: int = 0


def find_early(ptx: str, table: int | None = None) -> Early:
    """The one kernel in ``ptx``; ``table`` is the index of the parameter that points to a table of addresses."""
    blocks, follows = _blocks(ptx)
    unwaited = _unwaited(blocks, follows)
    every = [text for block in blocks.values() for text in block]
    origins = _origins(every, table)
    accesses: list[Access] = []
    exits = early = 0
    for name in sorted(unwaited):
        for text in blocks[name]:
            if WAIT in text:
                break
            early += TRIGGER in text
            operation = _operation(text)
            if operation == "ret":
                exits += 1
            elif _kind(operation):
                accesses.append(Access(_kind(operation), _pointers(text, origins), text))
    return Early(sum(WAIT in t for t in every), sum(TRIGGER in t for t in every), tuple(accesses), exits,
                 early)


def _statements(ptx: str) -> Iterator[str]:
    """Instructions and labels of the kernel's body."""
    body = ptx[ptx.index("{", ptx.index(".reqntid") if ".reqntid" in ptx else ptx.index(".entry")) + 1:]
    body = body[: body.index("// -- End function")] if "// -- End function" in body else body
    lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", ".section", ".b8")))
    for part in re.split(r";|(?<=:)\n", text):
        while found := re.match(r"\s*(\$?\w+):", part):
            yield found[1] + ":"
            part = part[found.end():]
        part = part.strip().lstrip("{}").strip()
        if part and not part.startswith("."):
            yield " ".join(part.split())


def _blocks(ptx: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Basic blocks by name, and which may follow each."""
    blocks: dict[str, list[str]] = {"": []}
    follows: dict[str, list[str]] = {"": []}
    current = ""
    for text in _statements(ptx):
        if text.endswith(":"):
            follows[current].append(text[:-1])
            current = text[:-1]
            blocks[current], follows[current] = [], follows.get(current, [])
            continue
        blocks[current].append(text)
        operation = _operation(text)
        if operation.startswith("bra") or operation in ("ret", "exit", "trap"):
            if operation.startswith("bra"):
                follows[current].append(text.split()[-1])
            name = f"{current}'{len(blocks)}"
            if text.startswith("@"):
                follows[current].append(name)
            current = name
            blocks[current], follows[current] = [], []
    return blocks, follows


def _unwaited(blocks: dict[str, list[str]], follows: dict[str, list[str]]) -> set[str]:
    """Blocks that some way reaches before a wait."""
    found, todo = {""}, [""]
    while todo:
        name = todo.pop()
        if any(WAIT in text for text in blocks[name]):
            continue
        fresh = set(follows[name]) - found
        found |= fresh
        todo += fresh
    return found


def _operation(text: str) -> str:
    return text.split()[1] if text.startswith("@") else text.split()[0]


def _kind(operation: str) -> str:
    """"" for what touches no global memory."""
    head, *rest = operation.split(".")
    if head in ("ld", "st", "atom", "red") and not {"shared", "local", "param", "const"} & set(rest):
        return head
    if head == "cp" and "global" in rest:
        return "ld"
    return "st" if head in ("multimem", "st.async", "cp") and "reduce" in rest else ""


def _registers(text: str) -> list[str]:
    return re.findall(r"%(?:rd|r|rs|f|fd)\d+", text)


def _origins(statements: Iterable[str], table: int | None) -> dict[str, set[Origin]]:
    """For each register the pointers that it may have been made of."""
    found: dict[str, set[Origin]] = {}
    readers: dict[str, list[tuple[list[str], int, bool]]] = {}
    for text in statements:
        operation, kind = _operation(text), _kind(_operation(text))
        body = text[text.index(operation) + len(operation):]
        targets, sources, constant, load = [], [], 0, False
        if operation.startswith("ld.param"):
            index = re.search(r"_param_(\d+)", body)
            assert index, text
            found.setdefault(_registers(body)[0], set()).add((int(index[1]), None, 0))
        elif kind == "ld" and not operation.startswith("cp") and (address := _ADDRESS.search(body)):
            targets, sources = _registers(body.split("[")[0]), [address[1]]
            constant, load = int(address[2] or 0), True
        elif operation.startswith("st.shared"):
            # a tensor of addresses may change its layout through shared memory
            targets, sources = ["%shared"], _registers(body.split("]")[1])
        elif operation.startswith("ld.shared"):
            targets, sources = _registers(body.split("[")[0]), ["%shared"]
        elif not kind and not operation.startswith(("bra", "setp", "bar", "ret", "stmatrix", "ldmatrix")):
            packed = body.lstrip().startswith("{")
            first, *others = re.split(r"(?<=}),", body, maxsplit=1) if packed else body.split(",")
            targets, sources = _registers(first), _registers(",".join(others))
            if operation.startswith("add") and re.fullmatch(r"\s*-?\d+\s*", others[-1]):
                constant = int(others[-1])
        for source in set(sources):
            readers.setdefault(source, []).append((targets, constant, load))
    todo = list(found)
    while todo:
        register = todo.pop()
        for targets, constant, load in readers.get(register, ()):
            new = {_moved(origin, constant, load, table) for origin in found[register]} - {None}
            for target in targets:
                before = found.setdefault(target, set())
                # a constant in a loop adds up for ever
                if not new <= before and len(before) < 256:
                    before |= new  # type: ignore[arg-type]
                    todo.append(target)
    return found


def _moved(origin: Origin, constant: int, load: bool, table: int | None) -> Origin | None:
    """Where a pointer comes from after an addition or a load; None where the result is no pointer."""
    parameter, column, offset = origin
    if load:
        return (parameter, (offset + constant) // 8, 0) if parameter == table and column is None else None
    return (parameter, column, offset + constant if parameter == table and column is None else 0)


def _pointers(text: str, origins: dict[str, set[Origin]]) -> frozenset[Pointer]:
    addresses = _ADDRESS.findall(text)
    # of a copy to shared memory the second address is that in global memory
    register = addresses[-1][0] if addresses else ""
    return frozenset((parameter, column) for parameter, column, _ in origins.get(register, ()))
