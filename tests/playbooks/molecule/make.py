"""Makes a scenario's hosts, and the inventory that kvdeploy makes of a cluster file for them.

    python -m tests.playbooks.molecule.make SCENARIO FOLDER

Where vendors' files come from is all that differs from a cluster on AWS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.package import build_router_package
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.model import catalog
from kvdeploy.model.inventory import Connection
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.configuration import ControlFiles, Site, build_inventory, model_path
from kvdeploy.planning.fleetplan import Machine, node_runtime, plan_fleet
from tests.hostlab.lab import HostLab
from tests.playbooks import fleets, installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvdeploy.model.inventory import Inventory
    from kvdeploy.model.launch import Role
    from kvdeploy.planning.fleetplan import FleetPlan

LOCKS: Final = Path(str(resources.files("kvdeploy.locks")))
PROBE: Final = Path(str(resources.files("kvdeploy.probes"))) / "runtime.py"
GPU: Final = "p5en.48xlarge"
CLUSTER: Final = {
    "name": "demo",
    "target": "aws",
    "aws": {"region": "us-west-2", "zone": "us-west-2a", "instance_type": GPU},
    "model": {"id": "builtin:tiny"},
    "monitoring": {"enabled": True},
}
ROLES: Final[dict[str, Role]] = {
    "prefill-0": "prefill",
    "decode-0": "decode",
    "router-0": "router",
}
ELSEWHERE: Final = "192.0.2.1"
"""Of a node of the cluster that a scenario has no host for."""
SECRET: Final = {"monitoring_grafana_password": "known-to-this-scenario-alone"}


@dataclass(frozen=True, kw_only=True)
class Bare:
    """Hosts with nothing on them but what is said here."""

    hardware: Mapping[str, str]
    """Host -> its kind."""
    faults: tuple[str, ...] = ()
    """HOST:FAULT each."""
    installed: tuple[str, ...] = ()
    """Programs that the scenario's prepare.yml runs on every host."""


SCENARIOS: Final[dict[str, Bare]] = {
    "nodes": Bare(hardware={"prefill-0": "p5en", "decode-0": "p5en", "router-0": "none"}),
    "hardware": Bare(
        hardware={"prefill-0": "p5en", "decode-0": "p5en-raid"},
        faults=("prefill-0:old-driver", "prefill-0:old-libfabric", "prefill-0:efa-needs-reboot"),
    ),
    "runtime": Bare(
        hardware={"prefill-0": "p5en"},
        installed=(
            installed.A_NODE,
            installed.DRIVER,
            installed.EFA.format(catalog.EFA_INSTALLER),
        ),
    ),
    "monitoring": Bare(hardware={"prefill-0": "p5en", "router-0": "none"}),
}
"""All but fleet, whose hosts are as nodes.yml leaves them."""


def main(scenario: str, folder: Path) -> None:
    told = make_fleet(folder) if scenario == "fleet" else make_bare(SCENARIOS[scenario], folder)
    (folder / "hosts.json").write_text(json.dumps(told, indent=1))


def make_bare(wanted: Bare, folder: Path) -> dict[str, Any]:
    path, lab = folder / "hosts.json", folder / "lab"
    hosts = ",".join(f"{name}={kind}" for name, kind in wanted.hardware.items())
    up = (sys.executable, "-m", "tests.hostlab", "up", "--root", lab, "--hosts", hosts)
    faults = [word for fault in wanted.faults for word in ("--fault", fault)]
    subprocess.run([*up, "--inventory", path, *faults], check=True)
    told: dict[str, Any] = json.loads(path.read_text())
    addresses = {name: host["ansible_host"] for name, host in told["all"]["hosts"].items()}
    inventory = plan_inventory(addresses, told["all"]["vars"], folder)
    told = add(told, inventory, take=addresses)
    told["all"]["vars"]["installed_before"] = list(wanted.installed)
    return told


def plan_inventory(
    addresses: Mapping[str, str], vendors: Mapping[str, Any], folder: Path
) -> Inventory:
    """What kvdeploy makes of CLUSTER; `addresses` by host, `vendors` are the lab's variables."""
    machines = [
        Machine(
            name=name,
            role=role,
            address=addresses.get(name, ELSEWHERE),
            instance_type=GPU,
            interface="eth0",
            cores=(0,),
        )
        for name, role in ROLES.items()
    ]
    spec = ClusterSpec.model_validate(CLUSTER)
    plan, site = plan_tiny(spec, machines, vendors, folder)
    here = [m for m in machines if m.name in addresses]
    connection = Connection(user="", known_hosts="")
    inventory = build_inventory(spec, here, plan, site, connection)
    host = vendors["efa_url"].rpartition("/")[0]
    (folder / "lab/vendor/router").symlink_to(fleets.wheelhouse())
    wheels = ["--no-index", "--find-links", f"{host}/router/", *vendors["vllm_pip_args"][2:]]
    own = {"vllm_compiler": False, "router_pip_args": wheels, **SECRET, **vendors}
    groups = {
        group: {k: v for k, v in told.items() if k not in own}
        for group, told in inventory.group_vars.items()
    }
    groups["all"] |= own
    return inventory.model_copy(update={"group_vars": groups})


def plan_tiny(
    spec: ClusterSpec, machines: Sequence[Machine], vendors: Mapping[str, Any], folder: Path
) -> tuple[FleetPlan, Site]:
    """What kvdeploy makes of a cluster of the built-in model, and where its files lie here."""
    package = build_router_package(folder / "package")
    files = ControlFiles(
        runtime_lock=vendors["vllm_lock"],
        runtime_probe=str(PROBE),
        s3_lock=str(LOCKS / "node.txt"),
        router_lock=str(LOCKS / "router.txt"),
        router_package=package,
    )
    tiny = str(ensure_tiny_model(folder / "models", seed=1))
    model = ModelOutputs(path=model_path(spec, tiny), served_name="tiny", config={})
    plan = plan_fleet(spec, machines, node_runtime("cuda", "", {}), model, package)
    return plan, Site(device="cuda", files=files, model_folder=tiny)


def make_fleet(folder: Path) -> dict[str, Any]:
    lab = HostLab(folder / "lab", owned=False)
    binds = {fleets.STANDINS: Path(fleets.AT), fleets.wheelhouse(): Path(fleets.WHEELS_AT)}
    lab.up(ROLES, hardware="none", binds=binds)
    for host in lab.hosts:
        fleets.prepare(host)
    fleet = fleets.Fleet(
        lab=lab,
        folder=folder,
        roles=ROLES,
        spec={"fleet": {"prefill": {"count": 2}, "decode": {}}},
        env={"PYTHONPATH": fleets.STANDIN_PATH},
    )
    return add(json.loads(lab.ansible_inventory(ROLES)), fleet.inventory, take=ROLES)


def add(told: dict[str, Any], inventory: Inventory, *, take: Iterable[str]) -> dict[str, Any]:
    """The lab's inventory with kvdeploy's variables, which go before the lab's."""
    everything = told["all"]
    for group, variables in inventory.group_vars.items():
        place = everything if group == "all" else everything["children"].get(group)
        if place is not None:
            place["vars"] = place.get("vars", {}) | dict(variables)
    own = {node.name: dict(node.vars) for node in inventory.hosts}
    for name in take:
        everything["hosts"][name] |= own[name]
    return told


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
