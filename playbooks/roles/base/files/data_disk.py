#!/usr/bin/python3
"""Puts the instance store of an EC2 machine where weights and caches go; runs at every boot.

  data-disk look PLACE          JSON: what would be done, or why nothing can be
  data-disk mount PLACE OWNER   do it; nothing, when something is mounted at PLACE already

One disk gets a file system, several become one striped array first. An instance that was stopped
comes back with blank disks: they are set up again. A disk that holds something which is not ours
is never written to. The Deep Learning AMI sets the disks up itself: then a directory there is used.
"""

from __future__ import annotations

import json
import shutil
import subprocess  # noqa: TID251  # stands alone on the node
import sys
from pathlib import Path
from typing import Any

MODEL = "Amazon EC2 NVMe Instance Storage"
LABEL = "kvdeploy-data"
ARRAY = "/dev/md/kvdeploy"
AMI_MOUNT = "/opt/dlami/nvme"
AMI_UNIT = "dlami-nvme.service"
AMI_WAIT_S = 300


class Refused(Exception):  # noqa: N818  # not an error of this program
    """One sentence for whoever reads the log of the unit or of the play."""


def run(*argv: str, timeout_s: float = 600) -> None:
    """Raises Refused when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        msg = f"{' '.join(argv)} failed: {said[-1]}"
        raise Refused(msg)


def source_of(place: str) -> str:
    """What is mounted at a place; '' when nothing is."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == place:
            return after.split()[1]
    return ""


def disks() -> list[str]:
    """Device nodes of the instance store."""
    return [
        f"/dev/{block.name}"
        for block in sorted(Path("/sys/block").glob("nvme*"))
        if (block / "device/model").is_file()
        and (block / "device/model").read_text(encoding="utf-8").strip() == MODEL
    ]


def content(device: str) -> str:
    """What a disk holds: 'blank', 'ours', or words for what else it is."""
    argv = ("blkid", "--probe", "--output", "export", device)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    kind, label = told.get("TYPE") or told.get("PTTYPE", ""), told.get("LABEL", "")
    if not kind:
        # 2: nothing was found; anything else: blkid does not know what to make of it.
        return "blank" if done.returncode == 2 else "something unknown"
    if kind == "ext4" and label == LABEL:
        return "ours"
    if kind == "linux_raid_member" and label.split(":")[-1] == LABEL:
        return "ours"
    return f"{kind}{f' {label!r}' if label else ''}"


def array_of(found: list[str]) -> str:
    """The array that the kernel made of these disks at boot, under whatever name."""
    holders = {h.name for d in found for h in Path("/sys/block", Path(d).name, "holders").glob("*")}
    return f"/dev/{holders.pop()}" if len(holders) == 1 else ""


def look(place: str) -> dict[str, Any]:
    if source := source_of(place):
        return {"state": "mounted", "source": source}
    settle_ami()
    if source := source_of(AMI_MOUNT):
        return {"state": "ami", "source": source}
    found = disks()
    if not found:
        msg = (
            f"this machine has no instance store (no NVMe disk of the model {MODEL!r}): use an"
            " instance type that has one, or let weights and caches lie on the root disk"
        )
        raise Refused(msg)
    if len(found) > 1 and not shutil.which("mdadm"):
        return {"state": "unable", "disks": found}
    held = {device: content(device) for device in found}
    if foreign := {d: what for d, what in held.items() if what not in {"blank", "ours"}}:
        held_by = "; ".join(f"{device} holds {what}" for device, what in foreign.items())
        msg = (
            f"{held_by}: kvdeploy formats blank disks only. Save what is on it, then wipe it"
            f" (wipefs --all {next(iter(foreign))}) and run again"
        )
        raise Refused(msg)
    whole = all(what == "ours" for what in held.values())
    return {"state": "kept" if whole else "new", "disks": found}


def mount(place: str, owner: str) -> dict[str, Any]:
    told = look(place)
    if told["state"] == "unable":
        msg = "mdadm is missing, and the instance store has several disks"
        raise Refused(msg)
    Path(place).mkdir(parents=True, exist_ok=True)
    if told["state"] == "ami":
        inside = Path(AMI_MOUNT, "kvdeploy")
        inside.mkdir(exist_ok=True)
        run("mount", "--bind", str(inside), place)
    elif told["state"] != "mounted":
        run("mount", "-o", "noatime", device_of(told), place)
    shutil.chown(place, owner, owner)
    Path(place).chmod(0o755)
    return look(place)


def settle_ami() -> None:
    """Where the image has its own unit for the disks: let it end, it runs late in a boot."""

    def says(question: str) -> str:
        argv = ("systemctl", question, AMI_UNIT)
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()

    if says("is-enabled") == "enabled" and says("is-active") != "active":
        run("systemctl", "start", AMI_UNIT, timeout_s=AMI_WAIT_S)


def device_of(told: dict[str, Any]) -> str:
    """The file system's device, made first where there is none that is ours."""
    found, new = told["disks"], told["state"] == "new"
    device = found[0] if len(found) == 1 else array(found, new=new)
    held = "blank" if new else content(device)
    if held not in {"blank", "ours"}:
        msg = f"{device} holds {held}, and kvdeploy formats blank disks only"
        raise Refused(msg)
    if held == "blank":
        # No time for discarding: a disk of the instance store comes blank.
        run(*("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard", "-L", LABEL, device))
    return device


def array(found: list[str], *, new: bool) -> str:
    """Several disks as one. A member that is missing means that nothing is left to save."""
    there = array_of(found)
    if new:
        if there:
            run("mdadm", "--stop", there)
        run(
            *("mdadm", "--create", ARRAY, "--run", "--level=0", f"--name={LABEL}"),
            *("--homehost=any", f"--raid-devices={len(found)}", *found),
        )
        return ARRAY
    if not there:
        run("mdadm", "--assemble", "--run", ARRAY, *found)
    return there or ARRAY


def main(argv: list[str]) -> int:
    action, place, *rest = argv
    try:
        told = look(place) if action == "look" else mount(place, *rest)
    except (Refused, OSError, subprocess.TimeoutExpired) as e:
        if action != "look":
            sys.stderr.write(f"{e}\n")
            return 1
        told = {"state": "refused", "reason": str(e)}
    sys.stdout.write(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
