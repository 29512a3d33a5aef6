from __future__ import annotations

import io
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.local import machine
from kvdeploy.cli.app import App, main
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path

AWS = """\
name: demo
target: aws
model: {id: org/m, max_length: 4096}
fleet:
  prefill: {tensor_parallel: 8}
  decode: {tensor_parallel: 8}
aws: {region: us-west-2, zone: us-west-2a}
"""
# What depends on the machine that the tests run on.
ABSENT = ("aws-credentials", "terraform-missing", "access-tool-missing")
OFFLINE = tuple(word for name in ABSENT for word in ("--allow", name))
ALLOWED = ("memory-too-little", "cores-shared", "libnuma-missing", "platform-unsupported")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program can be found, and the cache is empty."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("KVDEPLOY_CACHE", str(tmp_path / "cache"))


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(("check", *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


def local(root: Path, text: str = "") -> tuple[str, ...]:
    """A local cluster on a port that is free, and options that leave this machine out of it."""
    port = next(machine.free_ports(39100))
    (root / "cluster.yaml").write_text(
        f"name: demo\nrouter: {{port: {port}}}\nruntime: {{python: {sys.executable}}}\n{text}"
    )
    return tuple(word for name in ALLOWED for word in ("--allow", name))


def test_nothing_to_object_to_on_aws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    assert run(tmp_path, *OFFLINE) == (0, "")
    assert capsys.readouterr().out == f"{tmp_path / 'cluster.yaml'}: nothing to object to\n"


def test_nothing_to_object_to_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = local(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run(tmp_path, *options) == (0, "")
    assert capsys.readouterr().out == f"{tmp_path / 'cluster.yaml'}: nothing to object to\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_broken_file_ends_with_every_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: demo\nrouter: {prot: 1}\nfleet: {decode: {count: 0}}\n")
    assert run(tmp_path) == (
        3,
        f"error: {path}:2: router.prot: unknown key. Did you mean port?\n"
        f"{path}:3: fleet.decode.count: must be a whole number from 1 to 64, not 0\n"
        f"2 problems in {path}\n"
        "  try: 'kvdeploy init' writes a file in which every key is explained.\n",
    )
    assert capsys.readouterr().out == ""


def test_findings_go_to_stdout_and_the_verdict_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(AWS)
    argv = ("-f", "c.yaml", "--set", "aws.zone=us-east-1a", "--set", "connector.backend=UCX")
    assert run(tmp_path, *argv, *OFFLINE) == (
        4,
        f"error: 1 problem with {path}\n"
        "  try: Change it; or, if you know better, go on with --allow zone-outside-region\n",
    )
    assert capsys.readouterr().out == (
        "error: aws.zone: us-east-1a is not in us-west-2 [zone-outside-region]\n"
        "    Use a zone such as us-west-2a.\n"
        "warning: connector.backend: UCX does not use EFA: KV blocks would travel over TCP "
        "[ucx-on-aws]\n"
        "    Use auto or LIBFABRIC.\n"
    )


def test_a_warning_alone_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    assert run(tmp_path, *OFFLINE, "--set", "connector.backend=UCX") == (0, "")


def test_what_is_allowed_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    argv = ("--set", "aws.zone=us-east-1a", "--allow", "zone-outside-region")
    assert run(tmp_path, *argv, *OFFLINE) == (0, "")
    assert capsys.readouterr().out.endswith(": nothing to object to\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zone-outside-regoin", " Did you mean 'zone-outside-region'?"),
        ("everything", ""),
    ],
)
def test_allowing_a_check_that_is_none_is_wrong_usage(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--allow", name)[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"Error: Invalid value for '--allow': no check is called {name!r}.{said}"
    )


def test_json_is_one_document_whatever_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(AWS)
    assert run(tmp_path, "--json", *OFFLINE)[0] == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(tmp_path, "--json", *OFFLINE, "--set", "aws.zone=us-east-1a")[0] == 4
    assert json.loads(capsys.readouterr().out) == [
        {
            "check": "zone-outside-region",
            "severity": "error",
            "path": "aws.zone",
            "message": "us-east-1a is not in us-west-2",
            "hint": "Use a zone such as us-west-2a.",
        }
    ]


def test_without_credentials_and_terraform_both_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (tmp_path / "cluster.yaml").write_text(AWS)
    assert run(tmp_path)[0] == 4
    told = capsys.readouterr().out
    assert "[aws-credentials]\n" in told
    assert "error: target: terraform is not on PATH [terraform-missing]\n" in told


def test_a_taken_port_of_the_router_is_found_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = local(tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        code, _ = run(tmp_path, *options, "--set", f"router.port={port}")
    assert code == 4
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"error: router.port: {port} is taken by ")
    assert first.endswith(f" (pid {os.getpid()}) [router-port-taken]")


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("model: {id: ./nothing-here}\n", "model-path-missing"),
        ("model: {id: 'builtin:huge'}\n", "builtin-model-unknown"),
    ],
)
def test_what_is_missing_here_is_found(
    text: str, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *local(tmp_path, text))[0] == 4
    assert f"[{check}]" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_not_the_built_in_cluster(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert run(tmp_path, "-f", "none.yaml") == (
        3,
        f"error: {path}: no such file\n  try: Write one with 'kvdeploy init'.\n",
    )
