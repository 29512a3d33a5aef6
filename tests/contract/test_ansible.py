"""The adapter with the real ansible-runner and ansible-playbook. Tasks run on this machine, in the
place of hosts; tests/playbooks/test_adapter.py goes over SSH.
"""

from __future__ import annotations

import json
import socket
import stat
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.ansible.private import MARKER, PREFIX
from kvdeploy.errors import PlaybookError
from kvdeploy.model.inventory import Connection, Host, Inventory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_process

PLAYBOOKS = Path(__file__).parents[1] / "data" / "playbooks"
SECRET = 'hf_s3cr"t\\key{{ 1 + 1 }}'
OTHER = "sk-another-of-them"
SECRET_WORDS = (SECRET, json.dumps(SECRET)[1:-1], OTHER)
TEMPLATE = "{% for m in messages %}{{ m }}{% endfor %}"
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}


@dataclass
class Line:
    said: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def update(self, detail: str) -> None:
        self.said.append(detail)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Private folders are made here, and every test must leave none, and no process."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert left_in(folder) == ([], [])


def left_in(folder: Path) -> tuple[list[str], list[str]]:
    """Private folders, and processes that run because of one: their environment names it, or
    their title, which masters of SSH connections write over their environment."""
    running = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            argv = " ".join(process.cmdline())
            if str(folder) in f"{process.environ().get(MARKER, '')} {argv}":
                running.append(argv)
    return [path.name for path in folder.glob(f"{PREFIX}*")], running


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def inventory(tmp_path: Path, *names: str, **over_ssh: Any) -> Inventory:
    """Hosts that are this machine, but those named in `over_ssh`, at a port where nothing is."""
    hosts = [Host(name=n, role="decode", address="127.0.0.1", vars=LOCAL) for n in names]
    hosts += [Host(name=n, role="router", address="127.0.0.1") for n in over_ssh.get("gone", ())]
    return Inventory(
        hosts=tuple(hosts),
        connection=Connection(user="nobody", port=closed_port(), known_hosts=str(tmp_path / "kh")),
        group_vars={"all": {"folder": str(tmp_path)}},
    )


def client(tmp_path: Path) -> tuple[Ansible, Line]:
    line = Line()
    ansible = Ansible(tmp_path / "run" / "ansible.jsonl", PLAYBOOKS)
    ansible.listener = line
    return ansible, line


def test_every_host_goes_as_far_as_it_gets_and_each_failure_is_told(tmp_path: Path) -> None:
    ansible, line = client(tmp_path)
    play = Play(
        playbook="mixed.yml",
        inventory=inventory(tmp_path, "good", "old", "full", gone=("off",)),
        variables={"again": "good", "unsupported": "old", "failing": "full"},
    )
    with pytest.raises(PlaybookError) as caught:
        ansible.run(play)
    assert caught.value.message.splitlines()[0] == "mixed.yml failed on 3 of 4 hosts:"
    judge = "roles/judge/tasks/main.yml"
    assert sorted(caught.value.message.splitlines()[1:]) == [
        f"  full: exit code 3: disk full / cannot go on (judge: Run the installer, {judge}:7)",
        "  off (127.0.0.1) is not reachable: connection refused",
        "  old: Debian 9 is not supported; use Ubuntu 22.04 or 24.04. "
        f"(judge: Check the system, {judge}:1)",
    ]
    assert caught.value.hint == (
        "The machine is there and its sshd is not: it may be starting. Wait a minute. "
        "Put that right. Then run it again: it picks up where it was."
    )
    assert caught.value.log == ansible.log
    # The others went on.
    assert (tmp_path / "end-good").exists()
    assert not (tmp_path / "end-full").exists()
    # What was seen meanwhile.
    assert any("good: place: Place a file" in said for said in line.said)
    assert "good: place: Try until it works (try 2 of 3)" in line.said
    bad = [note for note in line.notes if note.startswith("   !")]
    assert sorted(bad) == [
        "   ! full: Run the installer: exit code 3: disk full / cannot go on",
        "   ! off: not reachable: connection refused",
        "   ! old: Check the system: Debian 9 is not supported; use Ubuntu 22.04 or 24.04.",
    ]
    done = [note.split(" (")[0] for note in line.notes if note not in bad]
    placed = [f"   ~ {host}: place" for host in ("good", "old", "full")]
    assert sorted(done) == sorted([*placed, "   ~ good: judge"])
    assert all(note.endswith(" s, 1 changed)") for note in line.notes if note not in bad)


def test_what_a_run_is_told_stays_private_and_what_it_says_is_logged(
    tmp_path: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = tmp_path / "poison.cfg"
    poison.write_text("[defaults]\nstdout_callback = no_such_callback\nroles_path = /nowhere\n")
    monkeypatch.setenv("ANSIBLE_CONFIG", str(poison))
    monkeypatch.setenv("ANSIBLE_STRATEGY", "no_such_strategy")
    monkeypatch.setenv("ANSIBLE_RUN_TAGS", "no_such_tag")
    monkeypatch.setenv("AWX_LIB_DIRECTORY", "/nowhere")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LC_ALL", "C")
    ansible, line = client(tmp_path)
    play = Play(
        playbook="telling.yml",
        inventory=inventory(tmp_path, "one"),
        variables={"chat_template": TEMPLATE},
        secrets={"keys": [SECRET, OTHER]},
    )
    assert SECRET not in repr(play)
    with Spy(own_temp) as spy, pytest.raises(PlaybookError) as caught:
        ansible.run(play)
    # A task said a secret by mistake: it is told without.
    mistake = "Fail with a secret in the message"
    assert caught.value.message == (
        f"telling.yml failed: one: no good: the key is *** ({mistake}, telling.yml:26)"
    )
    assert line.notes == [f"   ! one: {mistake}: no good: the key is ***"]
    # It was not seen where others may look.
    assert spy.looks > 3
    assert spy.saw_worker
    assert spy.found == set()
    # Of the caller's environment Ansible saw next to nothing; values are no templates.
    seen = dict(row.split("=", 1) for row in (tmp_path / "environment").read_text().splitlines())
    kept = {"HOME", "USER", "LOGNAME", "TMPDIR", "SSH_AUTH_SOCK", "PATH", "LC_ALL", MARKER}
    of_shells = {"PWD", "SHLVL", "_", "OLDPWD"}
    of_ansible = ("ANSIBLE_", "AWX_", "RUNNER_")
    assert {n for n in seen if not n.startswith(of_ansible)} <= kept | of_shells
    assert seen["ANSIBLE_CONFIG"] == str(PLAYBOOKS / "ansible.cfg")
    assert "ANSIBLE_STRATEGY" not in seen
    assert (tmp_path / "template").read_text() == TEMPLATE
    # The log has everything that happened, and no secret.
    text = ansible.log.read_text()
    assert stat.S_IMODE(ansible.log.stat().st_mode) == 0o600
    assert not [word for word in SECRET_WORDS if word in text]
    entries = [json.loads(row) for row in text.splitlines()]
    assert [e["event"] for e in entries] == [
        "start",
        "runner_on_ok",
        "runner_on_ok",
        "runner_on_ok",
        "runner_on_failed",
        "playbook_on_stats",
        "end",
    ]
    assert entries[2]["task"] == "Keep what tasks see here"
    assert entries[2]["changed"] is False
    assert entries[2]["seconds"] > 0
    assert entries[4]["message"] == "no good: the key is ***"
    assert entries[5]["failures"] == {"one": 1}


class Spy(threading.Thread):
    """Looks where secrets must not be, for as long as a run goes on.

    SECRET is said by a task by mistake, so events hold it until it is masked; OTHER is not.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._ended = threading.Event()
        self.found: set[str] = set()
        self.looks, self.saw_worker = 0, False

    def __enter__(self) -> Spy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.looks += 1
            for private in self._folder.glob(f"{PREFIX}*"):
                self._look_at_mode(private)
                with suppress(OSError):  # the folder goes while it is walked
                    for path in private.rglob("*"):
                        self._look_at_file(path, private)
            for process in Path("/proc").glob("[0-9]*"):
                self._look_at_process(process)

    def _look_at_mode(self, path: Path) -> None:
        with suppress(OSError):
            if path.stat().st_mode & 0o077:
                self.found.add(f"{path.name} can be read by others")

    def _look_at_file(self, path: Path, private: Path) -> None:
        if path.parent == private:
            self._look_at_mode(path)
        if path.name == "secrets.json" or private / "ansible" in path.parents:
            return  # the one file, and the temporary files that Ansible itself makes of it
        is_event = path.name == "events.jsonl" or path.parent.name == "job_events"
        if path.parent.name == "job_events" and "-partial." not in path.name:
            self.found.add(f"{path.name} is kept")
        with suppress(OSError):
            if path.is_file():
                words = (OTHER,) if is_event else SECRET_WORDS
                self._look(path.read_bytes(), str(path), words)

    def _look_at_process(self, process: Path) -> None:
        with suppress(OSError):
            environment = (process / "environ").read_bytes()
            if f"{MARKER}={self._folder}".encode() in environment:
                self.saw_worker = True
                self._look(environment, f"environment of {process.name}")
                self._look((process / "cmdline").read_bytes(), f"argv of {process.name}")

    def _look(self, content: bytes, where: str, words: tuple[str, ...] = SECRET_WORDS) -> None:
        if any(word.encode() in content for word in words):
            self.found.add(where)


def test_a_playbook_that_cannot_be_read_is_told_with_its_place(tmp_path: Path) -> None:
    ansible, _ = client(tmp_path)
    with pytest.raises(PlaybookError) as caught:
        ansible.run(Play(playbook="broken.yml", inventory=inventory(tmp_path, "one")))
    assert caught.value.message == (
        "broken.yml could not be run: couldn't resolve module/action "
        "'ansible.builtin.no_such_module'. This often indicates a misspelling, missing "
        "collection, or incorrect module path. (broken.yml:4)"
    )
