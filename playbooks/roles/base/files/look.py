"""What is not as it was asked for on a node, in one round trip.

argv: what was asked for, as JSON. stdout: JSON of what to set up, what to refuse, and what is still
wrong. Reads only; waits, when it is asked to, until the clock is right. Runs on whatever Python the
node has, so that an unsupported system can be told too.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import time
from pathlib import Path
from typing import Any

TIME_SERVICES = ("chrony", "chronyd", "systemd-timesyncd", "ntpsec", "ntp", "openntpd")
LOCAL_SOURCE = "169.254.169.123"
HALF = {"half-installed", "half-configured", "unpacked"}


def run(*argv: str, timeout_s: float = 20) -> str:
    """What a program printed; '' when it is missing, fails or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def system() -> str:
    """'Ubuntu 24.04', 'Debian 12': the name that its makers use, and VERSION_ID."""
    told = dict(line.split("=", 1) for line in text("/etc/os-release").splitlines() if "=" in line)
    told = {key: value.strip("\"'") for key, value in told.items()}
    name = told.get("NAME", "?").replace(" GNU/Linux", "")
    return f"{name} {told.get('VERSION_ID', '')}".strip()


def differs(path: str, mode: str, sha256: str) -> bool:
    """Whether a file of ours is not there as it should be, in content, mode or owner."""
    try:
        state = Path(path).lstat()
        content = Path(path).read_bytes()
    except OSError:
        return True
    right = stat.S_ISREG(state.st_mode) and stat.S_IMODE(state.st_mode) == int(mode, 8)
    return not right or state.st_uid != 0 or hashlib.sha256(content).hexdigest() != sha256


def is_folder(path: str, owner: str) -> bool:
    """Whether a directory is there, is one, and belongs to whom it should."""
    try:
        return Path(path).is_dir() and Path(path).owner() == owner
    except (OSError, KeyError):
        return False


def home_of(user: str) -> str:
    try:
        return pwd.getpwnam(user).pw_dir
    except KeyError:
        return ""


def space_gib(path: str) -> int:
    """What is free for us: free blocks, and what we hold below `path` already."""
    there = Path(path)
    while not there.exists():
        there = there.parent
    disk = os.statvfs(there)
    held = 0
    if there == Path(path):
        device = there.stat().st_dev
        for parent, folders, names in os.walk(there):
            here = Path(parent)
            folders[:] = [f for f in folders if (here / f).lstat().st_dev == device]
            held += sum((here / name).lstat().st_blocks * 512 for name in names)
    return (disk.f_bavail * disk.f_frsize + held) // 2**30


def packages(prefixes: tuple[str, ...]) -> tuple[list[str], bool]:
    """(installed ones whose names begin so and that are not held, whether dpkg was interrupted)."""
    form = "${db:Status-Want} ${db:Status-Status} ${Package}\n"
    rows = [line.split(" ", 2) for line in run("dpkg-query", "-W", "-f", form).splitlines()]
    unheld = {n for w, s, n in rows if s == "installed" and w != "hold" and n.startswith(prefixes)}
    updates = any(Path("/var/lib/dpkg/updates").glob("[0-9]*"))
    return sorted(unheld), updates or any(status in HALF for _, status, _ in rows)


class Clock:
    """Who keeps the time, and whether it is right. A container's is another machine's."""

    def __init__(self) -> None:
        self.mine = run("systemd-detect-virt", "--container") in {"", "none"}
        states = run("systemctl", "is-active", *TIME_SERVICES).split()
        services = dict(zip(TIME_SERVICES, states))  # noqa: B905  # strict: not before 3.10
        self.service = next((name for name in services if services[name] == "active"), "")
        chrony = Path("/etc/chrony")
        sources = [chrony / "chrony.conf", *chrony.glob("*.d/*")] if chrony.is_dir() else []
        told = any(LOCAL_SOURCE in text(source) for source in sources)
        aws = text("/sys/class/dmi/id/sys_vendor") == "Amazon EC2"
        # An image may name Amazon's source itself: chrony refuses the same one twice.
        asks = self.service in {"", "chrony", "chronyd"}
        self.needs_source = self.mine and aws and asks and not told

    @property
    def right(self) -> bool:
        asked = "--property=NTPSynchronized"
        return not self.mine or run("timedatectl", "show", asked, "--value") == "yes"

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (right := self.right) and time.monotonic() < end:
            time.sleep(2)  # noqa: TID251
        return right


def look_at_disk(program: str, place: str) -> dict[str, Any]:
    """What the program for disks says; it is given as text, for it may not be there yet."""
    said = run(sys.executable, "-I", "-c", program, "look", place, timeout_s=400)
    told: dict[str, Any] = json.loads(said or '{"state": "refused", "reason": "no answer"}')
    return told


def main(asked: dict[str, Any]) -> dict[str, Any]:
    name, clock = system(), Clock()
    disk = look_at_disk(asked["disk"], asked["data"]) if asked["disk"] else {"state": "mounted"}
    unheld, interrupted = packages(tuple(asked["held"]))
    needed = {
        "": True,
        "clock": clock.needs_source,
        "disk": bool(asked["disk"]),
        "needrestart": Path("/etc/needrestart/conf.d").is_dir(),
    }
    files = [(p, mode, sha256) for p, mode, sha256, need in asked["files"] if needed[need]]
    pages = int(text("/proc/sys/vm/nr_hugepages") or 0)
    todo = {
        "user": home_of(asked["user"]) != asked["data"],
        "folders": [p for p, owner in asked["folders"].items() if not is_folder(p, owner)],
        "files": [file[0] for file in files if differs(*file)],
        "disk": disk["state"] != "mounted",
        "pages": pages < asked["huge_pages"],
        "unheld": unheld,
    }
    lacking = ["chrony"] if clock.mine and not clock.service else []
    return {
        "refused": refused(asked, name, disk),
        "interrupted": interrupted,
        "lacking": lacking + (["mdadm"] if disk["state"] == "unable" else []),
        "todo": todo,
        "unset": any(todo.values()),
        "wrong": wrong(asked, todo, pages, clock),
    }


def refused(asked: dict[str, Any], name: str, disk: dict[str, Any]) -> str:
    """Why nothing is tried: a sentence that goes on after the host's name, with what to do."""
    if name not in asked["systems"]:
        return (
            f"runs {name}, and these playbooks know {' and '.join(asked['systems'])}: make the node"
            " again from an image with one of those."
        )
    if disk["state"] == "refused":
        return f"has no place for weights and caches: {disk['reason']}."
    return ""


def wrong(asked: dict[str, Any], todo: dict[str, Any], pages: int, clock: Clock) -> str:
    """The first thing that is not as it was asked for, with what to do."""
    place = asked["data"]
    if todo["folders"]:
        which = ", ".join(todo["folders"])
        return f"has directories that are missing or belong to somebody else: {which}. Run again."
    if todo["disk"]:
        return f"has nothing mounted at {place}: see 'journalctl -u kvdeploy-data' there."
    if todo["pages"]:
        return (
            f"could reserve {pages} of the {asked['huge_pages']} huge pages of 2 MiB that EFA"
            " needs: its memory is in pieces by now. Reboot it, they are reserved early in a boot,"
            " and run again."
        )
    offered = space_gib(place) if asked["data_gib"] else 0
    if offered < asked["data_gib"]:
        return (
            f"offers {offered} GiB at {place}, and weights and caches need {asked['data_gib']}:"
            " free some space, give it a larger disk, or use a type with an instance store."
        )
    if not clock.wait(asked["wait_s"]):
        return (
            f"has a clock that is not synchronised ({clock.service or 'no time service runs'}): see"
            f" 'chronyc sources' and timedatectl there; on EC2 the source is {LOCAL_SOURCE}."
        )
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
