"""A fleet on a lab's hosts, for tests of engines and router: its plan, its inventory, its runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.package import build_router_package
from kvdeploy.model import layout
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.configuration import ControlFiles, Site, build_inventory
from kvdeploy.planning.fleetplan import FleetPlan, Machine, node_runtime, plan_fleet
from tests.hostlab import base, hardware

if TYPE_CHECKING:
    from kvdeploy.adapters.ansible.report import PlayReport
    from kvdeploy.model.inventory import Inventory
    from kvdeploy.model.launch import LaunchSpec, Role
    from tests.hostlab.guest import Host
    from tests.hostlab.lab import HostLab

LOCKS: Final = Path(str(resources.files("kvdeploy.locks")))
STANDINS: Final = hardware.FILES / "wheels"
AT: Final = "/opt/standins"
"""Where hosts see the stand-ins of vLLM, NIXL and torch."""
WHEELS_AT: Final = "/opt/wheels"
STANDIN_PATH: Final = ":".join(f"{AT}/{name}" for name in ("vllm", "nixl", "torch"))
P5EN: Final = "p5en.48xlarge"
LOOKS_LIKE_ONE: Final = ModelOutputs(
    path=f"{layout.MODELS}/looks-like-one", served_name="tiny", config={}
)
"""A model, as far as the stand-in of vLLM looks."""
PREPARED: Final = f"""
set -e
useradd --system {layout.USER}
mkdir -p {layout.ROOT}/runtimes/one/bin {LOOKS_LIKE_ONE.path}
echo '{{}}' >{LOOKS_LIKE_ONE.path}/config.json
chown -R {layout.USER}:{layout.USER} {layout.DATA}
ln -s /usr/bin/python3 {layout.ROOT}/runtimes/one/bin/python
ln -s runtimes/one {layout.RUNTIME}
"""
"""What nodes.yml leaves of a node, as far as fleet.yml looks."""


def wheelhouse() -> Path:
    """The router's packages as wheels, fetched once a machine with pip's own configuration."""
    lock = (LOCKS / "router.txt").read_bytes()
    folder = base.CACHE / f"router-wheels-{sha256(lock).hexdigest()[:10]}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        only = ("--only-binary", ":all:", "--python-version", "3.11")
        subprocess.run(
            [*pip, *only, "--dest", part, "-r", LOCKS / "router.txt"], check=True, timeout=600
        )
        part.rename(folder)
    return folder


@dataclass
class Fleet:
    """What a cluster file makes of the hosts of a lab."""

    lab: HostLab
    folder: Path
    roles: dict[str, Role]
    spec: dict[str, Any] = field(default_factory=dict)
    """Changes of the cluster file."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the runtime."""
    env_of: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of one engine alone."""
    model: ModelOutputs = LOOKS_LIKE_ONE
    cores: dict[str, tuple[int, ...]] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    tls: tuple[str, str] | None = None
    """PEM text of the router's certificate and its key."""

    def but(self, **changes: Any) -> Fleet:
        return replace(self, **changes)

    @property
    def cluster(self) -> ClusterSpec:
        aws = {"region": "us-west-2", "zone": "us-west-2a", "instance_type": P5EN}
        whole = {"name": "demo", "target": "aws", "aws": aws, "connector": {"block_size": 32}}
        return ClusterSpec.model_validate(whole | self.spec)

    @property
    def machines(self) -> list[Machine]:
        return [
            Machine(
                name=name,
                role=role,
                address=self.lab[name].address,
                instance_type=P5EN,
                interface="eth0",
                cores=self.cores.get(name, (0,)),
            )
            for name, role in self.roles.items()
        ]

    @property
    def site(self) -> Site:
        files = ControlFiles(
            runtime_lock=str(LOCKS / "cpu.txt"),
            runtime_probe="",
            s3_lock="",
            router_lock=str(LOCKS / "router.txt"),
            router_package=build_router_package(self.folder / "package"),
        )
        return Site(device="cpu", files=files)

    @property
    def plan(self) -> FleetPlan:
        runtime = node_runtime("cpu", (LOCKS / "cpu.txt").read_text(), self.env)
        package = self.site.files.router_package
        plan = plan_fleet(self.cluster, self.machines, runtime, self.model, package)
        engines = {
            node: tuple(
                e.model_copy(update={"env": e.env | self.env_of.get(e.name, {})}) for e in here
            )
            for node, here in plan.engines.items()
        }
        return plan.model_copy(update={"engines": engines})

    @property
    def inventory(self) -> Inventory:
        found = build_inventory(
            self.cluster, self.machines, self.plan, self.site, self.lab.connection()
        )
        wheels = {"router_pip_args": ["--no-index", "--find-links", WHEELS_AT]}
        groups = {
            **found.group_vars,
            "gpu": found.group_vars["gpu"] | {"engine_model": self.model.path},
            "router": found.group_vars["router"] | wheels,
        }
        return found.model_copy(update={"group_vars": groups})

    def engine(self, name: str) -> LaunchSpec:
        return next(e for engines in self.plan.engines.values() for e in engines if e.name == name)

    def run(self, playbook: str, *limit: str, **variables: Any) -> PlayReport:
        """Raises as the adapter does."""
        secrets: dict[str, Any] = {}
        if self.api_keys:
            secrets["router_api_keys"] = list(self.api_keys)
        if self.tls:
            secrets["router_tls_cert"], secrets["router_tls_key"] = self.tls
        play = Play(
            playbook=playbook,
            inventory=self.inventory,
            variables=variables,
            secrets=secrets,
            limit=limit,
        )
        return Ansible(self.folder / "ansible.log").run(play)


def prepare(host: Host) -> None:
    """Make a host what fleet.yml expects, without the playbook that makes it so for real."""
    host.must("bash", "-c", PREPARED)


def state(host: Host, unit: str) -> str:
    return host.run("systemctl", "is-active", unit).stdout.strip()


def shown(host: Host, unit: str, name: str) -> str:
    return host.must("systemctl", "show", "--value", "-p", name, unit).strip()
