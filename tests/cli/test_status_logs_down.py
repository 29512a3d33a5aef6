from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.store import Store, write_text
from kvdeploy.cli.app import App, main
from kvdeploy.cli.tail import Tail
from kvdeploy.model.launch import LaunchSpec, ProcessState, Readiness
from kvdeploy.model.record import Record, StageRecord
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(argv, app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of a cluster whose two processes ended some time ago."""
    store = Store(tmp_path, "local")
    for name, said in (("decode-0", "one\ntwo\nthree\n"), ("router", "ready\n")):
        folder = store.processes / name
        spec = LaunchSpec(
            name=name,
            role="router" if name == "router" else "decode",
            argv=("x",),
            ports=(18101, 18601),
            ready=Readiness(url="http://127.0.0.1:1/health", timeout_s=1),
        )
        state = ProcessState(
            name=name, phase="failed", digest="d", supervisor_pid=1, restarts=2, reason="ended (1)"
        )
        write_text(folder / "launch.json", spec.model_dump_json())
        write_text(folder / "state.json", state.model_dump_json())
        write_text(folder / "log", said)
        write_text(folder / "supervisor.log", f"{name}: started\n")
    known = {n: StageRecord(digest="d", result={}) for n in ("runtime", "model")}
    store.write(Record(cluster="local", stages=known))
    return store


# --- nothing is up ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "out", "err"),
    [
        (("status",), "local: nothing runs\n", ""),
        (("status", "--name", "demo"), "demo: nothing runs\n", ""),
        (("down",), "down: local: nothing runs, nothing is left\n", ""),
        (("logs",), "", "local: nothing runs; earlier logs are in {root}/.kvdeploy/local/runs\n"),
        (
            ("logs", "anything"),
            "",
            "local: nothing runs; earlier logs are in {root}/.kvdeploy/local/runs\n",
        ),
    ],
)
def test_when_nothing_is_up_everybody_says_so_and_nothing_is_made(
    argv: tuple[str, ...], out: str, err: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *argv) == (0, "")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (out, err.format(root=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_nothing_up_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "status", "--json")[0] == 0
    assert json.loads(capsys.readouterr().out) == {
        "cluster": "local",
        "url": None,
        "whole": False,
        "processes": [],
        "pairs": {},
    }
    assert run(tmp_path, "down", "--json")[0] == 0
    assert json.loads(capsys.readouterr().out) == {"cluster": "local", "stopped": [], "left": []}


def test_what_is_not_up_cannot_be_proven(tmp_path: Path) -> None:
    assert run(tmp_path, "smoke") == (
        9,
        "error: cluster 'local' is not up: there is nothing to prove\n"
        "  try: Run 'kvdeploy up' first.\n",
    )


# --- which cluster ---------------------------------------------------------------------------
def test_the_cluster_is_the_files_although_the_file_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text("name: mine\nrouter: {prot: 1}\n")
    assert run(tmp_path, "status")[0] == 0
    assert capsys.readouterr().out == "mine: nothing runs\n"


def test_among_several_clusters_one_must_be_chosen(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path, "demo").processes.mkdir(parents=True)
    assert run(tmp_path, "status")[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "Error: There are several clusters here: demo, local. Choose one with --name."
    )


# --- a fleet that ended ----------------------------------------------------------------------
def test_a_sick_fleet_is_shown_with_its_reasons_and_its_own_exit_code(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "status") == (9, "")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "local: no router yet"
    cells = [line.split() for line in out[2:]]
    assert cells == [
        ["decode-0", "failed", "18101", "18601", "2", "0.0", "ended", "(1)"],
        ["router", "failed", "18101", "18601", "2", "0.0", "ended", "(1)"],
    ]


def test_a_sick_fleet_as_json(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "status", "--json")[0] == 9
    document = json.loads(capsys.readouterr().out)
    assert (document["whole"], document["url"], document["pairs"]) == (False, None, {})
    assert document["processes"][0] == {
        "name": "decode-0",
        "phase": "failed",
        "pid": None,
        "ports": [18101, 18601],
        "cpus": [],
        "restarts": 2,
        "up_s": None,
        "memory_gib": 0.0,
        "reason": "ended (1)",
        "log": str(store.processes / "decode-0" / "log"),
    }


def test_down_forgets_the_processes_and_keeps_what_was_built(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(tmp_path, "down")
    assert code == 0
    assert said.startswith("-> stop decode-0, router\nok stop decode-0, router (")
    out = capsys.readouterr().out
    assert out == "down: local: stopped decode-0, router; nothing is left\n"
    assert not store.exists()
    assert set(store.read().stages) == {"runtime", "model"}
    assert run(tmp_path, "down") == (0, "")
    assert capsys.readouterr().out == "down: local: nothing runs, nothing is left\n"


def test_down_works_although_the_record_is_damaged(store: Store, tmp_path: Path) -> None:
    write_text(store.dir / "record.json", "{")
    assert run(tmp_path, "down")[0] == 0
    assert not store.exists()


def test_status_says_that_the_record_is_damaged(store: Store, tmp_path: Path) -> None:
    write_text(store.dir / "record.json", "{")
    code, said = run(tmp_path, "status")
    assert code == 13
    assert said.startswith(f"error: {store.dir / 'record.json'}: the record is damaged\n")


def test_down_does_not_disturb_a_run_that_holds_the_cluster(store: Store, tmp_path: Path) -> None:
    with store.locked("up"):
        assert run(tmp_path, "down")[0] == 12
    assert store.exists()


# --- logs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "out"),
    [
        (("decode-0",), "one\ntwo\nthree\n"),
        (("decode-0", "-n", "1"), "three\n"),
        (("decode-0", "-n", "0"), ""),
        (("decode-0", "--supervisor"), "decode-0: started\n"),
        (("-n", "1"), "decode-0 | three\nrouter | ready\n"),
    ],
)
def test_what_was_said_is_shown(
    argv: tuple[str, ...],
    out: str,
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, "logs", *argv) == (0, "")
    assert capsys.readouterr().out == out


def test_logs_of_a_name_that_is_none_is_wrong_usage(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "logs", "decode-7")[0] == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == (
        "Error: no process 'decode-7' in cluster 'local': there are decode-0, router"
    )


def test_a_growing_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nhal")
    tail = Tail("x", path)
    assert tail.last(1) == ["two"]
    assert tail.new() == []
    with path.open("a") as f:
        f.write("f\nthree\n")
    assert tail.new() == ["half", "three"]
    assert tail.new() == []


def test_a_letter_that_is_cut_in_two_is_put_together(tmp_path: Path) -> None:
    path, letter = tmp_path / "log", "ü\n".encode()
    path.write_bytes(letter[:1])
    tail = Tail("x", path)
    assert tail.new() == []
    path.write_bytes(letter)
    assert tail.new() == ["ü"]


def test_a_file_that_replaces_another_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a long line of the first start\n")
    tail = Tail("x", path)
    tail.new()
    path.replace(tmp_path / "log.1")
    assert tail.new() == []
    path.write_text("a line of the second start that is longer than all that was before\n")
    assert path.stat().st_ino != (tmp_path / "log.1").stat().st_ino
    assert tail.new() == ["a line of the second start that is longer than all that was before"]


def test_a_file_that_was_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    tail = Tail("x", path)
    tail.new()
    with path.open("r+") as f:
        f.truncate(0)
        f.write("new\n")
    assert tail.new() == ["new"]


def test_a_file_that_is_yet_to_come_says_nothing(tmp_path: Path) -> None:
    tail = Tail("x", tmp_path / "log")
    assert tail.last(10) == []
    (tmp_path / "log").write_text("first\n")
    assert tail.new() == ["first"]
