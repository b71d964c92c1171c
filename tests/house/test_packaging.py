"""The sdist and the wheel hold every module and data file, and a wheel built from the sdist runs by itself.

An editable install cannot show this: it reads the source tree, so a sub-package that the list in
pyproject.toml lacks is missing for users only.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"k3plan": "k3plan", **{f: f"k3plan/{f}" for f in ("compiler", "ops_triton", "ops_cute", "graphs")}}


def build(kind: str, tree: Path, out: Path) -> Path:
    """Calls the build backend in this environment: no network, no isolation."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, text=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in the tree, and other tests read the tree."""
    here = tmp_path_factory.mktemp("sdist")
    tree = here / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return build("sdist", tree, here / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, here)
    (tree,) = here.iterdir()
    return build("wheel", tree, here / "out")


def expected() -> set[str]:
    """What users need: modules, and the data beside them. Markdown is for readers of the source."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".md", ".pyc")
    }


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == expected()


def test_wheel_carries_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name]
        commands = next(archive.read(name).decode() for name in archive.namelist() if "entry_points" in name)
    assert "licenses/LICENSE" in names
    assert "k3plan = k3plan.cli:main" in commands


def test_wheel_imports_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = [f"k3plan.{f}" for f in FOLDERS if f != "k3plan"]
    modules += [
        name.removesuffix(".py").replace("/", ".")
        for name in sorted(expected())
        if name.startswith("k3plan/compiler/") and name.endswith(".py") and "__init__" not in name
    ]
    code = (
        "import importlib, pathlib\n"
        f"for name in {modules!r}:\n"
        "    found = pathlib.Path(importlib.import_module(name).__file__)\n"
        f"    assert found.is_relative_to({str(tmp_path)!r}), found\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
