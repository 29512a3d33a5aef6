"""The private folder of one run of Ansible, and everything that runs because of it.

Every process of a run has the folder's path in its environment, so that what is left of a run can
be found and ended: Ansible's workers leave their process group, and so do the masters of shared
SSH connections. A folder whose lock nobody holds is what a killed run left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER: Final = "KVDEPLOY_PLAY"
"""The variable that names the folder."""
PREFIX: Final = "kv-play-"
"""Short: the path of a socket in it has 107 letters at most."""
LOCK: Final = "lock"
END_S: Final = 10.0


class Private:
    """A folder that only its owner can look into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inventory = path / "inventory.json"
        self.variables = path / "variables.json"
        self.secrets = path / "secrets.json"
        self.job = path / "job.json"
        self.events = path / "events.jsonl"
        self.control = path / "c"
        """ssh's sockets."""
        self.runner = path / "runner"
        """What ansible-runner writes; its artifacts hold the environment."""
        self.ansible = path / "ansible"
        """What Ansible itself writes."""

    def write(self, file: Path, document: Any) -> None:  # noqa: ANN401
        """Write JSON that the owner alone can read."""
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            json.dump(document, f)


@contextmanager
def private_folder() -> Iterator[Private]:
    """Make a folder; at the end, end all that runs because of it, and remove it."""
    private = Private(Path(tempfile.mkdtemp(prefix=PREFIX)))
    try:
        # Under another name first: a lock that is there is held by somebody, or by nobody any more.
        taking = private.path / f"{LOCK}.taking"
        taking.touch(mode=0o600)
        private.events.touch(mode=0o600)
        with taking.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taking.rename(private.path / LOCK)
            for folder in (private.control, private.runner, private.ansible):
                folder.mkdir(mode=0o700)
            yield private
    finally:
        clear(private.path)


def clear(folder: Path) -> None:
    """End all that runs because of the folder, and remove it."""
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> list[Path]:
    """Do so with the folders of runs of ours that were killed; returns them."""
    cleared = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(folder)
            cleared.append(folder)
    return cleared


def end_processes(folder: Path) -> None:
    """Kill every process that the folder marks, but for this one."""

    def look() -> bool | None:
        found = list(_marked(folder))
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        return None if found else True

    wait_for(look, timeout_s=END_S, interval_s=0.05)


def _marked(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == str(folder) or _is_master(process, folder):
                yield process


def _is_master(process: psutil.Process, folder: Path) -> bool:
    """Whether it keeps a shared SSH connection of the run: it writes its title, with the path of
    its socket, over its environment.
    """
    return "".join(process.cmdline()[:1]).startswith(f"ssh: {folder}/")
