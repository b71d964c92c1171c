"""What the documents promise exists: make targets, commands with their options, files and links."""
from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ops_*/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")

written = pytest.mark.skipif(not README.strip(), reason="README.md is still empty")


def shell_lines(text: str) -> Iterator[str]:
    """Commands of the shell blocks, continuation lines joined, without prompt and comment."""
    for block in re.findall(r"^```(?:sh|bash|console|shell)\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*", "", line.strip().removeprefix("$ "))
            if command:
                yield command


def commands(text: str, program: str) -> list[str]:
    """Calls of ``program`` in shell blocks and in inline code."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = [*shell_lines(text), *inline]
    return [c for c in found if re.match(rf"(\S*/)?{program} [a-z]", c)]


@written
@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_begins_with_how_to_run_it(command: str) -> None:
    assert command in "\n".join(README.splitlines()[:25])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for command in commands(document.read_text(encoding="utf-8"), "make"):
        words = [w for w in shlex.split(command)[1:] if "=" not in w and not w.startswith("-")]
        assert set(words) <= targets, f"`{command}`: the Makefile has {sorted(targets)}"


@pytest.mark.skipif(importlib.util.find_spec("k3plan.cli") is None, reason="k3plan.cli does not exist yet")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_k3plan_commands_exist(document: Path) -> None:
    typer = importlib.import_module("typer")
    root = typer.main.get_command(importlib.import_module("k3plan.cli").app)
    for line in commands(document.read_text(encoding="utf-8"), "k3plan"):
        words = shlex.split(re.split(r"\s[|>&;]", line)[0])[1:]
        # behind a bare -- stands another command
        words = words[: words.index("--")] if "--" in words else words
        command = root
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"`{line}`: known are {sorted(command.commands)}"
            command = command.commands[words.pop(0)]
        options = {name for param in command.params for name in [*param.opts, *param.secondary_opts]}
        options.add("--help")
        asked = {word.split("=")[0] for word in words if word.startswith("--")}
        assert asked <= options, f"`{line}`: {command.name} knows {sorted(options)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_resolve(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [link for link in links if "://" not in link and not link.startswith("mailto:")
              and not (document.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_that_commands_use_exist(document: Path) -> None:
    used = {word for line in shell_lines(document.read_text(encoding="utf-8")) for word in shlex.split(line)
            if word.startswith("examples/")}
    missing = [word for word in used if not (ROOT / word).exists()]
    assert not missing
