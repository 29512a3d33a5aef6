"""The root file system that every host starts from: made once, read-only ever after.

What is in it stands for a fresh cloud image: the packages such an image has, a user with
passwordless sudo, no package source but the lab's own. The cache's name follows from everything
that shapes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from tests.hostlab.shell import LabError, run

CACHE: Final = Path(os.environ.get("KVDEPLOY_HOSTLAB_CACHE", "/var/cache/kvdeploy-hostlab"))
USER: Final = "ubuntu"
UID: Final = 1000
PACKAGES: Final = (
    "acl",
    "binutils",
    "ca-certificates",
    "curl",
    "dbus",
    "e2fsprogs",
    "gpg",
    "gpgv",
    "iproute2",
    "kmod",
    "libnuma1",
    "openssh-server",
    "pciutils",
    "procps",
    "python3",
    "python3-apt",
    "python3-packaging",
    "python3-venv",
    "sudo",
    "systemd",
    "systemd-sysv",
)
MASKED: Final = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "getty.target",
    "systemd-networkd.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
)
"""What has nothing to do in a container, or would slow its start."""
LEFT_OUT: Final = (
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
)
PORT: Final = 8088
"""On which the lab's gateway serves what hosts install; `labhost` is its name to them."""
SOURCE: Final = f"deb [trusted=yes] http://labhost:{PORT}/archive ./\n"
ORIGIN: Final = "etc/apt/origin"
"""In the base: the sources that it was made from, with the suffix that tells their form."""
RECIPE: Final = 4
"""Raise it when `_finish` changes."""
PROGRAMS: Final = (
    *("as", "dpkg-deb", "gpg", "ip", "ld", "losetup", "mmdebstrap", "nsenter", "ssh-keygen"),
    "systemd-nspawn",
)
INSTALL: Final = (
    "apt-get install systemd-container mmdebstrap binutils gnupg iproute2 openssh-client"
)


def missing() -> str | None:
    """Why there can be no labs on this machine, and what to do; None: there can."""
    if os.geteuid() != 0:
        return "test hosts need root (network namespaces and systemd-nspawn)"
    if not Path("/dev/loop-control").exists():
        return "test hosts need loop devices (/dev/loop-control) for their disks"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"test hosts need {', '.join(absent)}: {INSTALL}" if absent else None


def name(distro: str) -> str:
    told = "|".join((distro, str(RECIPE), *PACKAGES, *MASKED, *LEFT_OUT))
    return f"base-{distro}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"


def ensure(distro: str) -> Path:
    """The base of a Debian release, bootstrapped if this machine has none yet.

    Several may ask at once: one makes it, the others wait for it.
    """
    if reason := missing():
        raise LabError(reason)
    base = CACHE / name(distro)
    if base.exists():
        return base
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name(distro)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.exists():
            part = base.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
            _bootstrap(distro, part)
            _finish(part)
            part.rename(base)
    return base


def _bootstrap(distro: str, root: Path) -> None:
    run(
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        "--quiet",
        f"--include={','.join(PACKAGES)}",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        distro,
        root,
        timeout_s=900,
    )


def _finish(root: Path) -> None:
    """What all hosts have in common: hosts differ in their names, keys and addresses only."""
    etc = root / "etc"
    run("chroot", root, "useradd", "-m", "-u", str(UID), "-s", "/bin/bash", USER)
    sudo = etc / "sudoers.d/90-cloud-init-users"
    sudo.write_text(f"{USER} ALL=(ALL) NOPASSWD:ALL\n")
    sudo.chmod(0o440)
    for home, owner in (("root", 0), (f"home/{USER}", UID)):
        keys = root / home / ".ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        os.chown(keys, owner, owner)
    for key in (etc / "ssh").glob("ssh_host_*"):
        key.unlink()
    # A host without DNS: an empty list of name servers, or every sudo waits for an answer.
    (etc / "resolv.conf").unlink(missing_ok=True)
    (etc / "resolv.conf").write_text("")
    (etc / "ssh/sshd_config.d/90-lab.conf").write_text("UseDNS no\nPasswordAuthentication no\n")
    # One source: what a playbook installs from the distribution, the lab serves.
    for source in (etc / "apt/sources.list", *(etc / "apt/sources.list.d").glob("*.sources")):
        if source.exists():
            source.rename((root / ORIGIN).with_suffix(source.suffix))
    (etc / "apt/sources.list").write_text(SOURCE)
    for unit in MASKED:
        link = etc / "systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (etc / "machine-id").write_text("")
