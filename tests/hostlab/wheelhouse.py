"""Real wheels for the hosts: what the project's own lock files for nodes name.

Hosts reach no index. What they install with pip is downloaded once, and served to them as an index
together with the stand-ins.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import sys
from importlib import resources
from typing import TYPE_CHECKING, Final

from tests.hostlab import base
from tests.hostlab.shell import run

if TYPE_CHECKING:
    from pathlib import Path

LOCKS: Final = ("node.txt", "router.txt")
PYTHONS: Final = {"bookworm": "3.11", "trixie": "3.13"}
"""Of the hosts."""


def ensure(distro: str) -> Path:
    """A folder of the wheels of all LOCKS, for the Python of a Debian release."""
    texts = [(resources.files("kvdeploy.locks") / name).read_text("utf-8") for name in LOCKS]
    digest = hashlib.sha256("".join((PYTHONS[distro], *texts)).encode()).hexdigest()[:10]
    made = base.CACHE / f"wheels-{distro}-{digest}"
    if made.exists():
        return made
    base.CACHE.mkdir(parents=True, exist_ok=True)
    with (base.CACHE / f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            pins = re.findall(r"^[\w.-]+==\S+", "\n".join(texts), re.MULTILINE)
            run(
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--only-binary=:all:"),
                *("--python-version", PYTHONS[distro], "--dest", part, *pins),
                timeout_s=600,
            )
            part.rename(made)
    return made


def link(wheels: Path, simple: Path) -> None:
    """Show them in an index, each below its project's name."""
    for wheel in wheels.glob("*.whl"):
        folder = simple / re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / wheel.name).symlink_to(wheel)
