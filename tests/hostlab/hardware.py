"""The hardware of a host, mocked at its real paths in /sys, /proc and /dev.

The files lie in HOME on the host's own disk; a unit of the guest puts them in their places at
every boot, before anything else looks. Tests change them from outside, through Host.hardware.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.hostlab.shell import LabError, run

HOME: Final = "/opt/hostlab"
FILES: Final = Path(__file__).parent / "standins"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a kind of host has."""

    gpus: int = 0
    efa: tuple[str, ...] = ()
    nvme: int = 0
    """Disks of the instance store."""


P5EN: Final = Machine(
    gpus=8,
    efa=tuple(f"rdmap{b + i}s0" for b in (85, 110, 135, 160) for i in range(4)),
    nvme=1,
)
KINDS: Final = {
    "none": Machine(),
    "p5en": P5EN,
    "p5-small": Machine(gpus=1, efa=("rdmap79s0",), nvme=1),
    "p5en-raid": replace(P5EN, nvme=8),
}
"""With one disk, nothing of a disk is mocked but its name; several need the stand-in of mdadm."""
FOLDERS: Final = (
    "away",
    "block",
    "class/infiniband",
    "class/infiniband_verbs",
    "dev",
    "dmi",
    "driver",
    "faults",
    "installed",
    "module",
    "pci/devices",
)
ON_DISK: Final = frozenset({"installed"})
"""Of HOME: what stands for files of the system, as kernel modules are."""
COUNTERS: Final = (
    "rdma_read_bytes",
    "rdma_read_resp_bytes",
    "rdma_write_bytes",
    "rdma_write_recv_bytes",
    "recv_bytes",
    "rx_bytes",
    "rx_drops",
    "send_bytes",
    "tx_bytes",
)
DISK_BYTES: Final = 4 * 2**30
"""Sparse: a disk takes of this machine what is written to it."""
INSTANCE_STORE: Final = "Amazon EC2 NVMe Instance Storage"
ROOT_DISK: Final = "Amazon Elastic Block Store"
UNIT: Final = f"""\
[Unit]
Description=Hardware of this test host
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target systemd-sysctl.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={HOME}/boot
"""
LATE_UNIT: Final = f"""\
[Unit]
Description=Hardware that appears late
ConditionPathExists={HOME}/faults/efa-device-late

[Service]
ExecStart={HOME}/late
"""


def build(layer: Path, kind: str) -> None:
    """Write what all hosts of a kind have in common, and the units that show it: a layer that
    lies between the base and each host's own.
    """
    machine, home = _known(kind), layer / HOME.lstrip("/")
    for folder in FOLDERS:
        (home / folder).mkdir(parents=True)
    for name in ("boot", "late", "load"):
        program = home / name
        program.write_text((FILES / f"{name}.sh").read_text())
        program.chmod(0o755)
    for index in range(machine.gpus):
        _pci(home, f"0000:{0x59 + index:02x}:00.0", 0x10DE, 0x2335, 0x0302)
    for index, device in enumerate(machine.efa):
        _efa(home, index, device)
    _block(home, "nvme0n1", ROOT_DISK, 8 * 2**30)
    for name in _disk_names(machine):
        _block(home, name, INSTANCE_STORE, DISK_BYTES)
    (home / "dmi/sys_vendor").write_text("Amazon EC2\n")
    units = layer / "etc/systemd/system"
    for name, text, target in (
        ("hostlab-hardware.service", UNIT, "sysinit.target"),
        ("hostlab-late.service", LATE_UNIT, "multi-user.target"),
    ):
        wants = units / f"{target}.wants"
        wants.mkdir(parents=True)
        (units / name).write_text(text)
        (wants / name).symlink_to(f"/etc/systemd/system/{name}")


def _known(kind: str) -> Machine:
    if kind not in KINDS:
        msg = f"no hardware is called {kind!r}; there are {', '.join(KINDS)}"
        raise LabError(msg)
    return KINDS[kind]


def _disk_names(machine: Machine) -> list[str]:
    return [f"nvme{number}n1" for number in range(1, machine.nvme + 1)]


def attach(root: Path, disks: Path, kind: str) -> None:
    """Give a host's file system the blank disks of its kind, each a file in the folder `disks`
    behind a loop device of this machine.
    """
    machine, home = _known(kind), root / HOME.lstrip("/")
    for name in _disk_names(machine):
        major, minor = _loop(disks / f"{name}.img", DISK_BYTES)
        (home / "dev" / name).write_text(f"b {major} {minor}\n")
        (home / "block" / name / "dev").write_text(f"{major}:{minor}\n")
    if machine.nvme > 1:
        major, minor = _loop(disks / "md.img", DISK_BYTES * machine.nvme)
        (home / "md").write_text(f"b {major} {minor}\n")


def _loop(image: Path, size: int) -> tuple[int, int]:
    """The numbers of a block device of this machine, blank and new."""
    image.parent.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    loop = Path(run("losetup", "--find", "--show", image).stdout.strip())
    return os.major(loop.stat().st_rdev), os.minor(loop.stat().st_rdev)


def blank(disks: Path) -> None:
    """What an instance store is after its machine was stopped and started."""
    for image in disks.glob("*.img"):
        size = image.stat().st_size
        os.truncate(image, 0)
        os.truncate(image, size)


def _block(home: Path, name: str, model: str, size: int) -> None:
    device = home / "block" / name
    for folder in ("device", "holders", "queue", "slaves"):
        (device / folder).mkdir(parents=True)
    for path, text in {
        "device/model": model,
        "device/serial": f"AWS{int(name[4]):017d}",
        "size": str(size // 512),
        "ro": "0",
        "removable": "0",
        "queue/rotational": "0",
        "queue/logical_block_size": "512",
        "queue/physical_block_size": "512",
        "queue/hw_sector_size": "512",
    }.items():
        (device / path).write_text(f"{text}\n")


def _efa(home: Path, index: int, name: str) -> None:
    device = home / "class/infiniband" / name
    (device / "ports/1/hw_counters").mkdir(parents=True)
    (device / "device").mkdir()
    for path, text in {
        "device/vendor": "0x1d0f",
        "device/device": "0xefa3",
        "device/p2p": "NVIDIA",
        "ports/1/state": "4: ACTIVE",
        "ports/1/link_layer": "Unspecified",
        **{f"ports/1/hw_counters/{counter}": "0" for counter in COUNTERS},
    }.items():
        (device / path).write_text(f"{text}\n")
    verbs = home / f"class/infiniband_verbs/uverbs{index}"
    verbs.mkdir()
    (verbs / "ibdev").write_text(f"{name}\n")
    bus = int(name.removeprefix("rdmap").removesuffix("s0"))
    _pci(home, f"0000:{bus:02x}:00.0", 0x1D0F, 0xEFA3, 0x0200)


def _pci(home: Path, slot: str, vendor: int, device: int, kind: int) -> None:
    """A PCI device as lspci reads it."""
    folder = home / "pci/devices" / slot
    folder.mkdir()
    for name, value in {"vendor": vendor, "device": device, "class": kind << 8}.items():
        (folder / name).write_text(f"{value:#06x}\n")
    (folder / "irq").write_text("0\n")
    (folder / "resource").write_text("0x0 0x0 0x0\n" * 7)
    header = struct.pack("<HHHHBBHBBBB", vendor, device, 0x0406, 0x10, 0xA1, 0, kind, 0, 0, 0, 0)
    (folder / "config").write_bytes(header.ljust(256, b"\0"))


def release(folder: Path) -> None:
    """Give back the loop devices behind the disks of a host that is off."""
    for image in folder.glob("disks/*.img"):
        for line in run("losetup", "--associated", image, "--output", "NAME", "-n").stdout.split():
            run("losetup", "--detach", line, check=False)
