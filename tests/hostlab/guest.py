"""One host of a lab: its files, its start and end, and commands in it."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvdeploy.polling import wait_for
from tests.hostlab import base, hardware, machine
from tests.hostlab.faults import FAULTS, Fault
from tests.hostlab.shell import Completed, LabError, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.hostlab.net import Place

BOOT_S: Final = 60
NAMESPACES: Final = ("--mount", "--pid", "--uts", "--net", "--ipc", "--cgroup")


class Host:
    """A machine as its users see it: a name, an address, a power switch."""

    def __init__(
        self,
        place: Place,
        name: str,
        index: int,
        binds: Mapping[Path, Path],
        *,
        address: str | None = None,
        cores: tuple[int, ...] = (),
    ) -> None:
        """`address` is one of the lab's subnet; None: the next one. With `cores` it has these of
        this machine's alone."""
        self._place, self.name, self._index, self._binds = place, name, index, dict(binds)
        self.address, self._cores = address or place.address(index), cores
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self._place.root / "hosts" / self.name

    @property
    def root(self) -> Path:
        """Its file system, seen from outside; never what is mounted over it while it runs."""
        return self.folder / "root"

    @property
    def hardware(self) -> Path:
        """The files that its hardware is made of, seen from outside."""
        return self.root / hardware.HOME.lstrip("/")

    @property
    def cgroup(self) -> Path:
        return self._place.cgroup(self.name)

    # --- making it
    def prepare(
        self,
        lower: Sequence[Path],
        neighbours: Mapping[str, str],
        kind: str,
        login_key: str = "",
        host_key: tuple[str, str] | None = None,
    ) -> None:
        """Its file system over the shared layers, and what makes it another host than its like."""
        machine.mount(self._place, self.name, lower, self.folder)
        etc = self.root / "etc"
        (etc / "hostname").write_text(f"{self.name}\n")
        lines = (f"{address} {name}" for name, address in neighbours.items())
        (etc / "hosts").write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
        key = etc / "ssh/ssh_host_ed25519_key"
        if host_key is None:
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", key)
        else:
            for path, text in zip((key, key.with_suffix(".pub")), host_key, strict=True):
                path.touch(mode=0o600)
                path.write_text(f"{text.strip()}\n")
        public = (self._place.root / "id.pub").read_text() + login_key
        for home, owner in (("root", 0), (f"home/{base.USER}", base.UID)):
            keys = self.root / home / ".ssh/authorized_keys"
            keys.write_text(public)
            keys.chmod(0o600)
            os.chown(keys, owner, owner)
        hardware.attach(self.root, self.folder / "disks", kind)

    def capture(self, to: Path) -> Path:
        """Its disk as an image of it would have it, for HostLab.up. Switch it off first.

        Hardware is no part of an image, but for the modules that are installed.
        """
        run("cp", "--archive", self.folder / "upper", to)
        for path in (to / hardware.HOME.lstrip("/")).iterdir():
            if path.name not in hardware.ON_DISK:
                run("rm", "--recursive", "--force", path)
        return to

    @property
    def host_key(self) -> str:
        """Its line of known_hosts."""
        public = (self.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        return f"{self.address} {public[0]} {public[1]}\n"

    # --- power
    def start(self) -> None:
        """Switch it on; `wait` tells when it is up."""
        with (self.folder / "console.log").open("ab") as log:
            self._process = machine.launch(
                self._place, self.name, self.root, self._binds, log, cores=self._cores
            )

    def wait(self, within_s: float = BOOT_S, *, failed_units: bool = False) -> None:
        """Until SSH answers and systemd has started everything, in vain or not.

        Raises LabError, with evidence; so too for a unit that failed, unless `failed_units`.
        """
        if not wait_for(self._answers, timeout_s=within_s, interval_s=0.05):
            msg = f"{self.name} has no SSH after {within_s} s: {self._console()}"
            raise LabError(msg)
        state = wait_for(self._state, timeout_s=BOOT_S, interval_s=0.05)
        if state != "running" and not (failed_units and state == "degraded"):
            failed = self.run("systemctl", "--failed", "--no-legend", "--plain").stdout
            msg = f"{self.name} is {state} after its start: {failed}{self._console()}"
            raise LabError(msg)

    def _state(self) -> str | None:
        # It says nothing when it is asked before it listens.
        return self.run("systemctl", "is-system-running", "--wait").stdout.strip() or None

    def _answers(self) -> bool | None:
        if self._process is not None and self._process.poll() is not None:
            msg = f"{self.name} went off at its start: {self._console()}"
            raise LabError(msg)
        try:
            with socket.create_connection((self.address, 22), 0.5) as s:
                return s.recv(4) == b"SSH-" or None
        except OSError:
            return None

    def _console(self) -> str:
        log = self.folder / "console.log"
        return log.read_text(errors="replace")[-1500:] if log.exists() else "(no console)"

    @property
    def running(self) -> bool:
        return self._leader() is not None

    def kill(self) -> None:
        """Power loss: every process of it is gone at once, its disk stays."""
        machine.cut(self.cgroup)
        self.reap()

    def reap(self) -> None:
        """Take note that it is off."""
        if self._process is not None:
            self._process.wait(30)
            self._process = None

    def boot(self) -> None:
        """On again after `kill`, and wait until it is up; what was broken may fail to start."""
        self.start()
        self.wait(failed_units=True)

    def reboot(self) -> None:
        """Ask its systemd to, and wait until it is up again."""
        before = self._leader()
        self.run("systemctl", "reboot")

        def new() -> bool | None:
            # Not by asking in it: a stranger that enters while it ends holds it up for ten seconds.
            return self._leader() not in {before, None} or None

        if not wait_for(new, timeout_s=BOOT_S, interval_s=0.1):
            msg = f"{self.name} does not come back: {self._console()}"
            raise LabError(msg)
        self.wait(failed_units=True)

    # --- in it
    def _leader(self) -> int | None:
        """The process that is the guest's PID 1; another one after each reboot."""
        procs = self.cgroup / "payload/init.scope/cgroup.procs"
        with suppress(FileNotFoundError, IndexError, OSError):
            return int(procs.read_text().split()[0])
        return None

    def run(self, *argv: str, timeout_s: float = 120, input_text: str | None = None) -> Completed:
        """Run a program in the guest as root, without SSH; the caller looks at its exit code."""
        # At a reboot there is none for a while; where it was switched off there will be none.
        patience_s = 10 if self._process is not None else 0
        leader = wait_for(self._leader, timeout_s=patience_s, interval_s=0.05)
        if leader is None:
            msg = f"{self.name} is off"
            raise LabError(msg)
        return subprocess.run(
            ["nsenter", "--target", str(leader), *NAMESPACES, "--", *argv],
            check=False,
            text=True,
            capture_output=True,
            errors="replace",
            input=input_text or "",
            timeout=timeout_s,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG": "C.UTF-8"},
        )

    def must(self, *argv: str, timeout_s: float = 120) -> str:
        """What it printed. Raises LabError when it fails."""
        done = self.run(*argv, timeout_s=timeout_s)
        if done.returncode:
            msg = f"{self.name}: {' '.join(argv)} failed: {done.stderr or done.stdout}"
            raise LabError(msg)
        return done.stdout

    def read(self, path: str) -> str:
        return self.must("cat", path)

    @property
    def boot_id(self) -> str:
        return self.read("/proc/sys/kernel/random/boot_id").strip()

    # --- faults
    def fault(self, *names: str) -> None:
        """Break something: a name of README.md's table, or name=value.

        Raises LabError for an unknown one.
        """
        for told in names:
            name, _, value = told.partition("=")
            self._known(name).set(self, value)

    def heal(self, *names: str) -> None:
        """Undo faults; without a name, all of them."""
        for name in names or FAULTS:
            self._known(name).clear(self)

    def _known(self, name: str) -> Fault:
        if name not in FAULTS:
            msg = f"no fault is called {name!r}; there are {', '.join(FAULTS)}"
            raise LabError(msg)
        return FAULTS[name]
