"""Makes a machine fit to be copied: what is of it alone goes, what it was made by is written down.

Runs on the machine as root, by its own Python (3.10 or newer), with the standard library alone.
stdin: {"document": {"path": PLACE, "content": {...}}, "etc": FOLDER, "data": FOLDER}. stdout: how
many things were removed, and which that must not be in an image are still there. Can be run again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess  # noqa: TID251  # a program of its own: nothing of kvdeploy is on a node
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOMES = ("/root", "/home/*")
IN_HOMES = (".ssh/*", ".ssh/.[!.]*", ".aws", ".netrc", ".git-credentials", ".docker/config.json")
SECRETS = (
    "/etc/ssh/ssh_host_*",
    *(f"{home}/{name}" for home in HOMES for name in IN_HOMES),
    "/var/lib/cloud/instance",
    "/var/lib/cloud/instances",
    "/var/lib/cloud/data",
    "/var/lib/cloud/sem",
)
"""Machines that share these are taken for each other, or tell what they must not. So it is with the
folder `etc`, where engines and router keep their secrets."""
TRACES_IN_HOMES = (
    *(".ansible", ".bash_history", ".cache", ".lesshst", ".python_history"),
    *(".sudo_as_admin_successful", ".viminfo", ".wget-hsts"),
)
TRACES = (
    *(f"{home}/{name}" for home in HOMES for name in TRACES_IN_HOMES),
    "/etc/udev/rules.d/70-persistent-net.rules",
    "/var/cache/apt/archives/*.deb",
    "/var/cache/kvdeploy",
    "/var/lib/dbus/machine-id",
    "/var/lib/dhcp/*",
    "/var/lib/systemd/credential.secret",
    "/var/lib/systemd/random-seed",
    "/var/log/journal/*",
)
LOGS = "/var/log"
SCRATCH = ("/tmp", "/var/tmp")  # noqa: S108  # emptied, not used
IN_USE = ("systemd-private-", "snap-private-tmp", "ansible_")
"""What is in SCRATCH of services that run, and of the very module that runs this."""
MACHINE_ID = Path("/etc/machine-id")


def found(patterns: Iterable[str]) -> list[Path]:
    return [path for one in patterns for path in sorted(Path("/").glob(one.lstrip("/")))]


def scratch() -> Iterator[Path]:
    for place in SCRATCH:
        yield from (p for p in sorted(Path(place).iterdir()) if not p.name.startswith(IN_USE))


def logs() -> Iterator[Path]:
    """Files, never folders: services want theirs back, and would not all make them."""
    for path in sorted(Path(LOGS).rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path


def data(place: Path) -> list[Path]:
    """Weights and caches on the root disk; a mounted instance store goes with its machine."""
    return sorted(place.iterdir()) if place.is_dir() and not place.is_mount() else []


def remove(path: Path) -> int:
    """Away with it, whatever it is. 1, for the count."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return 1


def write(document: dict[str, Any]) -> None:
    """Whole or not at all."""
    place = Path(document["path"])
    part = place.with_suffix(".part")
    part.write_text(json.dumps(document["content"], indent=1) + "\n", encoding="utf-8")
    part.chmod(0o644)
    part.replace(place)


def close_journal() -> None:
    """Have it written to memory from now on: the journal would make its files anew."""
    argv = ("journalctl", "--relinquish-var")
    subprocess.run(argv, check=False, capture_output=True, timeout=60)


def main() -> None:
    job = json.load(sys.stdin)
    secret = (job["etc"], *SECRETS)
    write(job["document"])
    close_journal()
    every = (found(secret), found(TRACES), scratch(), logs(), data(Path(job["data"])))
    removed = sum(sum(map(remove, list(some))) for some in every)
    MACHINE_ID.write_text("", encoding="utf-8")  # empty, not missing: the next boot fills it
    os.sync()
    left = [str(path) for path in found(secret)]
    sys.stdout.write(json.dumps({"removed": removed, "left": left}) + "\n")


if __name__ == "__main__":
    main()
