"""What is not as it was asked for of a node's GPUs, in one round trip.

argv: what was asked for, as JSON. stdout: JSON of what to install and to switch on, what to refuse,
and what is still wrong. Reads only. Waits, when it is asked to, until every GPU is there and has
joined the NVLink fabric.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import time
from pathlib import Path
from typing import Any

MANAGER_UNIT = "nvidia-fabricmanager.service"
SETTLED = "Completed"
CONTROLLERS = {0x0300, 0x0302}
OF_A_DRIVER = ("nvidia-driver-", "nvidia-kernel-", "nvidia-dkms-", "nvidia-utils-")


def run(*argv: str, timeout_s: float = 60) -> tuple[int, str]:
    """(exit code, everything it said); 127 when it is missing."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return 127, f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} did not answer in {timeout_s} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def on_the_bus() -> int:
    """NVIDIA's GPUs among the PCI devices: 3D and VGA controllers; NVSwitches are bridges."""
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        kind = text(device / "class")
        found += text(device / "vendor") == "0x10de" and int(kind or "0", 16) >> 8 in CONTROLLERS
    return found


def ask(fields: str) -> tuple[int, list[list[str]], str]:
    """A table of nvidia-smi: (exit code, rows, what it said when it failed)."""
    code, said = run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    if code:
        return code, [], " ".join(said.split())
    return 0, [[cell.strip() for cell in line.split(",")] for line in said.splitlines()], ""


def gpus(*, fabric: bool) -> dict[str, Any]:
    code, rows, said = ask("driver_version,persistence_mode,ecc.errors.uncorrected.volatile.total")
    states: list[list[str]] = []
    if rows and fabric:
        _, states, said = ask("fabric.state,fabric.status")
    return {
        "answers": code == 0,
        "said": said,
        "driver": rows[0][0] if rows else text("/sys/module/nvidia/version"),
        "count": len(rows),
        "persistent": bool(rows) and all(row[1] == "Enabled" for row in rows),
        "broken": [i for i, row in enumerate(rows) if row[2].isdigit() and int(row[2]) > 0],
        "outside": [f"{i}: {s} ({why})" for i, (s, why) in enumerate(states) if s != SETTLED],
        "inside": sum(state == SETTLED for state, _ in states),
    }


def manager() -> dict[str, Any]:
    _, said = run("nv-fabricmanager", "--version")
    properties = "--property=ActiveState,UnitFileState"
    _, unit = run("systemctl", "show", properties, MANAGER_UNIT)
    state = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    active = state.get("ActiveState") == "active"
    log = ""
    if not active:
        _, log = run("journalctl", "--unit", MANAGER_UNIT, "-n", "3", "--output=cat", "--no-pager")
    return {
        "version": said.rpartition(":")[2].strip() if "version is" in said else "",
        "active": active,
        "enabled": state.get("UnitFileState") == "enabled",
        "log": " ".join(log.split())[:400],
    }


def manager_package(driver: str) -> str:
    """The package of the fabric manager that has just this version, as 'name=version'."""
    if not driver:
        return ""
    names = (f"nvidia-fabricmanager-{driver.partition('.')[0]}", "nvidia-fabricmanager")
    for line in run("apt-cache", "madison", *names)[1].splitlines():
        name, version = [cell.strip() for cell in line.split("|")][:2]
        if version == driver or version.startswith(f"{driver}-"):
            return f"{name}={version}"
    return ""


def packages(prefixes: tuple[str, ...]) -> tuple[list[str], bool]:
    """(installed ones that are not held, whether the driver is one of them)."""
    _, said = run("dpkg-query", "-W", "-f", "${db:Status-Want} ${db:Status-Status} ${Package}\n")
    rows = [line.split(" ", 2) for line in said.splitlines() if line.count(" ") == 2]
    mine = [
        (want, name) for want, s, name in rows if s == "installed" and name.startswith(prefixes)
    ]
    unheld = {name for want, name in mine if want != "hold"}
    return sorted(unheld), any(name.startswith(OF_A_DRIVER) for _, name in mine)


def headers() -> str:
    """The package of the running kernel's headers, where a driver could not be built without."""
    release = os.uname().release
    if Path("/lib/modules", release, "build").exists():
        return ""
    name = f"linux-headers-{release}"
    return name if run("apt-cache", "show", "--no-all-versions", name)[0] == 0 else ""


def older(version: str, least: str) -> bool:
    def numbers(dotted: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", dotted)]

    return bool(version) and numbers(version) < numbers(least)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    end = time.monotonic() + asked["wait_s"]
    while True:
        seen = gpus(fabric=asked["fabric"])
        fabric = manager() if asked["fabric"] else {}
        settled = seen["count"] >= asked["gpus"] and not seen["outside"]
        hopeless = not seen["answers"] or (asked["fabric"] and not fabric["active"])
        if settled or hopeless or time.monotonic() >= end:
            break
        time.sleep(2)  # noqa: TID251
    unheld, packaged = packages(tuple(asked["held"]))
    unit = Path(asked["unit"][0])
    has_unit = unit.is_file() and hashlib.sha256(unit.read_bytes()).hexdigest() == asked["unit"][1]
    driver = seen["driver"]
    driver_due = not seen["answers"] or older(driver, asked["least"])
    manager_due = asked["fabric"] and fabric["version"] != driver
    off = {
        "manager": asked["fabric"] and not (fabric["active"] and fabric["enabled"]),
        "persistence": not (has_unit and seen["persistent"]),
        "unheld": unheld,
    }
    return {
        "refused": refused(asked, seen, packaged=packaged),
        "answers": seen["answers"],
        "said": seen["said"],
        "driver": driver,
        "driver_due": driver_due,
        "headers": headers() if driver_due else "",
        "manager": fabric.get("version", ""),
        "manager_due": manager_due,
        "manager_package": manager_package(driver) if manager_due else "",
        "off": off,
        "any_off": any(off.values()),
        "wrong": wrong(asked, seen, fabric),
    }


def refused(asked: dict[str, Any], seen: dict[str, Any], *, packaged: bool) -> str:
    """Why nothing is tried: sentences that go on after the host's name, with what to do."""
    there, driver = on_the_bus(), seen["driver"]
    if there != asked["gpus"]:
        return (
            f"shows {there or 'no'} NVIDIA GPUs on its PCI bus, and {asked['gpus']} were expected:"
            " it is another instance type, or hardware is broken (stop and start it to move it)."
        )
    if not (seen["answers"] or asked["install"]):
        return (
            f"has no NVIDIA driver that answers ({seen['said']}), and installing one is switched"
            " off (nvidia_install): use an image that has the driver, or switch it on."
        )
    if older(driver, asked["least"]) and not (asked["install"] and packaged):
        why = (
            "it did not come from packages, so that none can replace it"
            if asked["install"]
            else "installing one is switched off (nvidia_install)"
        )
        least = asked["least"]
        return f"has NVIDIA driver {driver}, older than {least}, and {why}: use a newer image."
    return ""


def wrong(asked: dict[str, Any], seen: dict[str, Any], fabric: dict[str, Any]) -> str:
    """The first thing that is not as it was asked for, with what to do."""
    driver = seen["driver"]
    if not seen["answers"]:
        return f"has an NVIDIA driver that does not answer: {seen['said']}"
    if older(driver, asked["least"]):
        return f"has NVIDIA driver {driver}, older than {asked['least']}: run again to replace it."
    if seen["count"] != asked["gpus"]:
        return (
            f"has {asked['gpus']} GPUs on its PCI bus, and the driver brought {seen['count']} up:"
            " see 'journalctl -k --grep Xid' there; stop and start it to move it to other hardware."
        )
    if asked["fabric"] and fabric["version"] != driver:
        has = f"fabric manager {fabric['version']}" if fabric["version"] else "no fabric manager"
        return (
            f"has NVIDIA driver {driver} and {has}: both must be the same to the digit. Run again"
            " to give it the right one, or use another image."
        )
    if asked["fabric"] and not fabric["active"]:
        return f"has a fabric manager that does not run: {fabric['log']}"
    if asked["fabric"] and seen["inside"] != asked["gpus"]:
        states = ", ".join(seen["outside"]) or seen["said"]
        return (
            f"has GPUs that did not join the NVLink fabric in {asked['wait_s']} s: {states}."
            " See 'journalctl -u nvidia-fabricmanager' there, and reboot it."
        )
    if not seen["persistent"]:
        unit = "journalctl -u kvdeploy-persistence"
        return f"has GPUs that do not stay initialised: see '{unit}' there."
    if seen["broken"]:
        return (
            f"has uncorrected memory errors on GPU {', '.join(map(str, seen['broken']))}: reboot it"
            " to have the rows remapped; if they come back, replace the node."
        )
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
