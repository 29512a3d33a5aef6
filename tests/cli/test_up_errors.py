"""How `up` refuses: with which exit code, in which words, and with nothing left running."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import Store, write_text
from kvdeploy.cli.app import App, main
from kvdeploy.model.record import Record
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALLOWED = ("memory-too-little", "cores-shared", "libnuma-missing", "platform-unsupported")
AWS = """\
name: demo
target: aws
model: {id: org/m, max_length: 4096}
fleet:
  prefill: {tensor_parallel: 8}
  decode: {tensor_parallel: 8}
aws: {region: us-west-2, zone: us-west-2a}
"""


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No program can be found, the cache is empty, and nothing may be left running."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("KVDEPLOY_CACHE", str(tmp_path / "cache"))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert Processes(Store(tmp_path, "demo").processes).names() == []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of a local cluster whose Python has no vLLM: nothing could ever be started."""
    port = next(machine.free_ports(39100))
    (tmp_path / "cluster.yaml").write_text(
        f"name: demo\nrouter: {{port: {port}}}\nruntime: {{python: {sys.executable}}}\n"
    )
    return Store(tmp_path, "demo")


def up(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    allowed = [word for name in ALLOWED for word in ("--allow", name)]
    code = main(("up", *allowed, *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


def logs(store: Store) -> str:
    return "".join(p.read_text() for p in (store.dir / "runs").glob("*-up/run.log"))


def test_nothing_is_made_on_aws_unless_aws_was_asked(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    absent = ("aws-credentials", "terraform-missing", "access-tool-missing")
    code, said = up(tmp_path, *(word for name in absent for word in ("--allow", name)))
    assert code == 14
    assert said.endswith(
        "error: AWS was not asked (--allow aws-credentials), and nothing goes on without\n"
        "  try: Leave out --allow aws-credentials.\n"
    )
    assert not Store(tmp_path, "demo").terraform.exists()


def test_a_wrong_aws_file_is_told_so_first(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    assert up(tmp_path, "--allow", "aws-credentials", "--set", "aws.zone=us-east-1a")[0] == 4


def test_a_cluster_that_another_run_holds_is_left_alone(store: Store, tmp_path: Path) -> None:
    with store.locked("smoke"):
        code, said = up(tmp_path)
    first, *rest = said.splitlines()
    assert code == 12
    held = f"error: cluster 'demo' is held by 'kvdeploy smoke' (pid {os.getpid()}, since "
    assert first.startswith(held)
    assert rest == ["  try: Wait for it to end, or stop it; then run this again."]
    assert not (store.dir / "runs").exists()


def test_a_damaged_record_stops_the_run_and_is_kept(store: Store, tmp_path: Path) -> None:
    record = store.dir / "record.json"
    write_text(record, "{")
    code, said = up(tmp_path)
    assert code == 13
    assert said.endswith(
        f"error: {record}: the record is damaged\n"
        f"  try: 'kvdeploy down' stops what runs and works without it; then delete {record} "
        "and run 'kvdeploy up'.\n"
    )
    assert record.read_text() == "{"
    assert f"error: {record}: the record is damaged\n" in logs(store)


def test_a_cluster_does_not_move_to_another_target(store: Store, tmp_path: Path) -> None:
    store.write(Record(cluster="demo", target="aws"))
    code, said = up(tmp_path)
    assert code == 4
    assert said.endswith(
        "error: cluster 'demo' was brought up on target aws, and a cluster does not move to local\n"
        "  try: Take it down first, or give the new one another name.\n"
    )
    assert store.read().target == "aws"


def test_a_check_stops_the_run_with_all_its_findings(store: Store, tmp_path: Path) -> None:
    code, said = up(tmp_path, "--set", "model.id=builtin:tinny", "--set", "model.max_length=64")
    _, _, told = said.partition("\n")
    assert code == 4
    assert told == (
        "error: model.id: builtin:tinny is not a built-in model [builtin-model-unknown]\n"
        "    Did you mean builtin:tiny?\n"
        f"1 problem with {tmp_path / 'cluster.yaml'}\n"
        "  try: Change it; or, if you know better, go on with --allow builtin-model-unknown\n"
    )
    assert "is not a built-in model" in logs(store)


@pytest.mark.parametrize("option", ["--until", "--from"])
def test_a_stage_that_the_target_does_not_have_is_wrong_usage(
    option: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(tmp_path, option, "provision")[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "Error: this target has no stage 'provision': there are runtime, model, fleet, proof"
    )
    assert store.read().stages == {}


@pytest.mark.real_process
def test_a_runtime_that_cannot_import_stops_the_run_before_anything_is_started(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = up(tmp_path)
    assert code == 4
    lines = said.splitlines()
    started, title, failed, error = lines[:4]
    assert started.startswith(f"cluster 'demo' from {tmp_path / 'cluster.yaml'}; log: ")
    assert title == f"-> check the runtime {sys.executable}"
    assert failed.startswith(f"!! check the runtime {sys.executable} (")
    assert error == f"error: the runtime {sys.executable} cannot import vllm and nixl:"
    assert lines[-2:] == [
        "ModuleNotFoundError: No module named 'vllm'",
        f"  try: Try it by hand: {sys.executable} -c 'import vllm, nixl'",
    ]
    assert capsys.readouterr().out == ""
    known = store.read()
    assert known.stages == {}
    assert known.spec is not None


@pytest.mark.real_process
def test_the_log_of_a_failed_run_holds_what_was_said_and_run(store: Store, tmp_path: Path) -> None:
    up(tmp_path)
    log = logs(store)
    assert "!! check the runtime" in log
    assert f"error: the runtime {sys.executable} cannot import vllm and nixl:" in log
    (run,) = (store.dir / "runs").iterdir()
    assert "probes/runtime.py full" in (run / "commands.jsonl").read_text()
