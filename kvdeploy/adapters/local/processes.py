"""Supervised processes of one cluster, from the outside: start, look, stop, pause.

Never owns a process itself: each has a detached supervisor (supervisor.py) that outlives us.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
from pydantic import ValidationError

from kvdeploy.adapters.local import machine, supervisor
from kvdeploy.adapters.local.supervisor import digest_of
from kvdeploy.adapters.store import write_text
from kvdeploy.errors import FleetError
from kvdeploy.model.launch import LaunchSpec, ProcessState
from kvdeploy.polling import wait_for
from kvdeploy.proc import spawn_detached

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE: Final = supervisor.__name__


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One process as it is now."""

    name: str
    supervised: bool
    state: ProcessState | None
    """The last word of its supervisor; stale unless `supervised`."""
    pids: tuple[int, ...]
    """Every living process of its session."""
    frozen: bool = False
    """Stopped by a signal, as smoke's control does for a moment."""

    @property
    def phase(self) -> str:
        if self.state is None:
            return "starting" if self.supervised else "absent"
        if self.frozen:
            return "frozen"
        if self.supervised or self.state.phase in ("stopped", "failed"):
            return self.state.phase
        return "unwatched" if self.pids else "dead"


class Processes:
    def __init__(self, directory: Path) -> None:
        # One name for one folder: supervisors are found by it, whichever way led here.
        self.dir = directory.resolve()

    def names(self) -> list[str]:
        if not self.dir.is_dir():
            return []
        return sorted(p.name for p in self.dir.iterdir() if (p / "launch.json").exists())

    def log(self, name: str) -> Path:
        return self.dir / name / "log"

    def spec(self, name: str) -> LaunchSpec | None:
        try:
            text = (self.dir / name / "launch.json").read_text(encoding="utf-8")
            return LaunchSpec.model_validate_json(text)
        except (OSError, ValidationError):
            return None

    def observe(self, name: str) -> Observed:
        state = self._state(name)
        pids: tuple[int, ...] = ()
        if state is not None and state.pid is not None:
            pids = tuple(machine.session_members(state.pid, since=state.started_at))
        return Observed(
            name=name,
            supervised=self._is_locked(name),
            state=state,
            pids=pids,
            frozen=machine.is_frozen(pids),
        )

    def ports_of_others(self) -> set[int]:
        """What other clusters on this machine were given: they may not listen there yet."""
        given: set[int] = set()
        for _, folder in _supervisors():
            if folder.parent != self.dir and (spec := Processes(folder.parent).spec(folder.name)):
                given |= {*spec.ports}
        return given

    def runs(self, spec: LaunchSpec) -> bool:
        """Whether exactly `spec` is being supervised, ready or on its way."""
        seen = self.observe(spec.name)
        return (
            seen.supervised
            and seen.phase in ("starting", "ready", "backoff", "frozen")
            and (seen.state is None or seen.state.digest == digest_of(spec))
        )

    def start(self, spec: LaunchSpec) -> None:
        """Begin to supervise `spec`; anything that ran under its name is stopped first."""
        self.stop(spec.name)
        directory = self.dir / spec.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "state.json").unlink(missing_ok=True)
        if (log := directory / "log").exists():
            log.replace(directory / "log.1")
        write_text(directory / "launch.json", spec.model_dump_json(indent=2) + "\n")
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock passes to the child with the file, so that there is no moment in which a
            # supervisor lives and nobody could know.
            spawn_detached(
                (sys.executable, "-m", MODULE, str(directory)),
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                log=directory / "supervisor.log",
                keep_fd=lock,
            )
        finally:
            os.close(lock)

    def stop(self, name: str) -> None:
        """End the process, its supervisor and every descendant. Harmless when there is none.

        Raises:
            FleetError: something is still alive after SIGKILL.
        """
        spec = self.spec(name)
        grace_s = (spec.stop_grace_s if spec else 20.0) + 10.0
        if self._is_locked(name):
            pid = wait_for(lambda: self._supervisor_pid(name), timeout_s=5)
            if pid is not None:
                _signal(pid, signal.SIGCONT)
                self.resume(name)  # a stopped process cannot end itself
                _signal(pid, signal.SIGTERM)
                if not self._is_let_go(name, within_s=grace_s):
                    _signal(pid, signal.SIGKILL)
                    self._is_let_go(name, within_s=5)
        wait_for(lambda: None if self._kill_leftovers(name) else True, timeout_s=10)
        if (state := self._state(name)) is not None and state.scratch:
            shutil.rmtree(state.scratch, ignore_errors=True)
        if left := self.observe(name).pids:
            msg = f"{name}: processes {', '.join(map(str, left))} do not end"
            raise FleetError(msg, hint="They may hang in the kernel; look with 'ps'.")

    def forget(self, name: str) -> None:
        """Stop it and remove what is known of it."""
        self.stop(name)
        shutil.rmtree(self.dir / name, ignore_errors=True)

    def hang_up(self, name: str) -> None:
        """Tell the process, once it is ready, to read its configuration again."""
        seen = self.observe(name)
        if seen.phase == "ready" and seen.state is not None and seen.state.pid is not None:
            _signal(seen.state.pid, signal.SIGHUP)

    def pause(self, name: str) -> None:
        """Freeze every process of `name` (not its supervisor), until `resume`."""
        for pid in self.observe(name).pids:
            _signal(pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        for pid in self.observe(name).pids:
            _signal(pid, signal.SIGCONT)

    def _is_let_go(self, name: str, *, within_s: float) -> bool:
        """Wait for the supervisor to end; whether it did."""
        gone = wait_for(lambda: None if self._is_locked(name) else True, timeout_s=within_s)
        return gone is not None

    def _kill_leftovers(self, name: str) -> bool:
        left = self.observe(name).pids
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return bool(left)

    def _state(self, name: str) -> ProcessState | None:
        try:
            text = (self.dir / name / "state.json").read_text(encoding="utf-8")
            return ProcessState.model_validate_json(text)
        except (OSError, ValidationError):
            return None

    def _is_locked(self, name: str) -> bool:
        try:
            lock = os.open(self.dir / name / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(lock)

    def _supervisor_pid(self, name: str) -> int | None:
        """Find the supervisor by its command line: right even before it has said a word."""
        return next((pid for pid, folder in _supervisors() if folder == self.dir / name), None)


def _supervisors() -> Iterator[tuple[int, Path]]:
    """All on this machine, whoever's: their ids, and the folders of what they look after."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[2:3] == [MODULE] and len(words) > 3:
            yield int(process.pid), Path(words[3])


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
