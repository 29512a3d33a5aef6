"""What is not as it was asked for of a node's EFA, in one round trip.

argv: what was asked for, as JSON. stdout: JSON of whether to install or to reboot, what to refuse,
and what is still wrong. Reads only. Waits for an installer that a run without its connection left
at work; and, when it is asked to, until every device is there and libfabric uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import time
from pathlib import Path
from typing import Any

RECEIPT = "/opt/amazon/efa_installed_packages"
FI_INFO = "/opt/amazon/efa/bin/fi_info"
AMAZON = "0x1d0f"
INSTALLER_WAIT_S = 1800


def text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def installed() -> str:
    """The installer's version by its own list, '' when it never got that far."""
    found = re.search(r"EFA installer version: (\S+)", text(RECEIPT))
    return found.group(1) if found and os.access(FI_INFO, os.X_OK) else ""


def on_the_bus() -> int:
    """EFA devices among the PCI devices, with or without a driver."""
    return sum(
        text(device / "vendor") == AMAZON and text(device / "device").startswith("0xefa")
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def devices() -> dict[str, str]:
    """{name: what it says of GPU memory} of Amazon's RDMA devices."""
    return {
        device.name: text(device / "device/p2p")
        for device in sorted(Path("/sys/class/infiniband").glob("*"))
        if text(device / "device/vendor") == AMAZON
    }


def domains() -> tuple[list[str], str]:
    """(devices that libfabric can use, what it said when it can use none).

    Newer ones list a device twice, under the fabrics efa and efa-direct.
    """
    try:
        done = subprocess.run(
            (FI_INFO, "-p", "efa", "-t", "FI_EP_RDM"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], str(e)
    found = set(re.findall(r"^\s*domain:\s*(\S+?)(?:-rdm)?\s*$", done.stdout, re.MULTILINE))
    return sorted(found), " ".join((done.stderr or done.stdout).split()) if not found else ""


def settle(lock: Path) -> None:
    """Until no installer is at work: install.sh holds the lock."""
    end = time.monotonic() + INSTALLER_WAIT_S
    while lock.exists() and time.monotonic() < end:
        with lock.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(2)  # noqa: TID251
            else:
                return


def state(marker: str) -> str:
    """'' | 'interrupted' | 'reboot': what an installation of ours that did not end left undone."""
    told = text(marker).split()
    if told[:1] == ["reboot"]:
        return "reboot" if told[1:] == [text("/proc/sys/kernel/random/boot_id")] else ""
    return "interrupted" if told else ""


def numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    settle(Path(f"{asked['marker']}.lock"))
    end = time.monotonic() + asked["wait_s"]
    while True:
        found, (usable, said) = devices(), domains()
        if min(len(found), len(usable)) >= asked["devices"] or time.monotonic() >= end:
            break
        time.sleep(2)  # noqa: TID251
    version, left = installed(), state(asked["marker"])
    install = left == "interrupted" or numbers(version) < numbers(asked["version"])
    return {
        "refused": refused(asked) if install else "",
        "install": install,
        "reboot": left == "reboot",
        "newer": version if numbers(version) > numbers(asked["version"]) else "",
        "wrong": wrong(asked, version if not install else "", found, usable, said),
    }


def refused(asked: dict[str, Any]) -> str:
    """Why nothing is tried: sentences that go on after the host's name, with what to do."""
    cache = Path(asked["cache"])
    while not cache.exists():
        cache = cache.parent
    disk = os.statvfs(cache)
    free = disk.f_bavail * disk.f_frsize // 2**20
    if free < asked["needs_mib"]:
        return (
            f"has {free} MiB free at {cache}, and the EFA installer needs {asked['needs_mib']}:"
            " free some space, or give the node a larger root disk."
        )
    return ""


def wrong(
    asked: dict[str, Any], version: str, found: dict[str, str], usable: list[str], said: str
) -> str:
    """The first thing that is not as it was asked for, with what to do."""
    wanted = asked["devices"]
    if not version:
        least = asked["version"]
        return f"has no EFA {least} that was installed to its end: run again to install it."
    if len(found) != wanted:
        there = on_the_bus()
        why = (
            f"its PCI bus has {there}, and network interfaces can only be given to a machine when"
            " it is launched. Make the node again."
            if there < wanted
            else "all are on its PCI bus, and the driver did not bring them up: see 'journalctl -k"
            " --grep efa' there, and reboot it."
        )
        return f"has {len(found)} of {wanted} EFA devices after waiting {asked['wait_s']} s: {why}"
    if odd := [name for name in found if not name.startswith("rdmap")]:
        return (
            f"has EFA devices that were not given their lasting names: {', '.join(odd)}. The udev"
            " rules of rdma-core are missing or did not run: run 'udevadm trigger' there, or reboot"
            " it."
        )
    if len(usable) != wanted:
        idle = sorted(set(found) - set(usable))
        why = f"{', '.join(idle)} cannot be used" if usable else said
        return (
            f"has {wanted} EFA devices, and libfabric can use {len(usable)}: {why}. See"
            " '/opt/amazon/efa/bin/fi_info -p efa' and 'journalctl -k --grep efa' there, and reboot"
            " it."
        )
    if Path("/sys/module/nvidia").is_dir():
        blind = [name for name, peers in found.items() if "NVIDIA" not in peers]
        if blind:
            return (
                "has EFA devices that cannot reach GPU memory (no p2p with NVIDIA):"
                f" {', '.join(blind)}. Reboot it, so that the GPUs have their driver before EFA"
                " has."
            )
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
