"""Hosts with a real systemd for the tests of playbooks, and the vendors' software for them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hostlab import base
from tests.hostlab.lab import HostLab
from tests.hostlab.vendor import Vendor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.inventory import Inventory
    from kvdeploy.model.launch import Role
    from tests.hostlab.guest import Host

NO_SKIP = "KVDEPLOY_TESTS_NO_SKIP"
"""Set in CI: what cannot be tested is a failure there."""
DISTRO = os.environ.get("KVDEPLOY_HOSTLAB_DISTRO", "bookworm")


LONGEST = ("test_fleet_proof", "test_node_roles", "test_runtime_roles", "test_monitoring")
"""Minutes each. They begin first, so that not one of them alone is waited for in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here works on real hosts: nothing is forbidden to it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real_process)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def _hosts_or_skip() -> None:
    if reason := base.missing():
        if os.environ.get(NO_SKIP):
            pytest.fail(f"{reason}, and {NO_SKIP} is set")
        pytest.skip(reason)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A lab that is up, and the vendors' files as its hosts reach them."""

    lab: HostLab
    vendor: Vendor
    url: str

    @property
    def variables(self) -> dict[str, Any]:
        """Of the roles: where vendors' files come from."""
        return self.vendor.variables(self.url)

    def __getitem__(self, name: str) -> Host:
        return self.lab[name]

    def inventory(self, roles: Mapping[str, Role], **variables: Any) -> Inventory:
        """Some of the hosts, with the vendors' variables and these."""
        return self.lab.inventory(roles, self.variables | variables)


class Labs:
    """Makes labs: call it with the names of hosts. They end with the module that asked."""

    def __init__(self, vendor: Vendor, folders: pytest.TempPathFactory, stack: ExitStack) -> None:
        self._vendor, self._folders, self._stack = vendor, folders, stack

    def __call__(
        self,
        *names: str,
        hardware: str | Mapping[str, str] = "p5en",
        binds: Mapping[Path, Path] | None = None,
        image: Path | None = None,
    ) -> Served:
        lab = HostLab(self._folders.mktemp("lab"), DISTRO)
        self._stack.enter_context(lab)
        lab.up(names, hardware=hardware, binds=binds, image=image)
        url = self._stack.enter_context(self._vendor.serve(lab.gateway))
        return Served(lab=lab, vendor=self._vendor, url=url)


@pytest.fixture(scope="session")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    """Stand-ins of all vendors' software, built once."""
    _hosts_or_skip()
    return Vendor.build(tmp_path_factory.mktemp("vendor") / "files", DISTRO)


@pytest.fixture(scope="module")
def labs(vendor: Vendor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labs]:
    """Skips, or fails in CI, where there can be no hosts."""
    with ExitStack() as stack:
        yield Labs(vendor, tmp_path_factory, stack)
