"""The parent of one process: starts it, waits until it is ready, pins it, restarts it, stops it.

Runs as `python -m kvdeploy.adapters.local.supervisor DIR`, detached from the command line that
began it. DIR holds `launch.json` (what to run) and gets `state.json` (how it goes), `log` (what
the process says) and `supervisor.log`. It inherits DIR's lock, held from birth: who finds the lock
free knows that nobody watches. It dies with nothing left behind: the kernel tells the process
when its supervisor is gone, and every descendant becomes its own child (`adopt_orphans`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from kvdeploy.adapters import http
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.store import write_text
from kvdeploy.errors import ToolError
from kvdeploy.model.launch import LaunchSpec, ProcessState
from kvdeploy.polling import SystemClock
from kvdeploy.proc import adopt_orphans, spawn_session

if TYPE_CHECKING:
    import subprocess  # noqa: TID251  # a type only
    from types import FrameType
    from typing import Any

    from kvdeploy.model.launch import Readiness

TICK_S: Final = 0.2
PORTS_WAIT_S: Final = 5.0
PIN_EVERY_S: Final = 1.0
INHERITED: Final = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All that a supervised process sees of the caller's environment: what is in the user's shell
must not change what an engine does."""


def digest_of(spec: LaunchSpec) -> str:
    """Name a LaunchSpec's content."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]


class Supervisor:
    def __init__(self, directory: Path) -> None:
        self.dir = directory
        text = (directory / "launch.json").read_text(encoding="utf-8")
        self.spec = LaunchSpec.model_validate_json(text)
        self.clock = SystemClock()
        self.stopping = False
        self.restarts: list[float] = []
        self.state = ProcessState(
            name=self.spec.name,
            phase="starting",
            digest=digest_of(self.spec),
            supervisor_pid=os.getpid(),
        )

    def run(self) -> None:
        """Watch until told to stop, or until the process is beyond restarting."""
        self.set(phase="starting")
        adopt_orphans()
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_signal)
        was_ready = False
        while not self.stopping:
            why = self.run_once()
            was_ready = was_ready or self.state.ready_at is not None
            if self.stopping:
                break
            self.say(f"{self.spec.name}: {why}")
            if not was_ready or self.exhausted():
                self.set(phase="failed", pid=None, reason=why)
                return
            self.back_off(why)
        self.set(phase="stopped", pid=None, reason="stopped")

    def run_once(self) -> str:
        """Start the process once and see it to its end; say how it ended."""
        self.set(phase="starting", pid=None, started_at=None, ready_at=None)
        if taken := self.taken_port():
            holder = machine.describe(machine.port_holder(taken))
            return f"cannot start: port {taken} is taken by {holder}"
        generation = f"{time.time_ns() // 1_000_000:x}"
        spec = self.spec.resolved(generation)
        inherited = {k: v for k in INHERITED if (v := os.environ.get(k)) is not None}
        # A short path: it holds Unix sockets, whose names may have 107 characters.
        scratch = tempfile.mkdtemp(prefix="kvd-")
        # What torch compiles is kept from start to start: by default it lies in TMPDIR.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        temporary = {"TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        started_at = time.time()
        try:
            child = spawn_session(
                spec.argv,
                env=inherited | temporary | spec.env,
                log=self.dir / "log",
            )
        except ToolError as e:
            shutil.rmtree(scratch, ignore_errors=True)
            return e.message
        self.set(
            phase="starting",
            pid=child.pid,
            started_at=started_at,
            generation=generation,
            scratch=scratch,
        )
        self.say(f"{spec.name}: started, pid {child.pid}, generation {generation}")
        try:
            return self.watch(child, spec)
        finally:
            self.end_session(child)
            shutil.rmtree(scratch, ignore_errors=True)

    def watch(self, child: subprocess.Popen[bytes], spec: LaunchSpec) -> str:
        late = self.clock.now() + spec.ready.timeout_s
        pin_at = self.clock.now()
        ready = False
        while not self.stopping:
            code = child.poll()
            if code is not None:
                how = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
                )
                return f"{how}{'' if ready else ' before it was ready'}"
            now_ready = not ready and answers(spec.ready)
            # vLLM moves its workers onto the last core on its way up (0.32), all engines onto
            # the same: they are brought back again and again until the process is ready.
            if spec.cpus and not ready and (now_ready or self.clock.now() >= pin_at):
                machine.move_to_cores(machine.session_members(child.pid), spec.cpus)
                pin_at = self.clock.now() + PIN_EVERY_S
            if now_ready:
                ready = True
                self.set(phase="ready", ready_at=time.time(), reason="")
                self.say(f"{spec.name}: ready")
            if not ready and self.clock.now() > late:
                return f"was not ready within {spec.ready.timeout_s:.0f} s"
            self.clock.sleep(TICK_S)
        return "stopped"

    def end_session(self, child: subprocess.Popen[bytes]) -> None:
        """Leave no descendant: ask, wait, kill."""
        if child.poll() is None:
            if self.stopping:
                self.set(phase="stopping")
            child.terminate()
            ends = self.clock.now() + self.spec.stop_grace_s
            while child.poll() is None and self.clock.now() < ends:
                self.clock.sleep(0.05)
        for _ in range(50):
            # The dead among them are buried before we go: who looks then sees none of them.
            if child.poll() is not None and self.all_are_buried():
                return
            for process in psutil.Process().children(recursive=True):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.clock.sleep(0.05)

    @staticmethod
    def all_are_buried() -> bool:
        """Reap what has ended; whether no descendant is left. Orphans are our children too."""
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return True
        return False

    def taken_port(self) -> int | None:
        """A port that stays taken. One just left by our last run is given time to clear."""
        ends = self.clock.now() + PORTS_WAIT_S
        while True:
            taken = [p for p in self.spec.ports if not machine.port_is_free(p, self.spec.host)]
            if not taken or self.stopping:
                return None
            if self.clock.now() > ends:
                return taken[0]
            self.clock.sleep(TICK_S)

    def exhausted(self) -> bool:
        now, policy = self.clock.now(), self.spec.restart
        self.restarts = [t for t in self.restarts if t > now - policy.window_s]
        return len(self.restarts) >= policy.max_restarts

    def back_off(self, why: str) -> None:
        wait_s = self.spec.restart.backoff_s * 2 ** len(self.restarts)
        self.restarts.append(self.clock.now())
        self.set(
            phase="backoff",
            pid=None,
            ready_at=None,
            restarts=self.state.restarts + 1,
            reason=f"{why}; starting again in {wait_s:.0f} s",
        )
        ends = self.clock.now() + wait_s
        while not self.stopping and self.clock.now() < ends:
            self.clock.sleep(0.05)

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def set(self, **changes: Any) -> None:  # noqa: ANN401  # ProcessState checks them
        self.state = ProcessState.model_validate(self.state.model_dump() | changes)
        write_text(self.dir / "state.json", self.state.model_dump_json(indent=2) + "\n")

    @staticmethod
    def say(text: str) -> None:
        sys.stdout.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")
        sys.stdout.flush()


def answers(ready: Readiness) -> bool:
    """Whether its URL answers 200 within two seconds."""
    return http.get(ready.url, timeout_s=2, trust=ready.trust).status == 200


def main() -> None:
    Supervisor(Path(sys.argv[1])).run()


if __name__ == "__main__":
    main()
