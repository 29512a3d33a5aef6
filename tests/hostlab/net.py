"""A lab's place on this machine: its number, and the subnet, bridge and names that follow from it.

Labs that run at the same time never share one. What a lab takes is written down before it is
taken, so that whoever comes next can give it back if the lab's maker was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.hostlab.shell import LabError, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REGISTRY: Final = Path("/run/kvdeploy-hostlab")
"""One file for each lab; gone when the machine restarts, as everything is that it speaks of."""
NUMBERS: Final = range(100, 255)
LABS: Final = ip_network("10.77.0.0/16")
TIME_SERVICE: Final = "169.254.169.123"
"""Amazon's clock, as every instance reaches it; the lab's bridge has this address too."""

INOTIFY: Final = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_MIN: Final = 2048
"""A systemd takes seven; the kernel's 128 are for all hosts together."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one lab has of this machine. Every name of it follows from the number."""

    number: int
    root: Path
    owner: int
    """Process that made it, 0: the lab outlives its maker."""
    owner_started: int

    @property
    def bridge(self) -> str:
        return f"kvlab{self.number}"

    @property
    def gateway(self) -> str:
        return self.address(0)

    def address(self, index: int) -> str:
        """0 is the bridge's, 1... the hosts'."""
        return f"10.77.{self.number}.{1 if index == 0 else 9 + index}"

    def netns(self, host: str) -> str:
        return f"{self.bridge}-{host}"

    def veth(self, index: int) -> str:
        return f"{self.bridge}h{index}"

    def cgroup(self, host: str) -> Path:
        return cgroups() / f"{self.bridge}-{host}"

    @property
    def record(self) -> Path:
        return REGISTRY / f"{self.number}.json"

    @property
    def abandoned(self) -> bool:
        """Whether the process that made it, and should have taken it down, is gone."""
        return self.owner != 0 and started(self.owner) != self.owner_started


def cgroups() -> Path:
    """The cgroup2 hierarchy of this machine."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    msg = "no cgroup2 hierarchy is mounted on this machine (/sys/fs/cgroup/unified)"
    raise LabError(msg)


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: tells a reused process id. None: it is not
    there, or has ended and nobody has asked for its exit code yet.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time: who looks for what is free, or for what was left behind."""
    REGISTRY.mkdir(parents=True, exist_ok=True)
    with (REGISTRY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def places() -> list[Place]:
    """Every lab of this machine, running or left behind."""
    found = []
    for path in sorted(REGISTRY.glob("*.json")):
        with suppress(FileNotFoundError):  # another process has just given it back
            stored = json.loads(path.read_text())
            found.append(Place(**{**stored, "root": Path(stored["root"])}))
    return found


def take(root: Path, *, owned: bool) -> Place:
    """The first free number, its bridge up. Raises LabError when all are taken."""
    pid = os.getpid() if owned else 0
    with locked():
        if int(INOTIFY.read_text()) < INOTIFY_MIN:
            INOTIFY.write_text(str(INOTIFY_MIN))
        taken = _taken()
        for number in NUMBERS:
            place = Place(number=number, root=root, owner=pid, owner_started=started(pid) or 0)
            if place.record.exists() or number in taken:
                continue
            part = place.record.with_suffix(".part")
            part.write_text(json.dumps({**asdict(place), "root": str(root)}))
            part.rename(place.record)
            break
        else:
            raise LabError(_full(taken))
    run("ip", "link", "add", place.bridge, "type", "bridge")
    run("ip", "address", "add", f"{place.gateway}/24", "dev", place.bridge)
    run("ip", "address", "add", f"{TIME_SERVICE}/32", "dev", place.bridge)
    run("ip", "link", "set", place.bridge, "up")
    return place


def missing() -> str | None:
    """Why no lab could have a place on this machine; None: one can."""
    taken = _taken()
    free = any(n not in taken and not (REGISTRY / f"{n}.json").exists() for n in NUMBERS)
    return None if free else _full(taken)


def _full(taken: Mapping[int, str]) -> str:
    by = ", ".join(sorted({*taken.values()})) or f"labs, see {REGISTRY}"
    subnets = f"10.77.{NUMBERS[0]}.0/24 to 10.77.{NUMBERS[-1]}.0/24"
    return f"all subnets of labs ({subnets}) are taken by {by}: end one of those"


def _taken() -> dict[int, str]:
    """Numbers whose bridge or subnet somebody else has, and who: a link of this machine."""
    found: dict[int, str] = {}
    for link in json.loads(run("ip", "-j", "link").stdout):
        name = link["ifname"]
        for number in NUMBERS:
            if name == f"kvlab{number}":
                found[number] = name
    for route in json.loads(run("ip", "-4", "-j", "route", "show", "table", "all").stdout):
        told = route["dst"]
        net = ip_network("0.0.0.0/0" if told == "default" else told, strict=False)
        # A wider one, such as a company's 10.0.0.0/8, goes on around ours.
        if net.prefixlen >= LABS.prefixlen and net.overlaps(LABS):
            for number in NUMBERS:
                if ip_network(f"10.77.{number}.0/24").overlaps(net):
                    found.setdefault(number, str(route.get("dev", told)))
    return found


def give_back(place: Place) -> None:
    """The bridge and the number; its hosts are gone by now. Harmless when done twice."""
    run("ip", "link", "delete", place.bridge, check=False)
    place.record.unlink(missing_ok=True)


def connect(place: Place, host: str, index: int, address: str) -> None:
    """A network namespace for a host, its eth0 on the lab's bridge."""
    ns, veth = place.netns(host), place.veth(index)
    run("ip", "netns", "add", ns)
    run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", ns)
    run("ip", "link", "set", veth, "master", place.bridge, "up")
    steps = (
        f"address add {address}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
        f"route add default via {place.gateway}",
    )
    for step in steps:
        run("ip", "-n", ns, *step.split())


def disconnect(place: Place, host: str | None = None) -> None:
    """The namespace of a host, or every one of the lab, whatever its hosts are called; the veths
    go with them."""
    prefix = place.netns("")
    for line in run("ip", "netns", "list").stdout.splitlines():
        name = line.split()[0]
        if name == place.netns(host) if host is not None else name.startswith(prefix):
            for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
                with suppress(ProcessLookupError):  # e.g. somebody's `ip netns exec`
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "delete", name, check=False)
    if host is not None:
        return
    links = json.loads(run("ip", "-j", "link").stdout)
    for name in (link["ifname"] for link in links if link["ifname"].startswith(f"{place.bridge}h")):
        run("ip", "link", "delete", name, check=False)
