from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters import specfile
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.store import Store, write_text
from kvdeploy.cli.app import App, main
from kvdeploy.model.launch import ProcessState
from kvdeploy.model.record import Record
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path

ALLOWED = ("memory-too-little", "cores-shared", "libnuma-missing", "platform-unsupported")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program can be found, and the cache is empty."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("KVDEPLOY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    port = next(machine.free_ports(39100))
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"name: demo\nrouter: {{port: {port}}}\nruntime: {{python: {sys.executable}}}\n"
    )
    return path


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    allowed = [word for name in ALLOWED for word in ("--allow", name)]
    code = main(("plan", *allowed, *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


def test_a_cluster_that_does_not_run_is_all_to_be_started(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--set", "fleet.decode.count=2") == (0, "")
    assert capsys.readouterr().out == (
        f"demo on local, from {path}\nstart: prefill-0, decode-0, decode-1, router\n"
    )
    assert not Store(tmp_path, "demo").dir.exists()


def test_the_same_as_json(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--json") == (0, "")
    assert json.loads(capsys.readouterr().out) == {
        "cluster": "demo",
        "target": "local",
        "changes": [],
        "start": ["prefill-0", "decode-0", "router"],
        "stop": [],
        "running": [],
    }


def test_what_cannot_be_brought_up_is_not_planned(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(tmp_path, "--set", "model.id=builtin:tinny")
    assert (code, said) == (
        4,
        "error: model.id: builtin:tinny is not a built-in model [builtin-model-unknown]\n"
        "    Did you mean builtin:tiny?\n"
        f"1 problem with {path}\n"
        "  try: Change it; or, if you know better, go on with --allow builtin-model-unknown\n",
    )
    assert capsys.readouterr().out == ""


# --- a cluster that runs ---------------------------------------------------------------------
@pytest.fixture
def running(path: Path, tmp_path: Path) -> Store:
    """A cluster of one prefill, two decodes and a router, brought up with `path` as it is.

    What lives is this test's own session: `plan` looks at it and never touches it.
    """
    store = Store(tmp_path, "demo")
    for name in ("prefill-0", "decode-0", "decode-1", "router"):
        state = ProcessState(
            name=name, phase="ready", digest="d", supervisor_pid=1, pid=os.getsid(0)
        )
        write_text(store.processes / name / "launch.json", "{}")
        write_text(store.processes / name / "state.json", state.model_dump_json())
    spec = specfile.load(path, overlays=("fleet.decode.count=2",)).spec
    store.write(Record(cluster="demo", spec=spec))
    return store


def test_a_cluster_that_runs_as_asked_has_nothing_to_do(
    running: Store, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--set", "fleet.decode.count=2") == (0, "")
    assert capsys.readouterr().out == f"demo on local, from {path}\nnothing to do\n"


def test_changed_fields_are_shown_with_what_they_do(
    running: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--set", "fleet.prefill.count=2", "--set", "router.policy=round-robin")
    assert run(tmp_path, *argv) == (0, "")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "field now wanted does",
        "fleet.prefill.count 1 2 restart engines",
        "fleet.decode.count 2 1 restart engines",
        "router.policy least-loaded round-robin reload",
        "start: prefill-1",
        "stop: decode-1",
    ]


def test_changes_as_json(
    running: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json") == (0, "")
    assert json.loads(capsys.readouterr().out) == {
        "cluster": "demo",
        "target": "local",
        "changes": [
            {"path": "fleet.decode.count", "was": "2", "wanted": "1", "does": "restart engines"}
        ],
        "start": [],
        "stop": ["decode-1"],
        "running": ["decode-0", "decode-1", "prefill-0", "router"],
    }
