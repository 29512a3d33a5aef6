"""The adapter over SSH to real hosts: whom it trusts, how it gets there, and what is left of it
when it is stopped, killed, or a host dies. What it tells of tasks is in tests/contract.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.ansible.private import MARKER, PREFIX
from kvdeploy.adapters.ansible.ssh import ssh_argv
from kvdeploy.errors import PlaybookError, UnreachableError
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.inventory import Inventory
    from tests.hostlab.lab import HostLab
    from tests.playbooks.conftest import Labs

PLAYBOOKS = Path(__file__).parents[1] / "data" / "playbooks"
NODES = ("prefill-0", "decode-0")
BASTION = "router-0"
NAP = "98765"
"""Seconds; no other sleep is that long."""


@pytest.fixture(scope="module")
def lab(labs: Labs) -> HostLab:
    return labs(*NODES, BASTION, hardware="none").lab


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Private folders are made here, and every test must leave none, and no process."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: sockets are in there
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    left = left_in(folder)
    for _, process in running_because_of(folder):
        process.kill()
    shutil.rmtree(folder)
    assert left == ([], [])


def left_in(folder: Path) -> tuple[list[str], list[str]]:
    """Private folders, and the argv of processes that run because of one."""
    folders = [path.name for path in folder.glob(f"{PREFIX}*")]
    return folders, [argv for argv, _ in running_because_of(folder)]


def running_because_of(folder: Path) -> list[tuple[str, psutil.Process]]:
    """Their environment names it, or their title, which masters of SSH connections write over
    their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            argv = " ".join(process.cmdline())
            if str(folder) in f"{process.environ().get(MARKER, '')} {argv}":
                found.append((argv, process))
    return found


@dataclass
class Line:
    notes: list[str] = field(default_factory=list)

    def update(self, detail: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def client(tmp_path: Path) -> tuple[Ansible, Line]:
    line = Line()
    ansible = Ansible(tmp_path / "run" / "ansible.jsonl", PLAYBOOKS)
    ansible.listener = line
    return ansible, line


def inventory(lab: HostLab, *, instances: bool = False, **connection: object) -> Inventory:
    found = lab.inventory({"prefill-0": "prefill", "decode-0": "decode"}, {"folder": "/run"})
    hosts = found.hosts
    if instances:
        hosts = tuple(h.model_copy(update={"instance_id": f"i-{h.name}"}) for h in hosts)
    how = found.connection.model_copy(update=connection)
    return found.model_copy(update={"hosts": hosts, "connection": how})


# --- whom it trusts --------------------------------------------------------------------------
def test_a_first_key_is_learned_under_the_instances_name_and_then_held_to(
    lab: HostLab, tmp_path: Path
) -> None:
    known = tmp_path / "with blank" / "known %h"
    known.parent.mkdir()
    first = inventory(lab, instances=True, known_hosts=str(known), learn_host_keys=True)
    ansible, _ = client(tmp_path)
    report = ansible.run(Play(playbook="ping.yml", inventory=first))
    assert [(h.name, h.ok, h.unreachable) for h in report.hosts] == [
        ("prefill-0", 1, False),
        ("decode-0", 1, False),
    ]
    rows = sorted(known.read_text().splitlines())
    assert [row.split()[:2] for row in rows] == [
        ["i-decode-0", "ssh-ed25519"],
        ["i-prefill-0", "ssh-ed25519"],
    ]
    # A person gets there in the same way.
    then = first.connection.model_copy(update={"learn_host_keys": False})
    shell = subprocess.run(
        ssh_argv(first.hosts[1], then, "hostname"), capture_output=True, text=True, check=False
    )
    assert (shell.returncode, shell.stdout) == (0, "decode-0\n"), shell.stderr
    # Another machine under that name, though keys may still be learned.
    known.write_text(rows[1] + "\n" + rows[1].replace("i-prefill-0", "i-decode-0") + "\n")
    with pytest.raises(UnreachableError) as caught:
        ansible.run(Play(playbook="ping.yml", inventory=first))
    address = lab["decode-0"].address
    assert caught.value.message == (
        f"ping.yml: decode-0 ({address}) is not reachable: "
        f"the host key of i-decode-0 is not the one in {known}, line 2"
    )
    assert f"ssh-keygen -f '{known}' -R 'i-decode-0'" in caught.value.hint


def test_nobodys_shell_can_turn_the_check_off(
    lab: HostLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless = tmp_path / "careless.cfg"
    careless.write_text(
        "[defaults]\nhost_key_checking = False\n"
        "[ssh_connection]\nssh_common_args = -o StrictHostKeyChecking=no\n"
    )
    monkeypatch.setenv("ANSIBLE_CONFIG", str(careless))
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
    monkeypatch.setenv("ANSIBLE_SSH_ARGS", "-o StrictHostKeyChecking=no")
    monkeypatch.setenv("ANSIBLE_SSH_COMMON_ARGS", "-o StrictHostKeyChecking=no")
    one_known = tmp_path / "known_hosts"
    one_known.write_text(lab["prefill-0"].host_key)
    ansible, line = client(tmp_path)
    with pytest.raises(UnreachableError) as caught:
        ansible.run(Play(playbook="ping.yml", inventory=inventory(lab, known_hosts=str(one_known))))
    address = lab["decode-0"].address
    assert caught.value.message == (
        f"ping.yml: decode-0 ({address}) is not reachable: no host key is known for {address}"
    )
    assert line.notes == [f"   ! decode-0: not reachable: no host key is known for {address}"]
    assert one_known.read_text() == lab["prefill-0"].host_key


# --- how it gets there -----------------------------------------------------------------------
def test_many_hosts_share_one_connection_to_the_bastion(lab: HostLab, tmp_path: Path) -> None:
    bastion = lab[BASTION]
    user = lab.connection().user
    since = bastion.run("date", "+%H:%M:%S.%6N").stdout.strip()
    ansible, _ = client(tmp_path)
    through = inventory(lab, bastion=f"{user}@{bastion.address}")
    report = ansible.run(Play(playbook="ping.yml", inventory=through))
    assert [host.ok for host in report.hosts] == [1, 1]
    journal = bastion.run("journalctl", "--unit=ssh", "--since", since, "--output=cat").stdout
    assert journal.count("Accepted publickey") == 1
    # The nodes saw the bastion, and not us.
    seen = lab["decode-0"].run("journalctl", "--unit=ssh", "--output=cat", "--lines=20").stdout
    assert f"Accepted publickey for {user} from {bastion.address}" in seen


def test_a_bastion_whose_key_is_not_known_is_not_gone_through(lab: HostLab, tmp_path: Path) -> None:
    nodes_known = tmp_path / "known_hosts"
    nodes_known.write_text("".join(lab[name].host_key for name in NODES))
    address = lab[BASTION].address
    ansible, _ = client(tmp_path)
    through = inventory(lab, bastion=f"ubuntu@{address}", known_hosts=str(nodes_known))
    with pytest.raises(UnreachableError) as caught:
        ansible.run(Play(playbook="ping.yml", inventory=through))
    assert caught.value.message == (
        f"the bastion ubuntu@{address} is not reachable: no host key is known for {address}"
    )


# --- what is left of it ----------------------------------------------------------------------
STARTER = """
import sys
from pathlib import Path
from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.model.inventory import Inventory
play = Play(
    playbook="slow.yml",
    inventory=Inventory.model_validate_json(Path(sys.argv[1]).read_text()),
    variables={"nap": sys.argv[2]},
)
try:
    Ansible(Path(sys.argv[3]), Path(sys.argv[4])).run(play)
except KeyboardInterrupt:
    sys.exit(130)
"""


def sleeps(lab: HostLab, name: str) -> list[str]:
    return lab[name].run("pgrep", "-f", f"sleep {NAP}").stdout.split()


def end_sleeps(lab: HostLab) -> None:
    """ssh's end does not end the command that it started."""
    for name in NODES:
        for pid in sleeps(lab, name):
            lab[name].run("kill", pid)


@dataclass
class Started:
    """Somebody's kvdeploy that runs a playbook which sleeps on both hosts by now."""

    process: subprocess.Popen[bytes]
    lab: HostLab
    folder: Path

    @property
    def ours(self) -> list[str]:
        return left_in(self.folder)[1]

    @property
    def sleeping(self) -> list[str]:
        return [name for name in NODES if sleeps(self.lab, name)]


@pytest.fixture
def started(lab: HostLab, tmp_path: Path, own_temp: Path) -> Iterator[Started]:
    described = tmp_path / "inventory.json"
    described.write_text(inventory(lab).model_dump_json())
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", STARTER, str(described), NAP),
            *(str(tmp_path / "run" / "slow.jsonl"), str(PLAYBOOKS)),
        ],
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(own_temp)},
    )
    found = Started(process, lab, own_temp)
    try:
        assert wait_for(lambda: found.sleeping == list(NODES) or None, timeout_s=60)
        kinds = " ".join(found.ours)
        assert "ansible-playbook" in kinds
        assert f"ssh: {own_temp}" in kinds
        yield found
    finally:
        process.kill()
        process.wait()
        end_sleeps(lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_when_kvdeploy_is_stopped_or_killed(
    started: Started, number: signal.Signals
) -> None:
    started.process.send_signal(number)
    code = started.process.wait(30)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    within = 0.0 if number == signal.SIGINT else 15.0  # the worker finds itself alone
    assert wait_for(lambda: left_in(started.folder) == ([], []) or None, timeout_s=within)
    # What was under way on a host comes to its end there: roles must bear that.
    assert started.sleeping == list(NODES)


def test_when_the_worker_is_killed_too_the_next_run_ends_what_is_left(
    started: Started, lab: HostLab, tmp_path: Path
) -> None:
    (worker,) = psutil.Process(started.process.pid).children()
    assert "kvdeploy.adapters.ansible.worker" in worker.cmdline()
    started.process.kill()
    worker.kill()
    started.process.wait()
    folders, running = left_in(started.folder)
    assert len(folders) == 1
    assert any("ansible-playbook" in argv for argv in running)
    secrets = started.folder / folders[0] / "secrets.json"
    assert secrets.exists()
    ansible, _ = client(tmp_path)
    ansible.run(Play(playbook="ping.yml", inventory=inventory(lab), limit=("decode-0",)))
    assert left_in(started.folder) == ([], [])


def test_time_that_runs_out_ends_everything_here(
    lab: HostLab, tmp_path: Path, own_temp: Path
) -> None:
    ansible, _ = client(tmp_path)
    play = Play(playbook="slow.yml", inventory=inventory(lab), variables={"nap": NAP}, timeout_s=10)
    try:
        with pytest.raises(PlaybookError, match="took over 10 s and was stopped in the middle of"):
            ansible.run(play)
        assert left_in(own_temp) == ([], [])
    finally:
        end_sleeps(lab)


def test_a_host_that_dies_in_the_middle_is_told_and_the_others_go_on(
    lab: HostLab, tmp_path: Path
) -> None:
    """Last: it switches a host off and on."""
    dying, nap = lab["decode-0"], "4.5"

    class Killer(Line):
        def update(self, detail: str) -> None:
            if "Sleep long" in detail and not self.notes:
                asleep = ("pgrep", "-f", f"sleep {nap}")
                wait_for(lambda: dying.run(*asleep).returncode == 0 or None, timeout_s=30)
                dying.kill()
                self.notes.append("killed")

    ansible, _ = client(tmp_path)
    ansible.listener = killer = Killer()
    try:
        with pytest.raises(UnreachableError) as caught:
            ansible.run(Play(playbook="slow.yml", inventory=inventory(lab), variables={"nap": nap}))
    finally:
        dying.boot()
    assert caught.value.message.startswith(
        f"slow.yml: decode-0 ({dying.address}) is not reachable: "
    )
    entries = [json.loads(row) for row in ansible.log.read_text().splitlines()]
    assert {e["host"] for e in entries if e["event"] == "runner_on_ok"} == {"prefill-0"}
    assert killer.notes[0] == "killed"
    assert killer.notes[1].startswith("   ! decode-0: not reachable: ")
    # And again, as the hint says.
    report = ansible.run(
        Play(playbook="slow.yml", inventory=inventory(lab), variables={"nap": "0"})
    )
    assert [(host.name, host.unreachable) for host in report.hosts] == [
        ("prefill-0", False),
        ("decode-0", False),
    ]
