"""A plan file to ``Spec``, the first boundary. Collects every problem before it raises; knows no graph."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..errors import Origin, Problem, SpecError
from ..spec import Choices, Numerics, Parallel, Spec, Step


def load_spec(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Spec:
    """Read a plan file and ``--set`` overrides (``"step.query=4"``, applied in order).

    Raises ``SpecError`` with every problem of the plan, of the flags and of the model's config.
    """
    from .plan_reader import read_plan
    from .plan_values import find_values

    problems: list[Problem] = []
    root = read_plan(path, [overrides] if isinstance(overrides, str) else overrides, problems)
    if root is None:
        raise SpecError(problems)
    values, origins = find_values(root, problems)
    model = None
    if values.get("model.preset") or values.get("model.config"):
        model, model_origins = _load_model(root, values, problems)
        origins |= model_origins
    if model is not None:
        _check_against_model(root, values, model, problems)
    if problems or model is None:
        raise SpecError(_in_order(problems))
    return Spec(
        model=model,
        layers=tuple(values["model.layers"] or range(model.layers)),
        parallel=_section(Parallel, values, "parallel"),
        step=_section(Step, values, "step"),
        gpu=values["target.gpu"],
        numerics=_section(Numerics, values, "numerics"),
        profile=values["profile"],
        choices=_section(Choices, values, "choices"),
        buckets=tuple(values["capture.buckets"]),
        origins=origins,
    )


def _section(kind: Any, values: dict[str, Any], name: str) -> Any:
    """A frozen section of ``Spec`` from the values under ``name``; lists become tuples, whole scales floats."""
    convert = {"float": float, "tuple[str, ...]": tuple}
    found = {
        field.name: convert.get(str(field.type), lambda value: value)(values[f"{name}.{field.name}"])
        for field in fields(kind)
    }
    return kind(**found)


def _load_model(root: Any, values: dict[str, Any], problems: list[Problem]) -> tuple[Any, dict[str, Origin]]:
    """The model that the plan names, and origins of its fields as ``model.hidden`` and so on."""
    from .hf_config import read_model
    from .plan_reader import read_config
    from .planfile import FOLDER

    if preset := values.get("model.preset"):
        asked, _ = root.find(("model", "preset"))
        label = f"presets/{preset}.json"
        item = read_config(str(FOLDER / label), label, "preset", asked, problems)
    else:
        asked, _ = root.find(("model", "config"))
        path = os.path.normpath(os.path.join(asked.source.folder, values["model.config"]))
        if os.path.isdir(path):
            path = os.path.join(path, "config.json")
        item = read_config(path, path, "config", asked, problems)
    if item is None:
        return None, {}
    try:
        model, origins = read_model(item)
    except SpecError as error:
        problems += error.problems
        return None, {}
    return model, {f"model.{name}": origin for name, origin in origins.items()}


def _check_against_model(root: Any, values: dict[str, Any], model: Any, problems: list[Problem]) -> None:
    """Plan values that the model limits: the listed layers and the context."""
    for index, layer in enumerate(values.get("model.layers") or []):
        if layer >= model.layers:
            item, _ = root.find(("model", "layers", index))
            said = f"`model.layers` lists layer {layer}, but the model has layers 0 to {model.layers - 1}"
            problems.append(item.problem(said, f"list layers from 0 to {model.layers - 1}"))
    context = values.get("step.context")
    if context and model.max_positions and context > model.max_positions:
        item, depth = root.find(("step", "context"))
        said = f"`step.context` is {context}, but the model was made for {model.max_positions} tokens"
        problems.append(item.problem(said, f"write `context: {model.max_positions}` or less", at_key=depth < 2))


def _in_order(problems: list[Problem]) -> list[Problem]:
    """Once each, by file and place; flags last, by number."""
    unique = {(problem.message, problem.where): problem for problem in problems}.values()
    files = list(dict.fromkeys(problem.where.file for problem in problems))

    def place(problem: Problem) -> tuple[int, ...]:
        where = problem.where
        if where.kind == "flag":
            return (1, int(where.file.rpartition("#")[2]), where.column)
        return (0, files.index(where.file), where.line, where.column)

    return sorted(unique, key=place)


def show_resolved(spec: Spec) -> str:
    """Every value of the spec with its origin, one a line: ``step.query  1  default``."""
    rows = [(name, _shown_value(spec, name), str(origin)) for name, origin in spec.origins.items()]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{wide[0]}}  {value:<{wide[1]}}  {origin}".rstrip() for name, value, origin in rows)


def _shown_value(spec: Spec, name: str) -> str:
    """The resolved value of one origin's field, shortened for a table."""
    model_file = spec.origins["model.family"].file
    special: dict[str, Any] = {
        "version": 1, "model.preset": os.path.basename(model_file).removesuffix(".json"),
        "model.config": model_file, "target.gpu": spec.gpu, "profile": spec.profile,
        "capture.buckets": spec.buckets, "model.layers": spec.layers,
    }
    section, _, field = name.rpartition(".")
    value = special[name] if name in special else getattr(getattr(spec, section), field)
    if name in ("model.attention", "model.mlp"):
        return ", ".join(f"{value.count(kind)} {kind}" for kind in dict.fromkeys(value))
    if name == "model.layers" and value == tuple(range(spec.model.layers)):
        return f"all {len(value)}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)
