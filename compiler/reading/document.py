"""YAML and JSON text to values that know where they stand. Decides how a finding is quoted."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import Origin, Problem

# a quoted line longer than this is cut around the caret
EXCERPT_WIDTH = 100


@dataclass(frozen=True)
class Source:
    """One text that values were read from: a plan file, a config.json, a preset or one ``--set`` flag."""

    kind: str  # "yaml" | "config" | "preset" | "flag"
    file: str  # as shown to the user
    lines: tuple[str, ...] = ()
    folder: str = "."  # relative paths in this text start here

    def problem(self, span: Span, message: str, hint: str = "") -> Problem:
        """A finding at ``span``, with the line quoted and carets under the token."""
        return Problem(message, self.origin(span), self.excerpt(span), hint)

    def origin(self, span: Span) -> Origin:
        # a flag has one line: its number would say nothing
        return Origin(self.kind, self.file, 0 if self.kind == "flag" else span.line, span.column)

    def excerpt(self, span: Span) -> str:
        if not 1 <= span.line <= len(self.lines):
            return ""
        text = self.lines[span.line - 1].replace("\t", " ").rstrip()
        start = span.column - 1
        width = max(1, min(span.width, len(text) - start))
        if len(text) > EXCERPT_WIDTH:
            cut = max(0, start - EXCERPT_WIDTH // 2)
            text, start = text[cut : cut + EXCERPT_WIDTH], start - cut
            width = max(1, min(width, len(text) - start))
        return f"{text}\n{' ' * start}{'^' * width}"


@dataclass(frozen=True)
class Span:
    """A token: 1-based line and column, and its width in characters on that line."""

    line: int = 0
    column: int = 0
    width: int = 1


@dataclass(frozen=True)
class Item:
    """A value with its place. ``value`` is a scalar, a ``dict[str, Item]`` or a ``list[Item]``."""

    value: Any
    source: Source
    span: Span = Span()
    key: Span | None = None  # of the mapping key that holds this value
    quoted: bool = False  # a string that stood in quotes

    @property
    def origin(self) -> Origin:
        return self.source.origin(self.span)

    def problem(self, message: str, hint: str = "", *, at_key: bool = False) -> Problem:
        return self.source.problem(self.key if at_key and self.key else self.span, message, hint)

    def get(self, key: str) -> Item | None:
        return self.value.get(key) if isinstance(self.value, dict) else None

    def find(self, path: tuple[str | int, ...]) -> tuple[Item, int]:
        """The deepest item along ``path`` and the number of steps that lead to it."""
        item = self
        for depth, step in enumerate(path):
            known = item.value if isinstance(item.value, dict) else {}
            if isinstance(item.value, list):
                known = dict(enumerate(item.value))
            if step not in known:
                return item, depth
            item = known[step]
        return item, len(path)

    def plain(self) -> Any:
        """The value as ordinary Python data."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def show(item: Item) -> str:
    """The value as the file writes it, shortened."""
    if isinstance(item.value, (dict, list)):
        return "{...}" if isinstance(item.value, dict) else "[...]"
    if isinstance(item.value, bool) or item.value is None:
        return {True: "true", False: "false", None: "null"}[item.value]
    return f'"{item.value}"' if isinstance(item.value, str) else str(item.value)


def a_kind(item: Item) -> str:
    """What kind of value the item is, in words for a sentence."""
    if item.value is None:
        return "nothing"
    names = {bool: "a boolean", int: "a whole number", float: "a real number", str: "a string"}
    return names.get(type(item.value), "a mapping" if isinstance(item.value, dict) else "a list")


def wrap(data: Any, source: Source) -> Item:
    """Plain data as items without a place, for configs that did not come from a file."""
    if isinstance(data, Mapping):
        return Item({str(key): wrap(value, source) for key, value in data.items()}, source)
    if isinstance(data, (list, tuple)):
        return Item([wrap(value, source) for value in data], source)
    return Item(data, source)


def merge(base: Item, top: Item) -> Item:
    """Deep merge of mappings; anything else in ``top`` replaces what ``base`` has.

    A merged mapping stands where the later file has it; a flag has no place for what it does not say.
    """
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    merged = dict(base.value)
    for key, item in top.value.items():
        merged[key] = merge(merged[key], item) if key in merged else item
    return replace(base if top.source.kind == "flag" else top, value=merged)


def parse_yaml(text: str, source: Source) -> tuple[Item | None, list[Problem]]:
    """YAML 1.2 text to an item. ``None`` when the syntax is broken; an empty text is an item of ``None``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
    except MarkedYAMLError as error:
        said = " ".join(part for part in (error.context, error.problem) if part)
        marks, hint = (error.problem_mark, error.context_mark), "correct the YAML here or on the line above"
        if "<stream end>" in said:  # the end of the file shows nothing, what was left open does
            marks, hint = marks[::-1], "close what begins here"
        mark = marks[0] or marks[1]
        span = Span(mark.line + 1, mark.column + 1) if mark else Span()
        hint = "indent with spaces" if "\\t" in said else hint
        return None, [source.problem(span, f"not YAML: {said}", hint)]
    except YAMLError as error:
        said = str(error).splitlines()[0]
        return None, [source.problem(Span(1, 1), f"not YAML: {said}", "save the file as UTF-8 text")]
    if node is None:
        return Item(None, source, Span(1, 1)), []
    builder = _YamlBuilder(source, yaml.constructor)
    return builder.build(node), builder.problems


@dataclass
class _YamlBuilder:
    """Turns composed YAML nodes into items; finds duplicate keys, tags and cycles on the way."""

    source: Source
    constructor: Any
    problems: list[Problem] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # ids of the nodes that are being built

    def build(self, node: Any, key: Span | None = None) -> Item:
        span = _node_span(node)
        if id(node) in self.path:
            self._refuse(span, "an alias that contains itself", "write the value out")
            return Item(None, self.source, span, key)
        tag = str(node.tag or "").removeprefix("tag:yaml.org,2002:")
        kind = type(node).__name__
        self.path.append(id(node))
        try:
            if kind == "MappingNode" and tag == "map":
                return Item(self._mapping(node), self.source, span, key)
            if kind == "SequenceNode" and tag == "seq":
                return Item([self.build(child) for child in node.value], self.source, span, key)
            if kind == "ScalarNode" and tag in ("str", "int", "float", "bool", "null"):
                value = self.constructor.construct_object(node)
                return Item(value, self.source, span, key, quoted=node.style in ("'", '"'))
            if kind == "ScalarNode" and tag == "timestamp":
                return Item(str(node.value), self.source, span, key)
        finally:
            self.path.pop()
        self._refuse(span, f"tag {node.tag!s} is not read", "remove the tag")
        return Item(None, self.source, span, key)

    def _refuse(self, span: Span, message: str, hint: str) -> None:
        self.problems.append(self.source.problem(span, message, hint))

    def _mapping(self, node: Any) -> dict[str, Item]:
        found: dict[str, Item] = {}
        for key_node, value_node in node.value:
            span = _node_span(key_node)
            name = str(key_node.value) if type(key_node).__name__ == "ScalarNode" else ""
            if not name:
                self._refuse(span, "a key must be a name", "write a plain key")
            elif name == "<<":
                self._refuse(span, "merge keys (<<) are not read", "use `extends:` or repeat the keys")
            elif name in found:
                first = found[name].key or Span()
                message = f"`{name}` stands twice in one mapping; it was first given on line {first.line}"
                self._refuse(span, message, f"delete one `{name}`")
            else:
                found[name] = self.build(value_node, span)
        return found


def _node_span(node: Any) -> Span:
    start, end = node.start_mark, node.end_mark
    one_line = start.line == end.line and end.column > start.column
    # block collections end where the next token starts: mark their first character only
    width = end.column - start.column if one_line else 1
    return Span(start.line + 1, start.column + 1, width)


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def parse_json(text: str, source: Source) -> tuple[Item | None, list[Problem]]:
    """JSON text to an item. Syntax is ``json``'s judgement; this only adds the places."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        span = Span(error.lineno, error.colno)
        return None, [source.problem(span, f"not JSON: {error.msg}", "correct the JSON here or just before")]
    problems: list[Problem] = []
    return _json_value(_json_tokens(text), source, None, problems), problems


def _json_tokens(text: str) -> Iterator[tuple[str, Span]]:
    for number, line in enumerate(text.split("\n"), start=1):
        for match in _JSON_TOKEN.finditer(line):
            yield match[0], Span(number, match.start() + 1, len(match[0]))


def _json_value(
    tokens: Iterator[tuple[str, Span]], source: Source, key: Span | None, problems: list[Problem],
    first: tuple[str, Span] | None = None,
) -> Item:
    token, span = first or next(tokens)
    if token == "{":
        mapping: dict[str, Item] = {}
        for name, name_span in tokens:
            if name == "}":
                break
            if name == ",":
                continue
            next(tokens)  # the colon
            child = _json_value(tokens, source, name_span, problems)
            if mapping.setdefault(json.loads(name), child) is not child:
                said = f"{name} stands twice in one object"
                problems.append(source.problem(name_span, said, f"delete one {name}"))
        return Item(mapping, source, span, key)
    if token == "[":
        items: list[Item] = []
        for start in tokens:
            if start[0] == "]":
                break
            if start[0] != ",":
                items.append(_json_value(tokens, source, None, problems, start))
        return Item(items, source, span, key)
    return Item(json.loads(token), source, span, key, quoted=token.startswith('"'))
