"""What can be broken in a host, by name. README.md has the table."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.hostlab import hardware
from tests.hostlab.base import PORT
from tests.hostlab.efa import OLDER as OLDER_EFA
from tests.hostlab.hardware import HOME
from tests.hostlab.nvidia import DRIVER, MANAGER, package_version
from tests.hostlab.nvidia import OLDER as OLDER_DRIVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hostlab.guest import Host

DEVICE: Final = "rdmap86s0"
"""The one of the 16 that faults befall."""
LATE_S: Final = "5"
IN_TREE: Final = "2.13.1"
"""Of the efa module that a kernel brings along."""
INSTALL_EFA: Final = f"""
set -e
cd "$(mktemp -d)"
apt-get -qq update
curl -sSf http://labhost:{PORT}/efa/aws-efa-installer-{OLDER_EFA}.tar.gz | tar -xz
cd aws-efa-installer
./efa_installer.sh -y
"""
INSTALL_DRIVER: Final = f"""
set -e
echo 'deb [trusted=yes] http://labhost:{PORT}/nvidia ./' >/etc/apt/sources.list.d/image.list
apt-get -qq update
for name in {DRIVER} {MANAGER}; do apt-get -qq install $name={package_version(OLDER_DRIVER)}; done
rm /etc/apt/sources.list.d/image.list
systemctl enable --quiet --now nvidia-fabricmanager
"""
FILL: Final = """
where=$(findmnt -rno TARGET -S /dev/nvme1n1 || findmnt -rno TARGET -S /dev/md127)
set -- $(stat --file-system --format '%f %S' "$where")
fallocate -l "$(($1 * $2 - 67108864))" "$where/.hostlab-filler"
dd if=/dev/zero of="$where/.hostlab-filler2" bs=1M 2>/dev/null
truncate -s -1M "$where/.hostlab-filler2"
"""
STALE: Final = f"echo {OLDER_DRIVER} >{HOME}/module/nvidia/version"
EMPTY: Final = """
findmnt -rno TARGET -t ext4 | while read -r where; do rm -f "$where"/.hostlab-filler*; done
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How it is set and undone. Both may be done twice; what a value is, the README tells."""

    set: Callable[[Host, str], None]
    clear: Callable[[Host], None]


def _flag(name: str, default: str = "") -> Fault:
    """A file that the stand-ins look for."""

    def put(host: Host, value: str) -> None:
        (host.hardware / "faults" / name).write_text(f"{value or default}\n")

    def drop(host: Host) -> None:
        (host.hardware / "faults" / name).unlink(missing_ok=True)

    return Fault(set=put, clear=drop)


def _text(path: str, bad: str, good: str) -> Fault:
    """A file of the hardware says something else."""

    def put(host: Host, value: str) -> None:
        (host.hardware / path).write_text(f"{value or bad}\n")

    def mend(host: Host) -> None:
        if (host.hardware / path).exists():
            (host.hardware / path).write_text(f"{good}\n")

    return Fault(set=put, clear=mend)


def _away(*patterns: str) -> Fault:
    """Parts of the hardware are not there."""

    def take(host: Host, value: str) -> None:
        for pattern in patterns:
            for part in sorted(host.hardware.glob(pattern)):
                away = host.hardware / "away" / part.relative_to(host.hardware)
                away.parent.mkdir(parents=True, exist_ok=True)
                part.rename(away)

    def put(host: Host) -> None:
        for pattern in patterns:
            for part in sorted((host.hardware / "away").glob(pattern)):
                back = host.hardware / part.relative_to(host.hardware / "away")
                if back.exists():  # a boot has made it anew
                    shutil.rmtree(part)
                else:
                    part.rename(back)

    return Fault(set=take, clear=put)


def _command(bad: str, good: str = "true") -> Fault:
    def do(host: Host, value: str) -> None:
        host.must("sh", "-c", bad)

    def undo(host: Host) -> None:
        host.must("sh", "-c", good)

    return Fault(set=do, clear=undo)


def _late() -> Fault:
    flag, device = _flag("efa-device-late", LATE_S), _away(f"class/infiniband/{DEVICE}")

    def put(host: Host, value: str) -> None:
        flag.set(host, value)
        device.set(host, "")
        host.must("systemctl", "restart", "--no-block", "hostlab-late")

    def mend(host: Host) -> None:
        flag.clear(host)
        host.must("systemctl", "stop", "hostlab-late")
        device.clear(host)

    return Fault(set=put, clear=mend)


def _needs_reboot() -> Fault:
    """The installer cannot unload the module that runs: the kernel's own, or one it put there."""
    flag = _flag("efa-needs-reboot")

    def put(host: Host, value: str) -> None:
        flag.set(host, value)
        module = host.hardware / "module/efa"
        if not module.exists():
            module.mkdir()
            (module / "version").write_text(f"{IN_TREE}\n")

    return Fault(set=put, clear=flag.clear)


def _killed() -> Fault:
    def put(host: Host, value: str) -> None:
        host.kill()

    def mend(host: Host) -> None:
        if not host.running:
            host.boot()

    return Fault(set=put, clear=mend)


def _stopped() -> Fault:
    def put(host: Host, value: str) -> None:
        host.kill()
        hardware.blank(host.folder / "disks")

    return Fault(set=put, clear=_killed().clear)


FAULTS: Final = {
    "kill": _killed(),
    "stopped": _stopped(),
    "ssh-down": _command("systemctl stop ssh", "systemctl start ssh"),
    "efa-device-down": _text(f"class/infiniband/{DEVICE}/ports/1/state", "1: DOWN", "4: ACTIVE"),
    "efa-device-missing": _away(f"class/infiniband/{DEVICE}"),
    "efa-device-late": _late(),
    "efa-no-p2p": _text(f"class/infiniband/{DEVICE}/device/p2p", "none", "NVIDIA"),
    "efa-installer-fails": _flag("efa-installer-fails"),
    "efa-needs-reboot": _needs_reboot(),
    "old-libfabric": _command(INSTALL_EFA),
    "old-driver": _command(INSTALL_DRIVER),
    "driver-mismatch": _flag("driver-mismatch", OLDER_DRIVER),
    "no-gpu": _away("pci/devices/0000:[56]?:00.0", "module/nvidia"),
    "gpu-missing": _away("pci/devices/0000:60:00.0"),
    "driver-stale": _command(STALE, f"[ ! -e {HOME}/installed/nvidia ] || {HOME}/load nvidia"),
    "fabric-stuck": _flag("fabric-stuck"),
    "no-nvme": _away("block/nvme[1-9]n1", "dev/nvme[1-9]n1"),
    "nvme-foreign": _command("mkfs.ext4 -q -F -L somebody /dev/nvme1n1", "true"),
    "nvme-full": _command(FILL, EMPTY),
}
"""In the order in which they are healed: what runs in the host needs it on, a driver its GPUs."""
