from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters import specfile
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.store import Store, write_text
from kvdeploy.cli.app import App, main
from kvdeploy.model.bench import BenchReport, Cell, Moved, Run, Sample
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


def planned(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """What was shown, spaces squeezed: what would be done, and what is expected."""
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index("expected figure from")
    return lines[:at], lines[at + 1 :]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The document, without what is expected."""
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert next(e["name"] for e in shown.pop("expected")) == "KV of a token"
    return shown


def test_a_cluster_that_does_not_run_is_all_to_be_started(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--set", "fleet.decode.count=2") == (0, "")
    done, _ = planned(capsys)
    assert done == [
        f"demo on local, from {path}",
        "start: prefill-0, decode-0, decode-1, router",
    ]
    assert not Store(tmp_path, "demo").dir.exists()


def test_the_same_as_json(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--json") == (0, "")
    assert document(capsys) == {
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


# --- what is expected ------------------------------------------------------------------------
def test_what_is_expected_is_told_with_its_formula(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """builtin:tiny is not made for that."""
    assert run(tmp_path, "--set", "fleet.decode.count=2") == (0, "")
    _, expected = planned(capsys)
    assert expected == [
        "KV of a token 4 KiB 4 layers x 2 x 2 KV heads x 64 numbers x 4 bytes",
        "KV of the longest prompt 8.0 MiB model.max_length 2048 x 4 KiB",
        "transfer of the longest prompt not known 'kvdeploy bench' measures what this machine's "
        "fabric does",
        "longest requests at once 64 0.25 GiB / 4 KiB = 65536 tokens, / model.max_length 2048, "
        "x 2 decode",
        "prefill engines to decode engines not known 'kvdeploy bench' measures how long each is "
        "busy with a request",
    ]
    assert not (tmp_path / "cache").exists()


def test_the_last_bench_of_the_cluster_and_its_model_is_used_if_it_can_be_read(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Store(tmp_path, "demo").runs
    for stamp, text in (
        ("20261201T000000", bench_report("an hour ago").model_dump_json()),
        ("20261201T010000", bench_report("now").model_dump_json()),
        ("20261201T020000", "{"),
        ("20261201T030000", bench_report("later", "org/other").model_dump_json()),
    ):
        write_text(runs / f"{stamp}-bench" / "reports" / "bench.json", text)
    assert run(tmp_path) == (0, "")
    _, expected = planned(capsys)
    assert expected[2] == (
        "transfer of the longest prompt 80 ms 8.0 MiB / 100 MiB/s, bytes over transfer time in the "
        "bench of now, where each also waited for its engine's next step"
    )
    assert expected[4] == (
        "prefill engines to decode engines 2.0 : 1 TTFT alone 60.0 ms / (TPOT 12.0 ms x 10 "
        "tokens / 4 at once), of 512 tokens in and 11 out, in the bench of now; of CPUs, and "
        "nothing about GPUs"
    )


def bench_report(started_at: str, model: str = "builtin:tiny") -> BenchReport:
    runs = []
    for clients, ttft_s, gap_s in ((1, 0.06, 0.001), (4, 0.5, 0.012)):
        cell = Cell(scenario="unique", input_tokens=512, output_tokens=11, concurrency=clients)
        sample = Sample(ttft_s=ttft_s, gaps_s=(gap_s,) * 10, output_tokens=11)
        moved = Moved(kv_bytes=50 * 2**20, transfers=5, transfer_s=0.5)
        runs.append(
            Run(mode="push", cell=cell, round=1, seconds=1, samples=(sample,) * 5, moved=moved)
        )
    return BenchReport(
        cluster="demo",
        target="local",
        started_at=started_at,
        seconds=1,
        modes=("push",),
        runs=tuple(runs),
        environment={"model": {"id": model}},
        options={},
    )


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
    assert planned(capsys)[0] == [f"demo on local, from {path}", "nothing to do"]


def test_changed_fields_are_shown_with_what_they_do(
    running: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--set", "fleet.prefill.count=2", "--set", "router.policy=round-robin")
    assert run(tmp_path, *argv) == (0, "")
    done, _ = planned(capsys)
    assert done[1:] == [
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
    assert document(capsys) == {
        "cluster": "demo",
        "target": "local",
        "changes": [
            {"path": "fleet.decode.count", "was": "2", "wanted": "1", "does": "restart engines"}
        ],
        "start": [],
        "stop": ["decode-1"],
        "running": ["decode-0", "decode-1", "prefill-0", "router"],
    }
