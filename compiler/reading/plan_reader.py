"""Plan files and ``--set`` flags to one merged item. Decides precedence: bases, then the file, then flags."""
from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import Origin, Problem
from .document import Item, Source, Span, merge, parse_json, parse_yaml

FLAG = re.compile(r"(?P<name>\w+(\.\w+)*)=(?P<value>.*)", re.DOTALL)
# ways to name the model; the later one replaces the earlier one
MODEL_NAMES = ("preset", "config")


def read_plan(path: str | os.PathLike[str], overrides: Sequence[str], problems: list[Problem]) -> Item | None:
    """The merged content; ``extends`` is left in it where a base could not be read. ``None`` when the file itself
    cannot be read as a mapping."""
    root = _read_file(os.fspath(path), [], problems, None)
    for number, text in enumerate(overrides, start=1):
        flag = _read_flag(number, text, problems)
        if root is not None and flag is not None:
            root = _merge(root, flag)
    return root


def read_text(path: str, asked: Item | None, problems: list[Problem]) -> str | None:
    """The text of a file. ``asked`` is the value that named it, for the problem when it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = Path(path).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(Path(path).name, names, 1, 0.6)
        hint = f"did you mean {near[0]}? correct the path" if near else "correct the path"
        said = f"there is no file {path}"
    except UnicodeDecodeError as error:
        said, hint = f"{path} is not UTF-8 text (byte {error.start})", "save it as UTF-8"
    except OSError as error:
        said, hint = f"{path} cannot be read: {error.strerror}", "give a file that can be read"
    problems.append(asked.problem(said, hint) if asked else Problem(said, Origin("yaml", path), hint=hint))
    return None


def read_config(path: str, label: str, kind: str, asked: Item, problems: list[Problem]) -> Item | None:
    """A config.json as an item; ``label`` is the name that origins and problems show."""
    text = read_text(path, asked, problems)
    if text is None:
        return None
    item, found = parse_json(text, Source(kind, label, tuple(text.split("\n"))))
    problems += found
    return item


def _read_file(path: str, chain: list[str], problems: list[Problem], asked: Item | None) -> Item | None:
    """One file merged over what it extends. ``chain`` holds the files that led here."""
    text = read_text(path, asked, problems)
    if text is None:
        return None
    source = Source("yaml", path, tuple(text.split("\n")), os.path.dirname(path) or ".")
    item, found = parse_yaml(text, source)
    problems += found
    if item is None:
        return None
    if not isinstance(item.value, dict):
        said = "the file is empty" if item.value is None else "a plan file must be a mapping of sections"
        problems.append(item.problem(said, "start with `version: 1` and `model: {preset: kimi-k3}`"))
        return None
    if "launches" in item.value:
        problems.append(Problem("this is a launch plan, which compile writes", Origin("yaml", path),
                                hint="give the plan file (YAML) that it was compiled from"))
        return None
    bases = item.get("extends")
    own = replace(item, value={key: value for key, value in item.value.items() if key != "extends"})
    if bases is None:
        return own
    merged: Item | None = None
    for base in _base_items(bases, problems):
        target = os.path.normpath(os.path.join(source.folder, base.value))
        seen = [*chain, path]
        if os.path.realpath(target) in map(os.path.realpath, seen):
            circle = " -> ".join([*(os.path.basename(name) for name in seen), os.path.basename(target)])
            problems.append(base.problem(f"`extends` runs in a circle: {circle}", "remove one `extends`"))
            loaded = None
        else:
            loaded = _read_file(target, seen, problems, base)
        if loaded is not None:
            merged = loaded if merged is None else _merge(merged, loaded)
        else:
            own.value["extends"] = base  # what is missing here may stand there
    return own if merged is None else _merge(merged, own)


def _base_items(bases: Item, problems: list[Problem]) -> list[Item]:
    entries = bases.value if isinstance(bases.value, list) else [bases]
    good = [entry for entry in entries if isinstance(entry.value, str) and entry.value]
    for entry in entries:
        if entry not in good:
            hint = "write `extends: base.yaml`, or a list of paths"
            problems.append(entry.problem("`extends` must be a path or a list of paths", hint))
    return good


def _read_flag(number: int, text: str, problems: list[Problem]) -> Item | None:
    """``a.b=value`` as nested mappings, placed on the text of the flag."""
    source = Source("flag", f"--set #{number}", (text,))
    match = FLAG.fullmatch(text)
    if match is None:
        span = Span(1, 1, len(text))
        problems.append(source.problem(span, "a flag must be name=value", "write --set step.query=4"))
        return None
    name, value = match["name"], match["value"]
    if name.partition(".")[0] == "extends":
        said = "`extends` cannot be a flag: it says where a file starts from"
        problems.append(source.problem(Span(1, 1, len("extends")), said, "write it in the plan file"))
        return None
    # blanks in place of the name keep the columns of the flag
    item, found = parse_yaml(" " * (len(name) + 1) + value, source)
    problems += found
    if item is None:
        return None
    if item.value is None:
        item = replace(item, span=Span(1, len(text) + 1))
    column = len(name) + 1
    for part in reversed(name.split(".")):
        column -= len(part)
        span = Span(1, column, len(part))
        item = Item({part: replace(item, key=span)}, source, span)
        column -= 1
    return item


def _merge(base: Item, top: Item) -> Item:
    """Deep merge, but a later way to name the model replaces the earlier, and a wrong version stays."""
    from .planfile import VERSION

    model, later = base.get("model"), top.get("model")
    named = later and any(found.value for name in MODEL_NAMES if (found := later.get(name)))
    if named and model and isinstance(model.value, dict):
        kept = {key: item for key, item in model.value.items() if key not in MODEL_NAMES}
        base = replace(base, value={**base.value, "model": replace(model, value=kept)})
    merged = merge(base, top)
    version = base.get("version")
    if version and version.value != VERSION:
        merged.value["version"] = version
    return merged
