"""Run on a node, under its own Python: prints what the node says of itself, as one JSON object.

argv: the node's private address. Changes nothing, and needs nobody's leave.
"""

import json
import os
import pathlib
import subprocess  # noqa: TID251  # a program of its own: nothing of kvdeploy is on a node
import sys

UNITS = ("kvdeploy-engine@*.service", "kvdeploy-router.service")
SHOWN = "Id,LoadState,ActiveState,SubState,NRestarts,MainPID,ActiveEnterTimestamp,LimitMEMLOCK"
MOVED = ("rdma_write_bytes", "rdma_read_bytes")
"""What a device did at its own node's wish."""


def said(*argv: str) -> str:
    """What a program prints; '' where there is none, or it fails."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return ""


def interface(address: str) -> str:
    links = json.loads(said("ip", "-j", "address") or "[]")
    has = (link["ifname"] for link in links for a in link["addr_info"] if a["local"] == address)
    return next(has, "")


def units() -> dict[str, dict[str, str]]:
    """By process, e.g. 'decode-0' or 'router'."""
    found = {}
    for block in said("systemctl", "show", "--property", SHOWN, *UNITS).split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        name = unit.pop("Id", "").removeprefix("kvdeploy-").removesuffix(".service")
        if name and unit.pop("LoadState", "") == "loaded":
            found[name.removeprefix("engine@")] = unit
    return found


def memlock(pid: str) -> str:
    """How much memory a process may lock, in bytes, or 'unlimited'; '' of none."""
    limits = text(f"/proc/{pid}/limits").splitlines() if pid.strip("0") else []
    words = (line.split() for line in limits if line.startswith("Max locked memory"))
    return next((line[3] for line in words), "")


def main() -> None:
    run, devices = pathlib.Path("/run/kvdeploy"), pathlib.Path("/sys/class/infiniband")
    marks = run.glob("*.generation")
    moved = (c for name in MOVED for c in devices.glob(f"*/ports/1/hw_counters/{name}"))
    drivers = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    found = units()
    facts = {
        "boot_id": text("/proc/sys/kernel/random/boot_id"),
        "interface": interface(sys.argv[1]),
        "cores": sorted(os.sched_getaffinity(0)),
        "generations": {mark.stem: mark.read_text().strip() for mark in marks},
        "units": found,
        "memlock": {name: memlock(unit.get("MainPID", "")) for name, unit in found.items()},
        "huge_pages": int(text("/proc/sys/vm/nr_hugepages") or 0),
        "gpus": len(drivers),
        "driver": drivers[0] if drivers else "",
        "fabric_manager": said("nv-fabricmanager", "--version").rpartition(":")[2].strip(),
        "efa_devices": len(list(devices.glob("*"))),
        "efa_bytes": sum(int(counter.read_text()) for counter in moved),
    }
    print(json.dumps(facts))  # noqa: T201  # that is what it is for


if __name__ == "__main__":
    main()
