"""The router's code as a zip file, and the packages that it runs with."""

from __future__ import annotations

import json
import sys
import zipfile
from hashlib import sha256
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvdeploy.adapters import package
from kvdeploy.adapters.package import build_router_package
from kvdeploy.model.listing import entries
from kvdeploy.proc import Command, LocalRunner

if TYPE_CHECKING:
    from kvdeploy.model.package import RouterPackage

WHERE: Final = """
import json, sys
import kvdeploy.router.__main__
print(json.dumps([m.__file__ for n, m in sorted(sys.modules.items()) if n.startswith("kvdeploy")]))
"""


@pytest.fixture
def packed(tmp_path: Path) -> RouterPackage:
    return build_router_package(tmp_path)


@pytest.mark.real_process
def test_the_router_runs_from_the_zip_alone(packed: RouterPackage) -> None:
    command = Command(
        argv=(sys.executable, "-c", WHERE),
        env={"PYTHONPATH": packed.path, "PYTHONSAFEPATH": "1"},
        timeout_s=60,
    )
    ran = LocalRunner().run(command)
    assert ran.code == 0, ran.stderr
    files = json.loads(ran.stdout)
    assert len(files) > 10
    assert [f for f in files if not f.startswith(packed.path)] == []


def test_the_same_code_is_the_same_file_whenever_it_is_packed(tmp_path: Path) -> None:
    first, second = (build_router_package(tmp_path / name) for name in ("a", "b"))
    assert first.digest == second.digest
    assert Path(first.path).read_bytes() == Path(second.path).read_bytes()
    assert Path(first.path).name == f"kvdeploy-{first.digest}.zip"
    assert first.node_path == f"/opt/kvdeploy/packages/kvdeploy-{first.digest}.zip"


def test_what_is_packed_already_is_left_alone(packed: RouterPackage) -> None:
    before = Path(packed.path).stat()
    build_router_package(Path(packed.path).parent)
    assert Path(packed.path).stat() == before


def test_it_is_named_by_its_content(packed: RouterPackage) -> None:
    assert packed.digest == sha256(Path(packed.path).read_bytes()).hexdigest()[:16]


def test_the_zip_holds_programs_alone_and_no_time(packed: RouterPackage) -> None:
    with zipfile.ZipFile(packed.path) as archive:
        names = archive.namelist()
        times = {entry.date_time for entry in archive.infolist()}
    assert names == sorted(names)
    assert times == {package.EPOCH}
    assert {Path(name).suffix for name in names} == {".py"}
    assert not [n for n in names if n.startswith(("kvdeploy/adapters", "kvdeploy/stages"))]


# --- the packages beside it ------------------------------------------------------------------
def pins() -> dict[str, str]:
    text = (resources.files("kvdeploy.locks") / "router.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in entries(text))


def test_the_routers_lock_satisfies_what_kvdeploy_asks_for() -> None:
    wanted = {
        canonicalize_name(r.name): r.specifier
        for r in map(Requirement, metadata.requires("kvdeploy") or ())
        if r.marker is None
    }
    for name in ("aiohttp", "httptools", "prometheus-client", "pydantic", "uvloop"):
        assert pins()[name] in wanted[canonicalize_name(name)]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_routers_lock_is_closed(python: str) -> None:
    """It is installed with --no-deps: whatever one of its packages needs must be in it."""
    names = set(map(canonicalize_name, pins()))
    linux = {"python_version": python, "sys_platform": "linux", "extra": ""}
    for name in names:
        for asked in map(Requirement, metadata.requires(name) or ()):
            if asked.marker is None or asked.marker.evaluate({**linux}):
                assert canonicalize_name(asked.name) in names, f"{name} needs {asked}"
