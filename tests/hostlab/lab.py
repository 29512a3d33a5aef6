"""A lab: some hosts on a bridge of their own, made in seconds and taken down to nothing."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvdeploy.model.inventory import Connection, Inventory
from kvdeploy.model.inventory import Host as Node
from tests.hostlab import base, net
from tests.hostlab import hardware as hw
from tests.hostlab.guest import Host
from tests.hostlab.machine import cut, remove
from tests.hostlab.shell import LabError, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from kvdeploy.model.launch import Role
    from tests.hostlab.net import Place

__all__ = ["Host", "HostLab", "LabError"]


class HostLab:
    """Hosts below `root`, a folder of its own.

    With `owned`, the lab ends with the process that made it: what that process leaves behind,
    the next lab on this machine takes down. Without, it stays until somebody calls `down`.
    """

    def __init__(self, root: Path, distro: str = "bookworm", *, owned: bool = True) -> None:
        self.root, self._distro, self._owned = root.resolve(), distro, owned
        self._place: Place | None = None
        self._lower: tuple[Path, ...] = ()
        self._count = 0
        self._building = threading.Lock()
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()

    def up(
        self,
        names: Iterable[str],
        hardware: str | Mapping[str, str] = "p5en",
        binds: Mapping[Path, Path] | None = None,
        image: Path | None = None,
    ) -> tuple[Host, ...]:
        """New hosts, all started and reachable by SSH; what lay below `root` is gone.

        `hardware` is one kind for all, or a kind for each name. `binds` are folders of this
        machine that the hosts see, read-only: outside -> inside. `image` is what Host.capture
        took of another host: these then start from its disk.
        """
        wanted = tuple(names)
        kinds = {n: hardware if isinstance(hardware, str) else hardware[n] for n in wanted}
        self.open(image)
        try:
            planned = [(self._plan(name, binds or {}), kinds[name]) for name in wanted]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda one: self._make(*one), planned))
                list(pool.map(Host.wait, self.hosts))
            self.known_hosts.write_text("".join(host.host_key for host in self.hosts))
        except BaseException:
            self.down()
            raise
        return self.hosts

    def open(self, image: Path | None = None) -> None:
        """A lab without hosts: its bridge and its key. What lay below `root` is gone."""
        self._lower = (*((image,) if image else ()), base.ensure(self._distro))
        self.down()
        with net.locked():
            for place in net.places():
                if place.abandoned:
                    demolish(place)
        self.root.mkdir(parents=True, exist_ok=True)
        self._place = net.take(self.root, owned=self._owned)
        try:
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.root / "id")
        except BaseException:
            self.down()
            raise

    def add(
        self,
        name: str,
        hardware: str,
        *,
        address: str,
        binds: Mapping[Path, Path] | None = None,
        cores: tuple[int, ...] = (),
        login_key: str = "",
        host_key: tuple[str, str] | None = None,
        image: Path | None = None,
    ) -> Host:
        """One host more in a lab that is open, switched on; Host.wait tells when it is up.

        Whoever has `login_key` may log in as well, as with the key pair of an instance.
        `host_key` is its private and its public one; None: it has one of its own. It starts from
        the disk `image`, which Host.capture took.
        """
        host = self._plan(name, binds or {}, address=address, cores=cores)
        self._make(host, hardware, login_key, host_key, image)
        return host

    def remove(self, host: Host) -> None:
        """One host less; nothing of it is left."""
        cut(host.cgroup)
        host.reap()
        remove(host.folder)
        net.disconnect(self.place, host.name)
        self.hosts = tuple(other for other in self.hosts if other is not host)

    def _plan(
        self,
        name: str,
        binds: Mapping[Path, Path],
        *,
        address: str | None = None,
        cores: tuple[int, ...] = (),
    ) -> Host:
        self._count += 1
        host = Host(self.place, name, self._count, binds, address=address, cores=cores)
        self.hosts = (*self.hosts, host)
        return host

    def _make(
        self,
        host: Host,
        kind: str,
        login_key: str = "",
        host_key: tuple[str, str] | None = None,
        image: Path | None = None,
    ) -> None:
        layer = self.root / "hardware" / kind
        with self._building:
            if not layer.exists():
                hw.build(layer, kind)
        neighbours = {h.name: h.address for h in self.hosts} | {"labhost": self.gateway}
        lower = (layer, *([image] if image else []), *self._lower)
        host.prepare(lower, neighbours, kind, login_key, host_key)
        net.connect(self.place, host.name, host._index, host.address)
        host.start()

    def down(self) -> None:
        """Nothing is left: no process, namespace, bridge, mount or cgroup, and no file."""
        for place in net.places():
            if place.root == self.root:
                demolish(place)
        for host in self.hosts:
            host.reap()
        for leftover in ("hosts", "hardware", "id", "id.pub", "known_hosts"):
            path = self.root / leftover
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._place, self.hosts, self._count = None, (), 0

    # --- what it tells
    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def place(self) -> Place:
        if self._place is None:
            msg = "the lab is not up"
            raise LabError(msg)
        return self._place

    @property
    def gateway(self) -> str:
        """This machine's address on the lab's bridge."""
        return self.place.gateway

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def host_keys(self) -> str:
        return self.known_hosts.read_text()

    def connection(self) -> Connection:
        return Connection(
            user=base.USER,
            private_key=str(self.root / "id"),
            known_hosts=str(self.known_hosts),
        )

    def inventory(
        self, roles: Mapping[str, Role], variables: Mapping[str, Any] | None = None
    ) -> Inventory:
        """Some hosts of the lab in their roles; `variables` are for all of them."""
        nodes = tuple(
            Node(name=name, role=role, address=self[name].address) for name, role in roles.items()
        )
        return Inventory(
            hosts=nodes,
            connection=self.connection(),
            group_vars={"all": dict(variables or {})},
        )

    def ansible_inventory(
        self, roles: Mapping[str, Role], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The same for plain ansible-playbook, as JSON."""
        groups: dict[str, Any] = {}
        for name, role in roles.items():
            groups.setdefault(role, {"hosts": {}})["hosts"][name] = {}
        gpu: dict[str, Any] = {role: {} for role in ("prefill", "decode") if role in groups}
        known = f"-o UserKnownHostsFile={self.known_hosts} -o StrictHostKeyChecking=yes"
        everything = {
            "hosts": {name: {"ansible_host": self[name].address} for name in roles},
            "vars": {
                "ansible_user": base.USER,
                "ansible_ssh_private_key_file": str(self.root / "id"),
                "ansible_ssh_common_args": known,
                "ansible_python_interpreter": "/usr/bin/python3",
                **(variables or {}),
            },
            "children": {**groups, "gpu": {"children": gpu}},
        }
        return json.dumps({"all": everything}, indent=1)


def demolish(place: Place) -> None:
    """Take a lab down from what is written about it; its maker may be long dead."""
    for cgroup in net.cgroups().glob(f"{place.bridge}-*"):
        cut(cgroup)
    folders = place.root / "hosts"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(remove, folders.iterdir() if folders.is_dir() else ()))
    net.disconnect(place)
    net.give_back(place)
