"""The house rules of the source tree: who may import whom, how long things may be, what is declared where.

A number here is a budget. Raising one is a one-line change with its reason in the commit.
"""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from k3plan.compiler.knobs import KNOBS, PREFIX

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"k3plan": "k3plan"} | {f"k3plan.{f}": f for f in ("compiler", "ops_triton", "ops_cute", "graphs")}

# 6,000 at first: positions, carets and did-you-mean for every value of a plan file took 1,600 of it; transports,
# streams and buckets, which several ranks and several sizes of a step need, 400 more; what a launch may read before it
# waits, proved for every launch of a plan, 100; a word and a fix for what callers from Python pass by mistake, 90;
# kernels of a capture compiled in processes, 20; less 345 that went with the tuner into a room of its own; prices of a
# GPU that nobody timed, scaled by what the kernels took on another one, 55
COMPILER_AND_GRAPHS_LINES = 10000
# rooms beside the pipeline, each with its own budget: one can leave them all out and still compile, bind and run
ROOM_LINES = {"graphs/debug": 4500, "graphs/module": 1500, "graphs/distributed": 1200, "graphs/tuner": 640}
STAGE_FILE_LINES = 300
KERNEL_FILE_LINES = 600
FUNCTION_LINES = 60
ENVIRONMENT_FLAGS = 12

# package: the packages of ours that it may import from
MAY_IMPORT = {
    "k3plan.compiler": {"k3plan.compiler"},
    "k3plan.ops_triton": {"k3plan.compiler", "k3plan.ops_triton"},
    "k3plan.ops_cute": {"k3plan.compiler", "k3plan.ops_cute"},
    "k3plan.graphs": {"k3plan.compiler", "k3plan.graphs"},
    "k3plan": set(FOLDERS),
}


@dataclass(frozen=True)
class Import:
    name: str  # absolute; for `from a import b` it is "a.b"
    line: int
    for_types: bool  # below `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Source:
    path: Path
    package: str  # key of FOLDERS
    module: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"

    def imports(self) -> Iterator[Import]:
        base = self.module.split(".")
        if self.path.name != "__init__.py":
            base = base[:-1]
        never_run = {
            inner
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(self.tree):
            start = ""
            if isinstance(node, ast.ImportFrom):
                above = base[: len(base) - node.level + 1] if node.level else []
                start = ".".join([*above, *([node.module] if node.module else []), ""])
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from (Import(start + a.name, node.lineno, node in never_run) for a in node.names)


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *(p for p in parts if p != "__init__")])
            text = path.read_text(encoding="utf-8")
            found.append(Source(path, package, module, text, ast.parse(text, str(path))))
    return tuple(found)


def of(*packages: str) -> list[Source]:
    return [source for source in sources() if source.package in packages]


def owner(name: str) -> str | None:
    """The package of ours that an absolute import names, or None."""
    by_length = sorted(FOLDERS, key=len, reverse=True)
    return next((package for package in by_length if f"{name}.".startswith(f"{package}.")), None)


def top(name: str) -> str:
    return name.split(".")[0]


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their name alone; two of one name are one module."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"two files of tests are called {twice}"


def test_imports_follow_the_arrows() -> None:
    wrong = [
        f"{source.at(found.line)}: {source.package} imports {found.name}"
        for source in sources()
        for found in source.imports()
        if (target := owner(found.name)) and target not in MAY_IMPORT[source.package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("library", "home"), [("triton", "k3plan.ops_triton"), ("cutlass", "k3plan.ops_cute")]
)
def test_kernel_language_stays_in_its_folder(library: str, home: str) -> None:
    wrong = [
        source.at(found.line)
        for source in sources()
        for found in source.imports()
        if top(found.name) == library and (source.package != home or source.path.name == "kernels.py")
    ]
    assert not wrong, f"{library} is imported outside {home}, or in its menu: {wrong}"


def test_compiler_needs_torch_only_for_the_meaning_of_ops() -> None:
    wrong = [
        source.at(found.line)
        for source in of("k3plan.compiler")
        for found in source.imports()
        if top(found.name) == "torch" and not found.for_types
        and not source.module.startswith("k3plan.compiler.ops")
    ]
    assert not wrong, f"torch in the compiler, outside compiler/ops: {wrong}"


def test_compiler_menus_and_command_line_start_without_heavy_libraries() -> None:
    modules = [s.module for s in of("k3plan.compiler") if not s.module.startswith("k3plan.compiler.ops.")]
    modules += [s.module for s in sources() if s.path.name in ("kernels.py", "cli.py")]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'triton', 'cutlass', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} brings {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_compiler_and_graphs_stay_small() -> None:
    total = sum(source.lines for source in of("k3plan.compiler", "k3plan.graphs") if not room(source))
    assert total <= COMPILER_AND_GRAPHS_LINES


def room(source: Source) -> str | None:
    """The room of ROOM_LINES that a file is in."""
    return next((name for name in ROOM_LINES if source.path.is_relative_to(ROOT / name)), None)


@pytest.mark.parametrize("name", ROOM_LINES)
def test_rooms_beside_the_pipeline_stay_small(name: str) -> None:
    assert sum(source.lines for source in sources() if room(source) == name) <= ROOM_LINES[name]


def test_the_pipeline_does_not_need_the_rooms() -> None:
    wrong = [
        f"{source.at(found.line)}: imports {found.name}"
        for source in of("k3plan.compiler", "k3plan.graphs") if not room(source)
        for found in source.imports()
        if any(f"{found.name}.".startswith(f"k3plan.{name.replace('/', '.')}.") for name in ROOM_LINES)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_fit_their_budget() -> None:
    long = []
    for source in sources():
        budget = KERNEL_FILE_LINES if source.package.startswith("k3plan.ops_") else STAGE_FILE_LINES
        if source.lines > budget:
            long.append(f"{source.at(1)}: {source.lines} lines, budget {budget}")
    assert not long, "\n".join(long)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Device code: decorated by @triton.jit, @cute.jit, @cute.kernel and the like."""
    return any(re.search(r"\b(jit|kernel)\b", ast.unparse(d)) for d in function.decorator_list)


def test_functions_fit_on_a_screen() -> None:
    long = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    long.append(f"{source.at(node.lineno)}: {node.name}, {length} lines")
    assert not long, "\n".join(long)


def test_environment_is_read_in_knobs_only() -> None:
    wrong = []
    for source in sources():
        if source.module == "k3plan.compiler.knobs":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                wrong.append(source.at(node.lineno))
        wrong += [source.at(i.line) for i in source.imports() if i.name in ("os.environ", "os.getenv")]
    assert not wrong, f"declare a knob in compiler/knobs.py instead: {wrong}"


def test_environment_flags_are_few_and_declared() -> None:
    names = [knob.name for knob in KNOBS]
    assert len(names) == len(set(names)) <= ENVIRONMENT_FLAGS
    assert all(name.startswith(PREFIX) for name in names)
    assert all(knob.meaning for knob in KNOBS)
    readers = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(source.path for source in sources())]
    mentioned = {
        name: path.relative_to(ROOT)
        for path in readers
        for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    undeclared = {name: str(path) for name, path in mentioned.items() if name not in names}
    assert not undeclared, f"mentioned and not declared in compiler/knobs.py: {undeclared}"


def is_error(node: ast.ClassDef) -> bool:
    """Named or derived from an error. Another subclass of ``Exception`` is a signal between our functions."""
    return any(name.endswith(("Error", "Warning")) for name in [node.name, *map(ast.unparse, node.bases)])


def test_error_classes_live_in_errors_py() -> None:
    wrong = [
        f"{source.at(node.lineno)}: {node.name}"
        for source in sources()
        if source.module != "k3plan.compiler.errors"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and is_error(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_says_what_it_is_for() -> None:
    silent = [s.at(1) for s in sources() if s.text.strip() and not ast.get_docstring(s.tree)]
    assert not silent, f"no module docstring: {silent}"


def test_package_list_equals_the_tree() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    tree = {
        ".".join([package, *path.relative_to(ROOT / folder).parts]): path.relative_to(ROOT).as_posix()
        for package, folder in FOLDERS.items()
        for path in {file.parent for file in (ROOT / folder).rglob("*.py")}
    }
    assert setup["package-dir"] == tree
    assert sorted(setup["packages"]) == sorted(tree)
    without = [folder for folder in tree.values() if not (ROOT / folder / "__init__.py").is_file()]
    assert not without, f"no __init__.py in {without}"


@pytest.mark.parametrize("folder", [f for p, f in FOLDERS.items() if p != "k3plan"])
def test_folder_refuses_to_be_imported_under_another_name(folder: str) -> None:
    run = [sys.executable, "-c", f"import {folder}"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert f"import it as k3plan.{folder}" in done.stderr


# letters in brackets, so that this file does not contain what it looks for
FORBIDDEN = [
    r"(?<![\w.])/w[o]rk/",
    r"\.\./sh[a]red\b",
    r"py[p]i\.org",
    r"pyth[o]nhosted",
    r"download\.pyt[o]rch\.org",
    r"--(extra-)?ind[e]x-url",
    r"--find-l[i]nks",
]


def test_files_name_no_private_path_and_no_registry_host() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    wrong = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            wrong += [f"{name}:{number}: {line.strip()}" for word in FORBIDDEN if re.search(word, line)]
    assert not wrong, "\n".join(wrong)
