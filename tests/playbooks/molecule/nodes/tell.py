"""Adds to the inventory of the scenario's hosts what kvdeploy makes of a cluster file.

    python -m tests.playbooks.molecule.nodes.tell FOLDER

Where vendors' files come from stays as the hosts' inventory has it: that is all that differs from a
cluster on AWS.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Final

from kvdeploy.adapters.package import build_router_package
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.model.inventory import Connection
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.configuration import ControlFiles, Site, build_inventory, model_path
from kvdeploy.planning.fleetplan import Machine, node_runtime, plan_fleet
from tests.playbooks.fleets import wheelhouse

LOCKS: Final = Path(str(resources.files("kvdeploy.locks")))
PROBE: Final = Path(str(resources.files("kvdeploy.probes"))) / "runtime.py"
GPU: Final = "p5en.48xlarge"
CLUSTER: Final = {
    "name": "demo",
    "target": "aws",
    "aws": {"region": "us-west-2", "zone": "us-west-2a", "instance_type": GPU},
    "model": {"id": "builtin:tiny"},
    "monitoring": {"enabled": False},
}


def main(folder: Path) -> None:
    told = json.loads((folder / "hosts.json").read_text())["all"]
    vendors: dict[str, Any] = told["vars"]
    roles = {
        name: role for role in told["children"] for name in told["children"][role].get("hosts", ())
    }
    machines = [
        Machine(
            name=name,
            role=role,
            address=told["hosts"][name]["ansible_host"],
            instance_type=GPU,
            interface="eth0",
            cores=(0,),
        )
        for name, role in roles.items()
    ]
    spec = ClusterSpec.model_validate(CLUSTER)
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
    site = Site(device="cuda", files=files, model_folder=tiny)
    connection = Connection(user="", known_hosts="")
    inventory = build_inventory(spec, machines, plan, site, connection)
    host = vendors["efa_url"].rpartition("/")[0]
    wheels = folder / "lab/vendor/router"
    wheels.symlink_to(wheelhouse())
    own: dict[str, Any] = {
        "vllm_compiler": False,
        "router_pip_args": [
            "--no-index",
            "--find-links",
            f"{host}/router/",
            *vendors["vllm_pip_args"][2:],
        ],
    }
    for group, variables in inventory.group_vars.items():
        place = told if group == "all" else told["children"].setdefault(group, {})
        mine = {k: v for k, v in {**variables, **own}.items() if k not in vendors}
        place["vars"] = place.get("vars", {}) | mine
    for node in inventory.hosts:
        told["hosts"][node.name] |= node.vars
    (folder / "hosts.json").write_text(json.dumps({"all": told}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
