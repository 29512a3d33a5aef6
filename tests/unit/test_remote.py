"""Nodes over SSH, with ssh's own answers from a script."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdeploy import probes
from kvdeploy.adapters.remote import Remote
from kvdeploy.errors import UnreachableError
from kvdeploy.model.inventory import Connection, Host
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.proc import Command, LocalRunner, Outcome

CONNECTION = Connection(user="ubuntu", known_hosts="/k")
HOSTS = tuple(
    Host(name=name, role="decode", address=f"10.0.0.{i}", instance_id=f"i-{i}")
    for i, name in enumerate(("decode-0", "decode-1"), start=1)
)
FACTS: dict[str, Any] = {"boot_id": "b", "interface": "eth0", "cores": [0, 1]}


class Ssh:
    """Answers by address: exit code, stdout, stderr."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = {a.replace("_", "."): answer for a, answer in answers.items()}
        self.timed_out = False

    def run(self, command: Command, **_more: Any) -> Outcome:
        address = next(word for word in command.argv if word in self.answers)
        code, out, err = self.answers[address]
        return Outcome(
            command=command,
            code=code,
            stdout=out,
            stderr=err,
            seconds=0,
            timed_out=self.timed_out,
        )


@pytest.fixture(autouse=True)
def ssh_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: name)


def remote(ssh: Ssh, tmp_path: Path) -> Remote:
    return Remote(ssh, CONNECTION, log=tmp_path / "ssh.log")


def said(answers: dict[str, NodeFacts | UnreachableError]) -> dict[str, object]:
    return {n: a.message if isinstance(a, UnreachableError) else a for n, a in answers.items()}


def test_each_node_tells_of_itself_or_why_it_does_not(tmp_path: Path) -> None:
    refused = "ssh: connect to host 10.0.0.2 port 22: Connection refused"
    ssh = Ssh(
        **{"10_0_0_1": (0, f"motd\n{json.dumps(FACTS)}\n", ""), "10_0_0_2": (255, "", refused)}
    )
    assert said(remote(ssh, tmp_path).ask(HOSTS)) == {
        "decode-0": NodeFacts(boot_id="b", interface="eth0", cores=(0, 1)),
        "decode-1": "decode-1 (10.0.0.2) is not reachable: connection refused",
    }


def test_a_node_without_python_is_no_bug(tmp_path: Path) -> None:
    ssh = Ssh(**{"10_0_0_1": (127, "", "bash: python3: command not found")})
    assert said(remote(ssh, tmp_path).ask(HOSTS[:1])) == {
        "decode-0": "decode-0 does not tell of itself: bash: python3: command not found"
    }


def test_a_program_that_ends_badly_is_its_callers_matter(tmp_path: Path) -> None:
    ssh = Ssh(**{"10_0_0_1": (1, "", "no such file")})
    assert remote(ssh, tmp_path).run(HOSTS[0], "cat", "/x").code == 1


def test_a_node_that_hangs_is_told(tmp_path: Path) -> None:
    ssh = Ssh(**{"10_0_0_1": (-9, "", "")})
    ssh.timed_out = True
    with pytest.raises(UnreachableError) as caught:
        remote(ssh, tmp_path).run(HOSTS[0], "cat", "/x", timeout_s=7)
    assert caught.value.message == "decode-0 did not answer within 7 s"


@pytest.mark.real_process
def test_what_a_node_says_of_itself_can_be_read() -> None:
    """The program itself, on this machine: it is run the way that ssh would run it."""
    program = (Path(probes.__file__).parent / "node.py").read_text()
    argv = (sys.executable, "-I", "-c", program, "127.0.0.1")
    ran = LocalRunner().run(Command(argv=argv))
    facts = NodeFacts.model_validate_json(ran.stdout)
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.cores
    assert facts.huge_pages == int(Path("/proc/sys/vm/nr_hugepages").read_text())
    assert facts.interface in {"lo", ""}  # "" where there is no ip


@pytest.mark.real_process
@pytest.mark.parametrize(
    ("program", "gpus", "driver"),
    [
        ("echo 580.95.05; echo 580.95.05", 2, "580.95.05"),
        ("echo NVIDIA-SMI has failed because it could not ask the driver; exit 9", 0, ""),
    ],
)
def test_a_driver_that_does_not_answer_has_no_gpus(
    tmp_path: Path, program: str, gpus: int, driver: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{program}\n")
    smi.chmod(0o755)
    text = (Path(probes.__file__).parent / "node.py").read_text()
    path = f"{tmp_path}:{os.environ['PATH']}"
    argv = (sys.executable, "-I", "-c", text, "127.0.0.1")
    ran = LocalRunner().run(Command(argv=argv, env={"PATH": path}))
    facts = NodeFacts.model_validate_json(ran.stdout)
    assert (facts.gpus, facts.driver) == (gpus, driver)
