from __future__ import annotations

import io
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

import click
import pytest

from kvdeploy import __version__, errors
from kvdeploy.cli.app import COMMANDS, App, main
from kvdeploy.proc import Command, LocalRunner
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path


def run(tmp_path: Path, *argv: str) -> int:
    return main(argv, app=App(ui=Ui(err=io.StringIO()), root=tmp_path))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_its_help_is_the_tables(name: str) -> None:
    command = getattr(import_module(f"kvdeploy.cli.{name}"), name)
    assert isinstance(command, click.Command)
    assert (command.name, command.help) == (name, COMMANDS[name])


def test_help_lists_every_command_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, text in COMMANDS.items():
        assert f"{name} {text}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_own_help_shows_its_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, name, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: kvdeploy {name} ")
    assert COMMANDS[name] in " ".join(out.split())


def test_the_exit_codes_in_the_help_are_those_of_the_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--help")
    out = " ".join(capsys.readouterr().out.split())
    listed = out.partition("Exit codes: ")[2].partition(".")[0]
    shown = {int(code) for code in re.findall(r"(\d+) [a-z]", listed)}
    raised = {cls.exit_code for cls in errors.KvdeployError.__subclasses__()}
    assert shown == {0, 1, 2, 130} | raised


def test_the_version_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--version") == 0
    assert capsys.readouterr().out == f"kvdeploy, version {__version__}\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stats", "No such command 'stats'. Did you mean 'status'?"),
        ("deploy", "No such command 'deploy'."),
    ],
)
def test_an_unknown_command_is_wrong_usage_and_a_near_miss_is_named(
    word: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, word) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == f"Error: {said}"


def test_an_unknown_option_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "down", "--now") == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.real_process
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["stats"]], ids=str)
def test_help_does_not_wait_for_heavy_libraries(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from kvdeploy.cli.app import main\n"
        f"main({argv!r})\n"
        "heavy = {'pydantic', 'aiohttp', 'rich', 'yaml', 'boto3', 'psutil'} & sys.modules.keys()\n"
        "print('heavy:', sorted(heavy))\n"
    )
    outcome = LocalRunner().run(Command(argv=(sys.executable, "-c", code), timeout_s=60))
    assert outcome.stdout.splitlines()[-1] == "heavy: []", outcome.stderr


@pytest.mark.real_process
def test_the_package_can_be_run() -> None:
    argv = (sys.executable, "-m", "kvdeploy", "stats")
    assert LocalRunner().run(Command(argv=argv, timeout_s=60)).code == 2


def test_an_interrupt_says_what_may_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is being done: here, reading the cluster file."""
    err = io.StringIO()
    reads = import_module("kvdeploy.cli.check")

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reads, "load", interrupted)
    assert main(["check"], app=App(ui=Ui(err=err), root=tmp_path)) == 130
    assert err.getvalue() == (
        "interrupted: 'kvdeploy status' shows what still runs, 'kvdeploy down' ends it\n"
    )


def test_a_bug_of_ours_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    said = io.StringIO()
    app = App(ui=Ui(err=said), root=cast("Path", None))
    assert main(["check"], app=app) == 1
    assert said.getvalue() == (
        f"this is a bug in kvdeploy {__version__}: please report it with the lines above\n"
    )
    assert "Traceback" in capsys.readouterr().err
