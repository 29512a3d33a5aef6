"""Real Debian packages for the hosts: what roles install from the distribution.

Hosts reach no mirror. What they may install is downloaded once, with all that it depends on beyond
the base, and served to them as a repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from typing import TYPE_CHECKING, Final

from tests.hostlab import base, debs
from tests.hostlab.shell import run

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES: Final = (
    "adduser",
    "chrony",
    "gcc",
    "libc6-dev",
    "libhwloc15",
    "libnl-3-200",
    "libnl-route-3-200",
    "prometheus",
    "prometheus-node-exporter",
    "python3-dev",
    "python3-yaml",
    "xfsprogs",
)


def name(distro: str) -> str:
    told = "|".join((base.name(distro), *PACKAGES))
    return f"archive-{distro}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"


def ensure(distro: str) -> Path:
    """A folder that is a flat repository of PACKAGES and what they need."""
    lower = base.ensure(distro)
    made = base.CACHE / name(distro)
    if made.exists():
        return made
    with (base.CACHE / f"{name(distro)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            _download(lower, part)
            debs.index(part)
            part.rename(made)
    return made


def _download(lower: Path, target: Path) -> None:
    """apt resolves against what the base has installed, from the base's own sources."""
    state = target / "state"
    (state / "lists/partial").mkdir(parents=True)
    (state / "archives/partial").mkdir(parents=True)
    options = {
        "Dir::State::status": lower / "var/lib/dpkg/status",
        "Dir::State::lists": state / "lists",
        "Dir::State::extended_states": state / "extended",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "Dir::Etc::sourcelist": next(lower.glob(f"{base.ORIGIN}.*")),
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::trustedparts": lower / "etc/apt/trusted.gpg.d",
        "Dir::Etc::preferencesparts": "-",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Keep-Downloaded-Packages": "true",
        "Acquire::Languages": "none",
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    run("apt-get", *words, "-qq", "update", timeout_s=300)
    run("apt-get", *words, "-qq", "-y", "--download-only", "install", *PACKAGES, timeout_s=600)
    for path in (state / "archives").glob("*.deb"):
        path.rename(target / path.name.replace("%3a", "."))
    shutil.rmtree(state)
