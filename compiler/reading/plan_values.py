"""A merged plan item to sound values, their origins, and problems in words. Decides the wording, not the rules."""
from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError

from ..errors import Origin, Problem
from . import planfile
from .document import Item, a_kind, show
from .spec_checks import find_conflicts

KINDS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "string_type": "a text", "list_type": "a list", "model_type": "a mapping",
}
BOUNDS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt"}
BOUND_WORDS = {"ge": "{} or more", "le": "{} or less", "gt": "a number above {}"}
# what other tools call these
OTHER_NAMES = {
    "batch": "step.sequences", "batch_size": "step.sequences", "seq_len": "step.context",
    "max_model_len": "step.context", "block_size": "step.page_size", "tp_size": "parallel.tp",
    "tensor_parallel": "parallel.tp", "tensor_parallel_size": "parallel.tp", "ep": "parallel.experts",
    "dtype": "numerics.activation", "kv_cache_dtype": "numerics.kv_cache", "device": "target.gpu",
}


def find_values(root: Item, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Sound values by dotted name, defaults filled in, and where each came from. Wrong fields are left out."""
    wrong: set[str] = set()
    try:
        planfile.PlanFile.model_validate(root.plain())
    except ValidationError as invalid:
        # what the YAML reader refused has no value: one mistake, not an empty field as well
        refused = {problem.where for problem in problems}
        for error in invalid.errors(include_url=False):
            kind, loc = error["type"], error["loc"]
            if kind != "extra_forbidden":
                wrong.add(_dotted(loc))
            item, depth = root.find(loc)
            # likewise a misspelt `model` is not an unknown key and a missing one, nor what a lost base may have
            excused = kind == "missing" and (root.get("extends") or _misspelt(str(loc[-1]), root))
            if not excused and not (depth == len(loc) and item.value is None and item.origin in refused):
                problems.append(_explain(root, kind, loc, error.get("ctx", {})))
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in planfile.leaves():
        if name == "extends" or any(name == bad or name.startswith(f"{bad}.") for bad in wrong):
            continue
        path = tuple(name.split("."))
        item, depth = root.find(path)
        given = depth == len(path)
        values[name] = item.plain() if given else planfile.default(name)
        if given or name not in ("model.preset", "model.config"):
            origins[name] = item.origin if given else Origin("default")
    for name, said, hint in find_conflicts(values):
        path = tuple(name.split("."))
        item, depth = root.find(path)
        problems.append(item.problem(said, hint, at_key=depth < len(path) or isinstance(item.value, dict)))
    return values, origins


def _misspelt(name: str, root: Item) -> bool:
    unknown = [key for key in root.value if key not in planfile.sections()[""]]
    return bool(difflib.get_close_matches(name, unknown, 1, 0.6))


def _dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(part for part in loc if isinstance(part, str))


def _shown(loc: tuple[int | str, ...]) -> str:
    """``("step", "outputs", 1)`` as ``step.outputs[1]``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _explain(root: Item, kind: str, loc: tuple[int | str, ...], context: dict[str, Any]) -> Problem:
    """One pydantic finding in our words, at its place."""
    item, _ = root.find(loc)
    name = _shown(loc)
    if kind == "extra_forbidden":
        return _unknown_key(item, loc)
    if kind == "missing":
        example = {"version": f"version: {planfile.VERSION}", "model": "model: {preset: kimi-k3}"}[name]
        return item.problem(f"`{name}` is missing", f"add `{example}`", at_key=True)
    if item.value is None:
        return item.problem(f"`{name}` is empty", "give it a value, or delete it", at_key=True)
    if kind == "literal_error":
        return _not_allowed(item, name, planfile.allowed(_dotted(loc)))
    if kind == "too_short":
        return item.problem(f"`{name}` is an empty list", "list at least one, or delete it")
    if kind == "finite_number":
        return item.problem(f"`{name}` is {item.value}", "write a finite number")
    if kind in BOUNDS:
        bound = BOUND_WORDS[BOUNDS[kind]].format(f"{context[BOUNDS[kind]]:g}")
        return item.problem(f"`{name}` is {show(item)}; it must be {bound}", f"write {bound}")
    return _wrong_kind(item, name, KINDS.get(kind, "of another kind"), _dotted(loc))


def _unknown_key(item: Item, loc: tuple[int | str, ...]) -> Problem:
    key, section = str(loc[-1]), _dotted(loc[:-1])
    known = planfile.sections()[section]
    where = f"`{section}`" if section else "a plan file"
    said = f"unknown key `{key}` in {where}; known: {', '.join(known)}"
    near = difflib.get_close_matches(key, known, 1, 0.6)
    home = OTHER_NAMES.get(key) or next((n for n in planfile.leaves() if n.rpartition(".")[2] == key), "")
    place, _, field = home.rpartition(".")
    if home and place != section:
        hint = f"write it as `{place}: {{{field}: ...}}`" if place else f"move `{home}` to the top level"
    elif near or home:
        hint = f"did you mean `{field or near[0]}`? rename it"
    else:
        hint = "delete it"
    return item.problem(said, hint, at_key=True)


def _not_allowed(item: Item, name: str, allowed: tuple[Any, ...]) -> Problem:
    """A value outside an enumeration, with the nearest name."""
    key = name.rpartition(".")[2].partition("[")[0]
    listed = ", ".join(map(str, allowed))
    said = f"`{name}` is {show(item)}; allowed: {listed}"
    if name == "version":
        return item.problem(said, "write `version: 1`, or use the k3plan release that this file was written for")
    text = item.value.lower() if isinstance(item.value, str) else ""
    names = [value for value in allowed if isinstance(value, str)]
    near = [value for value in names if text and value.startswith(text)][:1]
    near = near or difflib.get_close_matches(text, names, 1, 0.5)
    write = near[0] if name.endswith("]") else f"{key}: {near[0]}" if near else ""
    hint = f"did you mean {near[0]}? write `{write}`" if near else f"write one of {listed}"
    return item.problem(said, hint)


def _wrong_kind(item: Item, name: str, wanted: str, dotted: str) -> Problem:
    """A value of the wrong YAML type, with the repair when it can be guessed."""
    said = f"`{name}` is {show(item)}, {a_kind(item)}; it must be {wanted}"
    key = dotted.rpartition(".")[2]
    value, repair = item.value, ""
    if wanted == "a whole number":
        whole = _as_whole(value)
        allowed = planfile.allowed(dotted)
        repair = str(whole) if whole is not None and (not allowed or whole in allowed) else ""
    elif wanted == "a number" and isinstance(value, str) and re.fullmatch(r"[\d.]+(e[+-]?\d+)?", value, re.I):
        repair = value
    elif wanted == "a list" and not isinstance(value, dict):
        repair = f"[{value}]"
    elif wanted == "a text" and not isinstance(value, (dict, list)):
        repair = f'"{value}"'
    if wanted == "a mapping":
        fields = ", ".join(f"{field}: ..." for field in planfile.sections().get(dotted, ())[:2])
        return item.problem(said, f"write `{key}: {{{fields}}}`")
    if not repair:
        return item.problem(said, f"write {wanted}")
    quotes = "remove the quotes: " if item.quoted and wanted != "a text" else ""
    return item.problem(said, f"{quotes}write `{repair if name.endswith(']') else f'{key}: {repair}'}`")


def _as_whole(value: Any) -> int | None:
    """The whole number that a text or a real number stands for: ``"8192"``, ``8k``, ``1e6``."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = re.fullmatch(r"(\d+)\s*([kKmM]?)i?", value) if isinstance(value, str) else None
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else None
