"""What a host runs in: a mounted file system, a supervisor that is its power supply, a cgroup."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final

from kvdeploy.polling import wait_for
from tests.hostlab import hardware
from tests.hostlab.shell import LabError, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.hostlab.net import Place

SUPERVISE: Final = """
set -e
cgroup=$1 overlay=$2
shift 2
umount -R /run/netns 2>/dev/null || true
# Mounts of other labs, copied into this namespace, would keep them from ending.
while read -r source where _; do
  case $source in "$overlay") ;; kvlab*) umount -l "$where" || true ;; esac
done </proc/mounts
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p "/sys/fs/cgroup/$cgroup"
echo $$ >"/sys/fs/cgroup/$cgroup/cgroup.procs"
set +e
while :; do
  "$@"
  code=$?
  # With --keep-unit a guest's reboot is its supervisor's to carry out.
  [ $code = 133 ] || exit $code
done
"""
"""Run in the host's network namespace and a mount namespace of its own. The machine's own cgroup
mounts are hidden, so that the guest meets cgroup v2 alone; each host has its own cgroup, or
`systemctl stop` in one would end the processes of another."""


def mount(place: Place, name: str, lower: Sequence[Path], folder: Path) -> None:
    """A host's own layer over others, topmost first, at `root` in its folder."""
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
    # Volatile: no fsync reaches the disk. Power loss here is the loss of processes alone.
    lowers = ":".join(map(str, lower))
    options = f"volatile,redirect_dir=on,lowerdir={lowers},upperdir={folder}/upper"
    options += f",workdir={folder}/work"
    run("mount", "-t", "overlay", place.netns(name), "-o", options, folder / "root")


def launch(
    place: Place,
    name: str,
    root: Path,
    binds: Mapping[Path, Path],
    log: IO[bytes],
    *,
    cores: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Switch a host on. The process is its supervisor; it ends when the host is off."""
    label = place.netns(name)
    nspawn = (
        "systemd-nspawn",
        "--quiet",
        f"--machine={label}",
        f"--hostname={name}",
        f"--directory={root}",
        "--register=no",
        "--keep-unit",
        "--capability=CAP_NET_ADMIN",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=read-only",
        *(f"--bind-ro={outside}:{inside}" for outside, inside in binds.items()),
        "--boot",
    )
    pinned = ("taskset", "--cpu-list", ",".join(map(str, cores))) if cores else ()
    return subprocess.Popen(
        [
            *pinned,
            *("nsenter", f"--net=/run/netns/{label}", "unshare", "--mount"),
            *("--propagation", "private", "bash", "-c", SUPERVISE, "_", label, label),
            *nspawn,
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
    )


def cut(cgroup: Path) -> None:
    """End exactly the processes of one host, its supervisor included, and its cgroup for good.

    The cgroup must go: in one that is used again after cgroup.kill, children that newer systemd
    clones straight into a cgroup are killed at birth.
    """
    with suppress(OSError):  # it is gone already
        (cgroup / "cgroup.kill").write_text("1")

    def gone() -> bool | None:
        for folder in sorted(cgroup.rglob("*/"), key=lambda d: -len(d.parts)):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            cgroup.rmdir()
        return not cgroup.exists() or None

    if not wait_for(gone, timeout_s=30, interval_s=0.02):
        msg = f"{cgroup} does not go away: {(cgroup / 'cgroup.procs').read_text()}"
        raise LabError(msg)


def remove(folder: Path) -> None:
    """A dead host's files. Raises LabError when its file system stays mounted."""
    root = folder / "root"

    def unmounted() -> bool | None:
        if not os.path.ismount(root):
            return True
        run("umount", root, check=False)
        return not os.path.ismount(root) or None

    if not wait_for(unmounted, timeout_s=15, interval_s=0.05):
        msg = f"{root} is still mounted"
        raise LabError(msg)
    hardware.release(folder)
    shutil.rmtree(folder, ignore_errors=True)
