"""Typed reading of a config: takes values, keeps every problem and the origin of every field."""
from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from ..errors import Origin, Problem
from .document import Item, a_kind, show

KIND_NAMES = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "a list",
}
REQUIRED: Any = object()


@dataclass(frozen=True)
class Row:
    """A field of ``ModelConfig`` and the config keys, by preference, that hold it."""

    field: str
    keys: tuple[str, ...]
    kind: type = int
    least: float | None = 1
    default: Any = REQUIRED  # used when the key is absent or null


class Reader:
    """Takes typed values out of a config and keeps every problem and the origin of every field."""

    def __init__(self, root: Item, text: Item) -> None:
        self.root, self.text = root, text
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}

    def at(self, key: str) -> Item | None:
        """The item at a dotted key of the language model's config, ``None`` when absent or null."""
        item: Item | None = self.text
        for name in key.split("."):
            item = item.get(name) if item else None
        return item if item and item.value is not None else None

    def take(self, row: Row) -> Any:
        """The value of ``row``; ``None`` after a problem. Keys that contradict each other are one."""
        found = [(key, item) for key in row.keys if (item := self.at(key))]
        if not found:
            if row.default is REQUIRED:
                self.missing(row.keys[0], KIND_NAMES[row.kind])
                return None
            self.origins[row.field] = Origin("default")
            return row.default
        key, item = found[0]
        for other_key, other in found[1:]:
            if other.value != item.value:
                said = f"`{other_key}` is {show(other)}, but `{key}` is {show(item)}"
                self.problems.append(other.problem(said, "give both the same value, or delete one"))
        self.origins[row.field] = item.origin
        if not self.check(item, key, row.kind, row.least):
            return None
        return float(item.value) if row.kind is float else item.value

    def check(self, item: Item, name: str, kind: type, least: float | None = None) -> bool:
        """Whether ``item`` has the kind and is large enough; a real number must exceed ``least``."""
        value = item.value
        right = isinstance(value, (int, float) if kind is float else kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            said = f"`{name}` is {show(item)}, {a_kind(item)}; it must be {KIND_NAMES[kind]}"
            self.problems.append(item.problem(said, f"write {KIND_NAMES[kind]}"))
            return False
        if kind is float and not math.isfinite(value):
            self.problems.append(item.problem(f"`{name}` is {value}", "write a finite number"))
            return False
        if least is not None and (value <= least if kind is float else value < least):
            bound = f"a number above {least:g}" if kind is float else f"{least:g} or more"
            said = f"`{name}` is {show(item)}; it must be {bound}"
            self.problems.append(item.problem(said, f"write {bound}"))
            return False
        return True

    def missing(self, key: str, kind: str) -> None:
        parent, name = self.text, key
        if "." in key:
            section, leaf = key.split(".")
            if found := self.text.get(section):
                parent, name = found, leaf
        hint = f'add "{name}": <{kind}>'
        present = list(parent.value) if isinstance(parent.value, dict) else []
        near = difflib.get_close_matches(name, present, 1, 0.8)
        if near:
            hint += f', or rename "{near[0]}" if it is that'
        self.problems.append(parent.problem(f"`{key}` is missing", hint, at_key=True))
