from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from kvdeploy.adapters.local import machine
from kvdeploy.polling import wait_for
from kvdeploy.proc import spawn_session
from tests.conftest import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield int(s.getsockname()[1])


def test_a_port_is_free_until_somebody_listens(taken: int) -> None:
    assert not machine.port_is_free(taken)
    assert not machine.port_is_free(taken, "0.0.0.0")


def test_a_port_is_free_again_once_its_listener_is_gone() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
    assert machine.port_is_free(port)


def test_an_address_that_is_not_ours_is_not_free() -> None:
    assert not machine.port_is_free(39999, "192.0.2.1")


def test_the_holder_of_a_port_is_named(taken: int) -> None:
    assert machine.port_holder(taken) == os.getpid()
    assert machine.describe(os.getpid()).endswith(f" (pid {os.getpid()})")


def test_nobody_holds_a_free_port() -> None:
    port = next(machine.free_ports(39300))
    assert machine.port_holder(port) is None
    assert machine.describe(None) == "another process"


def test_a_process_that_is_gone_is_called_by_its_number() -> None:
    assert machine.describe(2**22 + 1) == f"pid {2**22 + 1}"


def test_free_ports_skip_those_taken_and_those_to_avoid(taken: int) -> None:
    found = machine.free_ports(taken)
    first = next(found)
    assert first > taken
    others = machine.free_ports(taken, avoid=(first,))
    assert next(others) == next(found)


def test_free_ports_end_with_the_last_one() -> None:
    assert all(port <= 65535 for port in machine.free_ports(65530))


def test_the_disk_of_a_folder_that_is_yet_to_be_made_is_that_of_its_parent(tmp_path: Path) -> None:
    free = machine.disk_free_gib(tmp_path / "not" / "there")
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=0.5)


def test_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert machine.cores() == (max(before),)
    finally:
        os.sched_setaffinity(0, before)
    assert machine.cores() == tuple(sorted(before))


def test_memory_is_there() -> None:
    assert 0 < machine.memory_available_gib() < 100_000
    assert machine.resident_gib([os.getpid(), 2**22 + 1]) > 0


# --- GPUs ------------------------------------------------------------------------------------
@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH on which there is an nvidia-smi; it is never run."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/false\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_nvidia_smi_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus(FakeRunner()) == ()


@pytest.mark.usefixtures("smi")
def test_gpus_are_listed_with_their_memory() -> None:
    runner = FakeRunner((("nvidia-smi", "--query-gpu=memory.total"), (0, "143360\n81920\n\n")))
    assert machine.gpus(runner) == (140.0, 80.0)


@pytest.mark.usefixtures("smi")
def test_a_driver_that_fails_means_no_gpus() -> None:
    assert machine.gpus(FakeRunner((("nvidia-smi",), (9, "couldn't communicate\n")))) == ()


# --- sessions --------------------------------------------------------------------------------
PARENT = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "time.sleep(60)\n"
)


@pytest.mark.real_process
def test_a_session_is_its_leader_and_every_descendant(tmp_path: Path) -> None:
    before = time.time()
    leader = spawn_session((sys.executable, "-c", PARENT), env={}, log=tmp_path / "log")
    members: list[int] = []
    try:
        members = wait_for(lambda: two_of(leader.pid), timeout_s=10, interval_s=0.02) or []
        assert len(members) == 2
        assert leader.pid in members
        assert machine.session_members(leader.pid, since=before) == members
        # The number was another's once: what is older than `since` is not ours.
        assert machine.session_members(leader.pid, since=time.time() + 60) == []
        leader.kill()
        leader.wait()
        assert machine.session_members(leader.pid) == [p for p in members if p != leader.pid]
    finally:
        for pid in (leader.pid, *members):
            kill(pid)
        leader.wait()


@pytest.mark.real_process
def test_the_dead_that_nobody_has_buried_are_no_members(tmp_path: Path) -> None:
    leader = spawn_session((sys.executable, "-c", ""), env={}, log=tmp_path / "log")
    gone = wait_for(
        lambda: None if machine.session_members(leader.pid) else True,
        timeout_s=10,
        interval_s=0.02,
    )
    leader.wait()
    assert gone


HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[__import__("os").uname().machine], 0)
"""
"""Ends its first thread (the system call exit, not exit_group) and lives on in another."""


@pytest.mark.real_process
def test_who_has_lost_the_first_thread_alone_is_a_member_still(tmp_path: Path) -> None:
    leader = spawn_session((sys.executable, "-c", HEADLESS), env={}, log=tmp_path / "log")
    try:
        zombie = wait_for(
            lambda: psutil.Process(leader.pid).status() == psutil.STATUS_ZOMBIE or None,
            timeout_s=10,
            interval_s=0.02,
        )
        assert zombie
        assert machine.session_members(leader.pid) == [leader.pid]
    finally:
        kill(leader.pid)
        leader.wait()
    assert machine.session_members(leader.pid) == []


@pytest.mark.real_process
def test_threads_are_moved_to_their_cores(tmp_path: Path) -> None:
    child = spawn_session(
        (sys.executable, "-c", "import time; time.sleep(60)"), env={}, log=tmp_path / "log"
    )
    try:
        machine.move_to_cores([child.pid, 2**22 + 1], [machine.cores()[-1]])
        assert os.sched_getaffinity(child.pid) == {machine.cores()[-1]}
    finally:
        kill(child.pid)
        child.wait()


def two_of(leader: int) -> list[int] | None:
    members = machine.session_members(leader)
    return members if len(members) == 2 else None


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
