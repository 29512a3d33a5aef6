"""Running a playbook without Ansible: what would be run, with what, and what is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.ansible.environment import build_environment, search_path
from kvdeploy.adapters.ansible.private import (
    LOCK,
    MARKER,
    PREFIX,
    Private,
    clear_abandoned,
    private_folder,
)
from kvdeploy.errors import CheckError, PlaybookError, ToolError, UnreachableError
from kvdeploy.model.inventory import Connection, Host, Inventory
from kvdeploy.proc import Command, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

PLAYBOOKS = Path(__file__).parents[1] / "data" / "playbooks"
HOSTS = (
    Host(name="prefill-0", role="prefill", address="10.0.0.4"),
    Host(name="decode-0", role="decode", address="10.0.0.5", instance_id="i-0d"),
)
SUCCESS = (
    {"event": "runner_on_ok", "data": {"host": "decode-0", "task": "t", "res": {}}},
    {"event": "playbook_on_stats", "data": {"ok": {"decode-0": 1}}},
    {"event": "kvdeploy_end", "status": "successful", "rc": 0},
)


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@dataclass
class Worker:
    """In the place of the worker: says its lines, and looks at what it was given."""

    says: tuple[dict[str, Any], ...] = SUCCESS
    timed_out: bool = False
    bastion: tuple[int, str] = (0, "")
    commands: list[Command] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)

    def run(self, command: Command, *, on_line: Callable[[str], None] | None = None) -> Outcome:
        self.commands.append(command)
        code, said = 0, ""
        if command.argv[0] == "ssh":
            code, said = self.bastion
        else:
            folder = Path(command.argv[4])
            self.modes = {
                p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())
            }
            self.given = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
            assert on_line is not None
            for line in self.says:
                on_line(json.dumps(line))
        return Outcome(
            command=command, code=code, stdout=said, stderr="", seconds=1, timed_out=self.timed_out
        )


def play(**over: Any) -> Play:
    how = Connection(user="ubuntu", known_hosts="/k/known_hosts", **over.pop("connection", {}))
    return Play(
        **{"playbook": "ping.yml", "inventory": Inventory(hosts=HOSTS, connection=how), **over}
    )


def client(tmp_path: Path, worker: Worker) -> Ansible:
    return Ansible(tmp_path / "runs" / "x" / "ansible.jsonl", PLAYBOOKS, runner=worker)


def test_the_worker_gets_everything_in_private_files(tmp_path: Path, own_temp: Path) -> None:
    worker = Worker()
    report = client(tmp_path, worker).run(
        play(
            variables={"chat": "{{ m }}"},
            secrets={"token": "s3cret"},
            limit=("decode-0", "prefill"),
            tags=("efa", "efa_install"),
            timeout_s=77,
        )
    )
    (command,) = worker.commands
    folder = command.argv[4]
    assert command.argv == (
        *(sys.executable, "-P", "-m", "kvdeploy.adapters.ansible.worker", folder, str(os.getpid())),
    )
    assert command.cwd == Path(folder)
    assert command.output == Path(folder) / "events.jsonl"
    assert (command.timeout_s, command.drop_env) == (77, ("",))
    assert command.env[MARKER] == folder
    assert worker.given["job"] == {
        "project": str(PLAYBOOKS),
        "playbook": "ping.yml",
        "limit": "decode-0:prefill",
        "tags": "efa,efa_install",
        "forks": 2,
    }
    assert worker.given["secrets"] == {"token": "s3cret"}
    assert worker.given["variables"] == {"chat": {"__ansible_unsafe": "{{ m }}"}}
    assert "gpu" in worker.given["inventory"]["all"]["children"]
    assert "s3cret" not in f"{command.argv}{command.env}{worker.given['inventory']}"
    assert set(worker.modes.values()) == {0o600, 0o700}
    # Nothing of it is left.
    assert list(own_temp.iterdir()) == []
    assert [host.name for host in report.hosts] == ["decode-0"]


def test_a_private_folder_goes_also_when_the_run_ends_badly(tmp_path: Path, own_temp: Path) -> None:
    class Interrupted(Worker):
        def run(self, command: Command, *, on_line: object = None) -> Outcome:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client(tmp_path, Interrupted()).run(play())
    with pytest.raises(PlaybookError):
        client(tmp_path, Worker(says=())).run(play())
    with pytest.raises(PlaybookError, match=r"took over 3600 s and was stopped$"):
        client(tmp_path, Worker(timed_out=True)).run(play())
    assert list(own_temp.iterdir()) == []


def test_the_bastion_is_connected_to_before_any_host(tmp_path: Path) -> None:
    worker = Worker()
    client(tmp_path, worker).run(play(connection={"bastion": "ops@b"}))
    first, second = worker.commands
    assert first.argv[0] == "ssh"
    assert first.argv[-1] == "ops@b"
    assert first.env == second.env
    assert first.drop_env == ("",)
    # Its process stays, with our pipes, if it had any.
    assert first.output is not None


def test_a_bastion_that_cannot_be_reached_is_told_as_that(tmp_path: Path) -> None:
    worker = Worker(bastion=(255, "ssh: connect to host b port 22: Connection timed out"))
    with pytest.raises(UnreachableError) as caught:
        client(tmp_path, worker).run(play(connection={"bastion": "ops@b"}))
    assert caught.value.message == "the bastion ops@b is not reachable: it did not answer in time"
    assert len(worker.commands) == 1


def test_what_is_missing_is_told_before_anything_is_started(tmp_path: Path) -> None:
    worker = Worker()
    ansible = client(tmp_path, worker)
    with pytest.raises(ToolError) as no_playbook:
        ansible.run(play(playbook="nodes.yml"))
    assert no_playbook.value.message == f"{PLAYBOOKS} has no playbook nodes.yml"
    assert "ping.yml" in no_playbook.value.hint
    with pytest.raises(CheckError) as no_key:
        ansible.run(play(connection={"private_key": "/no/such/key"}))
    assert no_key.value.message == "there is no SSH key /no/such/key"
    with pytest.raises(CheckError, match="the inventory has no hosts"):
        ansible.run(
            play(
                inventory=Inventory(
                    hosts=(), connection=Connection(user="u", known_hosts="/k/known_hosts")
                )
            )
        )
    assert worker.commands == []


def test_ansible_that_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_more: None)
    with pytest.raises(ToolError) as caught:
        client(tmp_path, Worker()).run(play())
    assert caught.value.message == "Ansible is not installed beside kvdeploy"
    assert caught.value.hint == f"{sys.executable} -m pip install ansible-core ansible-runner"


# --- the environment -------------------------------------------------------------------------
CALLER = {
    "HOME": "/home/u",
    "PATH": "/usr/bin",
    "SSH_AUTH_SOCK": "/run/agent",
    "ANSIBLE_HOST_KEY_CHECKING": "False",
    "ANSIBLE_CONFIG": "/evil.cfg",
    "AWS_PROFILE": "p",
    "https_proxy": "http://proxy",
    "HF_TOKEN": "hf_x",
    "PYTHONPATH": "/evil",
    "LD_PRELOAD": "/evil.so",
    "LC_ALL": "de_DE",
}


def environment(*, aws: bool) -> dict[str, str]:
    return build_environment(CALLER, Private(Path("/t/kv-play-x")), Path("/p"), aws=aws)


def test_the_callers_settings_do_not_reach_ansible() -> None:
    made = environment(aws=False)
    kept = {name: value for name, value in made.items() if CALLER.get(name) == value}
    assert kept == {"HOME": "/home/u", "SSH_AUTH_SOCK": "/run/agent"}
    assert made["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    assert made["ANSIBLE_CONFIG"] == "/p/ansible.cfg"
    assert made["ANSIBLE_ROLES_PATH"] == "/p/roles"
    assert made["ANSIBLE_HOME"] == "/t/kv-play-x/ansible"
    assert made["LC_ALL"].endswith(".UTF-8")
    assert not {"HF_TOKEN", "PYTHONPATH", "LD_PRELOAD", "AWS_PROFILE"} & made.keys()


def test_only_session_manager_sees_what_aws_needs() -> None:
    made = environment(aws=True)
    assert (made["AWS_PROFILE"], made["https_proxy"]) == ("p", "http://proxy")
    assert "HF_TOKEN" not in made


def test_programs_beside_this_python_are_found_first() -> None:
    assert search_path(CALLER).split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert search_path(CALLER).endswith(f"{os.pathsep}/usr/bin")
    assert search_path({}).endswith(os.defpath)


# --- what killed runs leave ------------------------------------------------------------------
def test_only_folders_that_nobody_holds_are_cleared(own_temp: Path) -> None:
    with private_folder() as held:
        abandoned = own_temp / f"{PREFIX}old"
        abandoned.mkdir(mode=0o700)
        (abandoned / LOCK).touch()
        (abandoned / "secrets.json").write_text("{}")
        just_made = own_temp / f"{PREFIX}new"
        just_made.mkdir()
        other = own_temp / "another-thing"
        other.mkdir()
        link = own_temp / f"{PREFIX}link"
        link.symlink_to(other)
        (other / LOCK).touch()
        assert clear_abandoned() == [abandoned]
        assert held.path.exists()
        assert just_made.exists()
        assert (other / LOCK).exists()
    assert not held.path.exists()


def test_a_folder_of_somebody_else_is_left_alone(
    own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = own_temp / f"{PREFIX}theirs"
    theirs.mkdir()
    (theirs / LOCK).touch()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    assert clear_abandoned() == []
    assert theirs.exists()


def test_a_lock_is_taken_before_it_is_seen(own_temp: Path) -> None:
    with private_folder() as private, (private.path / LOCK).open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not (private.path / f"{LOCK}.taking").exists()
