"""Supervised processes, with real ones: what is started is watched, and what is stopped is gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.model.launch import GENERATION, LaunchSpec, Readiness, RestartPolicy
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_process

SERVER = str(Path(__file__).parents[1] / "data" / "server.py")


def launch(*words: str, timeout_s: float = 10, port: int | None = None) -> LaunchSpec:
    port = port or next(machine.free_ports(29300))
    return LaunchSpec(
        name="thing",
        role="prefill",
        argv=(sys.executable, SERVER, str(port), *words),
        env={"MARK": f"started-{GENERATION}"},
        ports=(port,),
        ready=Readiness(url=f"http://127.0.0.1:{port}/health", timeout_s=timeout_s),
        restart=RestartPolicy(max_restarts=1, backoff_s=0.1),
        stop_grace_s=1,
    )


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.stop("thing")


def wait_phase(processes: Processes, *phases: str, timeout_s: float = 15) -> str:
    def look() -> str | None:
        phase = processes.observe("thing").phase
        return phase if phase in phases else None

    found = wait_for(look, timeout_s=timeout_s, interval_s=0.05)
    assert found, processes.observe("thing")
    return found


def supervisor(processes: Processes) -> int:
    state = processes.observe("thing").state
    assert state is not None
    return state.supervisor_pid


def leader(processes: Processes) -> int:
    state = processes.observe("thing").state
    assert state is not None
    assert state.pid is not None
    return state.pid


def test_a_started_process_becomes_ready_and_a_stopped_one_is_gone(processes: Processes) -> None:
    spec = launch("child")
    processes.start(spec)
    wait_phase(processes, "ready")
    seen = processes.observe("thing")
    assert processes.runs(spec)
    assert len(seen.pids) == 2

    processes.stop("thing")

    assert processes.observe("thing").phase == "stopped"
    assert not [p for p in seen.pids if _alive(p)]
    assert not processes.runs(spec)


def test_each_start_has_a_generation_of_its_own(processes: Processes) -> None:
    processes.start(launch("die-after=1"))
    wait_phase(processes, "ready")
    first = processes.observe("thing").state
    os.kill(leader(processes), signal.SIGKILL)
    wait_for(lambda: processes.observe("thing").phase != "ready" or None, timeout_s=5)
    wait_phase(processes, "ready")
    second = processes.observe("thing").state
    assert first is not None
    assert second is not None
    assert first.generation != second.generation
    assert second.restarts == 1
    assert f"started-{second.generation}" in processes.log("thing").read_text()


def test_what_a_killed_process_leaves_behind_is_cleaned_up_before_the_restart(
    processes: Processes,
) -> None:
    processes.start(launch("child"))
    wait_phase(processes, "ready")
    before = processes.observe("thing").pids
    os.kill(leader(processes), signal.SIGKILL)
    wait_for(lambda: processes.observe("thing").phase != "ready" or None, timeout_s=5)
    wait_phase(processes, "ready")
    assert not [p for p in before if _alive(p)]


def test_a_process_that_dies_before_it_is_ready_is_not_started_again(processes: Processes) -> None:
    processes.start(launch("no-listen", "die-after=0.2"))
    wait_phase(processes, "failed")
    state = processes.observe("thing").state
    assert state is not None
    assert state.reason == "ended (3) before it was ready"
    assert state.restarts == 0


def test_a_process_that_never_gets_ready_is_given_up_in_time(processes: Processes) -> None:
    processes.start(launch("no-listen", timeout_s=0.5))
    wait_phase(processes, "failed")
    seen = processes.observe("thing")
    assert seen.state is not None
    assert seen.state.reason == "was not ready within 0 s"
    assert seen.pids == ()


def test_too_many_restarts_end_in_failure(processes: Processes) -> None:
    processes.start(launch("die-after=0.5"))
    wait_phase(processes, "failed", timeout_s=20)
    state = processes.observe("thing").state
    assert state is not None
    assert state.restarts == 1


def test_a_process_that_ignores_sigterm_is_killed(processes: Processes) -> None:
    processes.start(launch("ignore-term"))
    wait_phase(processes, "ready")
    pid = leader(processes)
    processes.stop("thing")
    assert not _alive(pid)


def test_who_left_the_session_is_stopped_too_and_nobody_is_left_unburied(
    processes: Processes,
) -> None:
    processes.start(launch("child", "runaway"))
    wait_phase(processes, "ready")
    log = processes.log("thing").read_text()
    runaway = int(log.partition("runaway ")[2].split()[0])
    pids = {*processes.observe("thing").pids, runaway}
    assert len(pids) == 3

    processes.stop("thing")

    assert not [p for p in pids if psutil.pid_exists(p)]


def test_a_frozen_process_can_be_stopped(processes: Processes) -> None:
    processes.start(launch())
    wait_phase(processes, "ready")
    pid = leader(processes)
    processes.pause("thing")
    processes.stop("thing")
    assert not _alive(pid)


def test_a_frozen_process_is_seen_as_such_until_it_is_thawed(processes: Processes) -> None:
    spec = launch()
    processes.start(spec)
    wait_phase(processes, "ready")
    processes.pause("thing")
    wait_phase(processes, "frozen")
    assert processes.runs(spec)
    processes.resume("thing")
    wait_phase(processes, "ready")


def test_a_process_is_found_again_by_another_way_to_its_folder(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "aside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    Processes(tmp_path / "aside" / "..").start(launch())
    wait_phase(processes, "ready")
    pid = leader(processes)
    Processes(tmp_path / "link").stop("thing")
    assert not _alive(pid)
    assert processes.observe("thing").phase == "stopped"


def scratch(processes: Processes) -> Path:
    state = processes.observe("thing").state
    assert state is not None
    return Path(state.scratch)


def test_temporary_files_of_a_process_go_with_it(processes: Processes) -> None:
    processes.start(launch())
    wait_phase(processes, "ready")
    first = scratch(processes)
    assert list(first.iterdir())
    os.kill(leader(processes), signal.SIGKILL)
    wait_for(lambda: processes.observe("thing").phase != "ready" or None, timeout_s=5)
    wait_phase(processes, "ready")
    second = scratch(processes)
    assert second != first
    assert not first.exists()
    os.kill(supervisor(processes), signal.SIGKILL)  # nobody is left to clean up but us
    wait_for(lambda: not processes.observe("thing").supervised or None, timeout_s=5)
    processes.stop("thing")
    assert not second.exists()


def test_nothing_outlives_a_killed_supervisor(processes: Processes) -> None:
    processes.start(launch("ignore-term", "child"))
    wait_phase(processes, "ready")
    pids = processes.observe("thing").pids
    os.kill(supervisor(processes), signal.SIGKILL)
    wait_for(lambda: not processes.observe("thing").supervised or None, timeout_s=5)
    assert processes.observe("thing").phase in ("unwatched", "dead")

    processes.stop("thing")

    assert not [p for p in pids if _alive(p)]


def test_a_taken_port_is_named_with_its_holder(processes: Processes) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        processes.start(launch(port=port))
        wait_phase(processes, "failed", timeout_s=20)
    state = processes.observe("thing").state
    assert state is not None
    assert state.reason.startswith(f"cannot start: port {port} is taken by ")
    assert f"(pid {os.getpid()})" in state.reason


def test_the_shell_of_the_user_does_not_reach_the_process(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    processes.start(launch())
    wait_phase(processes, "ready")
    environ = Path(f"/proc/{leader(processes)}/environ").read_text()
    assert "VLLM_SOMETHING" not in environ
    assert "MARK=started-" in environ


def test_threads_are_moved_to_their_cores_once_ready(processes: Processes) -> None:
    core = machine.cores()[-1]
    processes.start(launch().model_copy(update={"cpus": (core,)}))
    wait_phase(processes, "ready")
    assert os.sched_getaffinity(leader(processes)) == {core}


def test_another_spec_under_the_same_name_replaces_the_process(processes: Processes) -> None:
    processes.start(launch())
    wait_phase(processes, "ready")
    pid = leader(processes)
    other = launch("say=changed")
    assert not processes.runs(other)
    processes.start(other)
    wait_phase(processes, "ready")
    assert not _alive(pid)
    assert processes.runs(other)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_other_clusters_were_given_is_known_before_they_listen(tmp_path: Path) -> None:
    """Two that are brought up at the same time do not take the same ports."""
    one, other = Processes(tmp_path / "one"), Processes(tmp_path / "other")
    spec = launch().model_copy(update={"ports": (29999,), "argv": (sys.executable, "-c", "0")})
    try:
        one.start(spec)
        assert 29999 in other.ports_of_others()
        assert 29999 not in one.ports_of_others()
    finally:
        one.stop("thing")
    assert 29999 not in other.ports_of_others()
