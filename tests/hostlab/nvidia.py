"""The driver's and the fabric manager's stand-ins: packages of one branch, in two versions each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import NVIDIA_BRANCH
from tests.hostlab import debs, elf
from tests.hostlab.hardware import FILES, HOME

if TYPE_CHECKING:
    from pathlib import Path

NEWEST: Final = f"{NVIDIA_BRANCH}.159.03"
OLDER: Final = f"{NVIDIA_BRANCH}.126.20"
"""For hosts whose driver is there already: their fabric manager must be of just this version."""
DRIVER: Final = f"nvidia-driver-{NVIDIA_BRANCH}-server-open"
MANAGER: Final = f"nvidia-fabricmanager-{NVIDIA_BRANCH}"
MANAGER_UNIT: Final = """\
[Unit]
Description=NVIDIA fabric manager service
After=network-online.target
Wants=network-online.target

[Service]
ExecStart=/usr/bin/nv-fabricmanager -c /usr/share/nvidia/nvswitch/fabricmanager.cfg
Restart=no

[Install]
WantedBy=multi-user.target
"""
PERSISTENCE_UNIT: Final = """\
[Unit]
Description=NVIDIA Persistence Daemon

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-smi -pm 1
ExecStop=/usr/bin/rm -f /run/nvidia-persistence

[Install]
WantedBy=multi-user.target
"""
LOAD: Final = f"""\
mkdir -p {HOME}/installed
echo @VERSION@ >{HOME}/installed/nvidia
if [ -e {HOME}/module/nvidia/version ]; then
  # A module in use stays the old one: the next boot loads the new.
  touch /run/reboot-required
else
  {HOME}/load nvidia || true
fi
"""


def package_version(version: str) -> str:
    """As Ubuntu names a package of a driver's version."""
    return f"{version}-0ubuntu0.24.04.1"


def build(folder: Path) -> None:
    """A flat repository, not signed."""
    folder.mkdir(parents=True)
    cuda = folder / "libcuda.so.1"
    elf.plain(cuda, cuda.name)
    for version in (OLDER, NEWEST):
        smi = (FILES / "nvidia/nvidia-smi").read_text().replace("@VERSION@", version)
        manager = (FILES / "nvidia/nv-fabricmanager").read_text().replace("@VERSION@", version)
        debs.build(
            debs.Package(
                name=DRIVER,
                version=package_version(version),
                architecture="all",
                files={
                    "/usr/bin/nvidia-smi": smi,
                    "/usr/lib/libcuda.so.1": cuda.read_bytes(),
                    "/lib/systemd/system/nvidia-persistenced.service": PERSISTENCE_UNIT,
                },
                programs=frozenset({"/usr/bin/nvidia-smi"}),
                after_install="ldconfig\n" + LOAD.replace("@VERSION@", version),
            ),
            folder,
        )
        debs.build(
            debs.Package(
                name=MANAGER,
                version=package_version(version),
                architecture="all",
                files={
                    "/usr/bin/nv-fabricmanager": manager,
                    "/lib/systemd/system/nvidia-fabricmanager.service": MANAGER_UNIT,
                },
                programs=frozenset({"/usr/bin/nv-fabricmanager"}),
            ),
            folder,
        )
    cuda.unlink()
    debs.index(folder)
