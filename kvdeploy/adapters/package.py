"""Pack the router's code into one zip file: the same code is the same file, whoever packs it."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import kvdeploy
from kvdeploy.model.package import RouterPackage

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS: Final = ("__init__.py", "errors.py", "model", "router")
"""All that the router imports. Other code may change without another router."""
EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold, in place of the files' own."""


def build_router_package(folder: Path) -> RouterPackage:
    """Write kvdeploy-DIGEST.zip into `folder`, unless it is there already."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, path in sorted(_sources()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), path.read_bytes())
    content = packed.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"kvdeploy-{digest}.zip"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(path)
    return RouterPackage(path=str(path), digest=digest)


def _sources() -> Iterator[tuple[str, Path]]:
    """Name in the zip file, and where it lies."""
    root = Path(kvdeploy.__file__).parent
    for part in PARTS:
        there = root / part
        for path in (there,) if there.is_file() else there.rglob("*.py"):
            yield f"kvdeploy/{path.relative_to(root).as_posix()}", path
