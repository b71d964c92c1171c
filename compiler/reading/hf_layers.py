"""Which layer is what: the layer lists of a Hugging Face config (1-based) to one name a layer (0-based)."""
from __future__ import annotations

from ..errors import Origin
from .document import Item
from .hf_reader import Reader

ATTENTION_TYPES = {"linear_attention": "kda", "full_attention": "mla"}
MLP_TYPES = {"dense": "dense", "sparse": "moe"}


def attention_kinds(reader: Reader, layers: int) -> tuple[str, ...]:
    """``kda`` or ``mla`` for each layer, from ``layer_types`` or the two lists of ``linear_attn_config``."""
    named = _named(reader, "layer_types", ATTENTION_TYPES, layers)
    lists = {"kda": "linear_attn_config.kda_layers", "mla": "linear_attn_config.full_attn_layers"}
    if any(reader.at(key) for key in lists.values()):
        listed = _listed(reader, lists, layers)
        _agree(reader, "layer_types", named, listed)
        return listed
    if named is None:
        reader.missing("linear_attn_config.kda_layers", "list of 1-based layers")
        reader.missing("linear_attn_config.full_attn_layers", "list of 1-based layers")
    else:
        _note(reader, "attention", "layer_types")
    return named or ()


def mlp_kinds(reader: Reader, layers: int) -> tuple[str, ...]:
    """``dense`` or ``moe`` for each layer, from ``mlp_layer_types`` or ``first_k_dense_replace``."""
    named = _named(reader, "mlp_layer_types", MLP_TYPES, layers)
    first, every = reader.at("first_k_dense_replace"), reader.at("moe_layer_freq")
    if first is None:
        if named is None:
            reader.missing("first_k_dense_replace", "a whole number")
        _note(reader, "mlp", "mlp_layer_types")
        return named or ()
    step = every.value if every and reader.check(every, "moe_layer_freq", int, 1) else 1
    if not reader.check(first, "first_k_dense_replace", int, 0):
        return ()
    _note(reader, "mlp", "first_k_dense_replace")
    counted = tuple("moe" if i >= first.value and i % step == 0 else "dense" for i in range(layers))
    _agree(reader, "mlp_layer_types", named, counted)
    return counted


def _note(reader: Reader, field: str, key: str) -> None:
    item = reader.at(key)
    reader.origins[field] = item.origin if item else Origin("config")


def _named(reader: Reader, key: str, names: dict[str, str], layers: int) -> tuple[str, ...] | None:
    item = reader.at(key)
    if item is None or not reader.check(item, key, list):
        return None
    known = " or ".join(names)
    for number, entry in enumerate(item.value):
        if not isinstance(entry.value, str) or entry.value not in names:
            reader.problems.append(entry.problem(f"`{key}[{number}]` is {entry.value!r}", f"write {known}"))
    if len(item.value) != layers:
        said = f"`{key}` has {len(item.value)} entries, but `num_hidden_layers` is {layers}"
        reader.problems.append(item.problem(said, f"give {layers} entries", at_key=True))
        return None
    return tuple(names.get(str(entry.value), "") for entry in item.value)


def _listed(reader: Reader, lists: dict[str, str], layers: int) -> tuple[str, ...]:
    kinds = [""] * layers
    for kind, key in lists.items():
        item = reader.at(key)
        if item is None:
            reader.missing(key, "list of 1-based layers")
            return ()
        if not reader.check(item, key, list):
            return ()
        _note(reader, "attention", key)
        for entry in item.value:
            _place(reader, kinds, kind, key, entry)
    absent = [number + 1 for number, kind in enumerate(kinds) if not kind]
    if absent:
        said = f"layers {_ranges(absent)} (1-based) are in neither `kda_layers` nor `full_attn_layers`"
        where = reader.at("linear_attn_config") or reader.text
        reader.problems.append(where.problem(said, "list each layer once", at_key=True))
    return tuple(kinds)


def _place(reader: Reader, kinds: list[str], kind: str, key: str, entry: Item) -> None:
    """Give layer ``entry`` the kind, unless it is out of range or taken."""
    short = key.rpartition(".")[2]
    whole = isinstance(entry.value, int) and not isinstance(entry.value, bool)
    if not whole or not 1 <= entry.value <= len(kinds):
        said = f"`{short}` lists layer {entry.value!r}; layers are 1 to {len(kinds)} (1-based)"
        reader.problems.append(entry.problem(said, "delete it or correct `num_hidden_layers`"))
    elif kinds[entry.value - 1]:
        said = f"layer {entry.value} (1-based) is listed twice"
        reader.problems.append(entry.problem(said, "list each layer once"))
    else:
        kinds[entry.value - 1] = kind


def _agree(reader: Reader, key: str, named: tuple[str, ...] | None, other: tuple[str, ...]) -> None:
    item = reader.at(key)
    if named is None or item is None or named == other or not other:
        return
    layer = next(i for i, (a, b) in enumerate(zip(named, other, strict=True)) if a != b)
    said = f"`{key}` makes layer {layer} {named[layer]}, the other fields make it {other[layer] or 'nothing'}"
    reader.problems.append(item.value[layer].problem(said, f"correct or delete `{key}`"))


def _ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1-3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
