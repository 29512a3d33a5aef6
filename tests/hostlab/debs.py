"""Debian packages and the flat repositories that apt reads them from."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostlab.shell import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.hostlab.gpg import Key


@dataclass(frozen=True, kw_only=True)
class Package:
    """What one .deb holds."""

    name: str
    version: str
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Path on the host -> content."""
    programs: frozenset[str] = frozenset()
    """Those of `files` that can be run."""
    links: dict[str, str] = field(default_factory=dict)
    depends: str = ""
    after_install: str = ""
    """Shell text."""
    architecture: str = "amd64"

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version}_{self.architecture}.deb"


@cache
def architecture() -> str:
    """Debian's name for this machine's."""
    return run("dpkg", "--print-architecture").stdout.strip()


def build(package: Package, folder: Path) -> Path:
    """Make the .deb in a folder; its path."""
    tree = folder / f".{package.name}-{package.version}"
    control = tree / "DEBIAN"
    control.mkdir(parents=True)
    lines = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": package.architecture,
        "Maintainer": "The test hosts <lab@example.invalid>",
        "Depends": package.depends,
        "Description": "stand-in for the tests of playbooks",
    }
    text = "".join(f"{key}: {value}\n" for key, value in lines.items() if value)
    (control / "control").write_text(text)
    if package.after_install:
        script = control / "postinst"
        script.write_text(f"#!/bin/sh\nset -e\n{package.after_install}")
        script.chmod(0o755)
    for path, content in package.files.items():
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(0o755 if path in package.programs else 0o644)
    for path, target_name in package.links.items():
        link = tree / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target_name)
    made = folder / package.file_name
    # Gzip: the quickest of what every dpkg reads.
    run("dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "--build", tree, made)
    shutil.rmtree(tree)
    return made


def index(folder: Path) -> None:
    """Make a folder of .debs a flat repository, not signed."""
    publish(folder, _packages(folder))


def publish(folder: Path, packages: bytes) -> None:
    """Give a folder the lists that apt reads, when what is in it is known already."""
    names = [Path("Packages"), Path("Packages.gz")]
    for path, content in zip(names, (packages, gzip.compress(packages, mtime=0)), strict=True):
        (folder / path).write_bytes(content)
    (folder / "Release").write_text(_release(folder, "lab", names))


def index_suite(folder: Path, *, suite: str, key: Key) -> None:
    """Make a folder whose .debs lie in pool/ a signed repository with a suite and `main`."""
    where = Path(f"main/binary-{architecture()}/Packages")
    top = folder / "dists" / suite
    (top / where).parent.mkdir(parents=True)
    (top / where).write_bytes(_packages(folder))
    (top / "Release").write_text(_release(top, suite, [where]))
    key.clearsign(top / "Release", top / "InRelease")
    key.sign(top / "Release", top / "Release.gpg")


def _packages(folder: Path) -> bytes:
    entries = []
    for path in sorted(folder.rglob("*.deb")):
        control = run("dpkg-deb", "--field", path).stdout.strip()
        content = path.read_bytes()
        digest, where = hashlib.sha256(content).hexdigest(), path.relative_to(folder)
        entries.append(f"{control}\nFilename: {where}\nSize: {len(content)}\nSHA256: {digest}\n")
    return "\n".join(entries).encode()


def _release(top: Path, suite: str, files: Sequence[Path]) -> str:
    contents = {path: (top / path).read_bytes() for path in files}
    sums = "".join(
        f" {hashlib.sha256(content).hexdigest()} {len(content)} {path}\n"
        for path, content in contents.items()
    )
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S UTC")
    return (
        f"Origin: lab\nSuite: {suite}\nCodename: {suite}\nDate: {date}\n"
        f"Architectures: {architecture()}\nComponents: main\nSHA256:\n{sums}"
    )
