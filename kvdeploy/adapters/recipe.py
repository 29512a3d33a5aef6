"""The files that an image follows from: where they lie, and what is in them."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdeploy import locks, probes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NODES: Final = "nodes.yml"
REACH: Final = "reach.yml"
SEAL: Final = "seal.yml"
OWN: Final = (REACH, SEAL, "seal.py")
"""Of the folder images/; what nodes.yml does lies in playbooks/."""
UNREAD: Final = frozenset({"README.md"})


def lock_file(name: str) -> Path:
    """A lock file, e.g. 'cuda.txt'."""
    return Path(str(resources.files(locks) / name))


def probe_file() -> Path:
    """The program that asks an environment what it can do."""
    return Path(str(resources.files(probes) / "runtime.py"))


def tiles_file() -> Path:
    """What lies beside the packages of a runtime for CPUs."""
    return Path(str(resources.files(probes) / "tiles.pth"))


def tree_digest(top: Path) -> str:
    """Of all files in a folder that count, with their names."""
    found = [f"{path.relative_to(top).as_posix()} {_digest(path)}" for path in _files(top)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def digests(playbooks: Path, images: Path, roles: Iterable[str]) -> dict[str, str]:
    """Name -> digest of every file that shapes a node: playbooks, roles, lock and probe.

    Caches, hidden files and what only people read do not count.
    """
    found = {f"images/{name}": _digest(images / name) for name in OWN}
    found[NODES] = _digest(playbooks / NODES)
    for role in roles:
        for path in _files(playbooks / "roles" / role):
            found[path.relative_to(playbooks).as_posix()] = _digest(path)
    return found | {"cuda.txt": _digest(lock_file("cuda.txt")), "probe": _digest(probe_file())}


def _files(top: Path) -> Iterator[Path]:
    for path in sorted(top.rglob("*")):
        parts = path.relative_to(top).parts
        hidden = any(part.startswith((".", "__pycache__")) for part in parts)
        if path.is_file() and not hidden and path.name not in UNREAD:
            yield path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
