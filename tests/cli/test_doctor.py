from __future__ import annotations

import io
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.local import machine
from kvdeploy.cli.app import App, main
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path

GOOD = ("ok", "not needed")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program can be found, and the cache is empty."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("KVDEPLOY_CACHE", str(tmp_path / "cache"))


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(("doctor", *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


def local(root: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What is found for a local cluster, by name. The exit code must say the same."""
    port = next(machine.free_ports(39100))
    code, said = run(root, "--json", "--set", f"router.port={port}", *argv)
    rows = json.loads(capsys.readouterr().out)
    bad = [r for r in rows if r["verdict"] not in GOOD]
    assert code == (5 if bad else 0)
    if bad:
        first = said.splitlines()[0]
        assert first == "error: " + "; ".join(f"{r['what']}: {r['verdict']}" for r in bad)
    return {r["what"]: r for r in rows}


def test_a_local_cluster_is_told_all_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = local(tmp_path, capsys)
    names = ["system", "python", "cores", "memory", "GPUs"]
    assert list(rows)[:5] == names
    assert rows["cores"]["found"] == str(len(machine.cores()))
    assert rows["GPUs"] == {
        "what": "GPUs",
        "found": "0",
        "needed": "none",
        "verdict": "ok",
        "hint": "nvidia-smi must list them.",
    }
    assert rows["cpu runtime"]["found"].startswith("not built; ")
    assert rows["terraform"]["verdict"] == "not needed"
    assert rows["terraform"]["found"] == "none"


def test_cuda_without_gpus_is_missing_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = local(tmp_path, capsys, "--set", "runtime.device=cuda")
    assert (rows["GPUs"]["verdict"], rows["GPUs"]["needed"]) == ("missing", "1 or more")
    assert "cuda runtime" in rows


def test_too_many_engines_are_too_little_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = ("--set", "fleet.decode.count=64", "--set", "fleet.decode.kv_cache_gib=2000")
    memory = local(tmp_path, capsys, *big)["memory"]
    assert memory["verdict"] == "too little"
    assert memory["hint"] == "Ask for fewer engines or a smaller fleet.*.kv_cache_gib."


def test_a_port_that_is_taken_is_shown_with_its_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        rows = local(tmp_path, capsys, "--set", f"router.port={port}")
    row = rows[f"port {port}"]
    assert row["verdict"] == "taken"
    assert row["found"].endswith(f" (pid {os.getpid()})")


def test_aws_needs_terraform_and_a_way_to_nodes_and_nothing_else_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: demo\ntarget: aws\nmodel: {id: org/m}\naws: {region: us-west-2, zone: us-west-2a}\n"
    )
    assert run(tmp_path) == (
        5,
        "error: terraform: missing; ssh: missing; aws: missing; session-manager-plugin: missing\n"
        "  try: Install Terraform 1.10 or newer. Install ssh. Install aws. Install "
        "session-manager-plugin.\n",
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["what", "found", "needed", "verdict"]
    assert [row[0] for row in rows[1:]] == [
        *("system", "python", "terraform", "ssh", "aws", "session-manager-plugin"),
        *("ansible-core", "ansible-runner", "boto3"),
    ]


@pytest.mark.real_process
@pytest.mark.parametrize("kind", ["no vllm", "not there", "no interpreter"])
def test_a_named_runtime_without_vllm_is_shown_as_missing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = {"no vllm": sys.executable, "not there": "/no/python", "no interpreter": "/bin/echo"}
    row = local(tmp_path, capsys, "--set", f"runtime.python={python[kind]}")[
        f"runtime {python[kind]}"
    ]
    assert row["verdict"] == "missing"
    assert row["found"].startswith("python 3." if kind == "no vllm" else "no Python interpreter")
    assert row["hint"] == "Name an interpreter that has both in runtime.python, or leave it out."


@pytest.mark.real_process
def test_a_named_runtime_with_both_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.11.9", "vllm": "1.0", "nixl": "2"}\'\n')
    python.chmod(0o755)
    row = local(tmp_path, capsys, "--set", f"runtime.python={python}")[f"runtime {python}"]
    assert (row["verdict"], row["found"]) == ("ok", "python 3.11.9, vllm 1.0, nixl 2")
