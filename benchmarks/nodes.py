"""How long nodes.yml takes on the hosts of a lab, the first time and again, and what it costs here.

    python -m benchmarks.nodes [HOSTS ...]      default: 1 4 8

Hosts are systemd containers on this machine with stand-ins of the vendors' software: what is
measured is Ansible and the roles, both ends of SSH on the same cores. Downloads, driver builds and
reboots of real nodes come on top. Wants what the tests of playbooks want: root, systemd-nspawn.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.configuration import build_inventory
from kvdeploy.planning.fleetplan import Machine
from tests.hostlab.lab import HostLab
from tests.hostlab.vendor import Vendor
from tests.playbooks.molecule.make import CLUSTER, GPU, plan_tiny

if TYPE_CHECKING:
    from kvdeploy.model.inventory import Inventory

TIMEOUT_S = 1800.0


def inventory(lab: HostLab, vendor: Vendor, url: str, folder: Path) -> Inventory:
    """What a cluster file makes of the lab's hosts; the vendors' files come from `url`."""
    prefills = max(1, (len(lab.hosts) - 1) // 2)
    count = {"prefill": {"count": prefills}, "decode": {"count": len(lab.hosts) - 1 - prefills}}
    fleet = {role: counted | {"tensor_parallel": 8} for role, counted in count.items()}
    unwatched = {"monitoring": {"enabled": False}}
    spec = ClusterSpec.model_validate(CLUSTER | unwatched | {"fleet": fleet})
    machines = [
        Machine(
            name=host.name,
            role="router" if host.name == "router-0" else host.name.partition("-")[0],  # type: ignore[arg-type]
            address=host.address,
            instance_type=GPU,
        )
        for host in lab.hosts
    ]
    vendors = vendor.variables(url)
    plan, site = plan_tiny(spec, machines, vendors, folder)
    made = build_inventory(spec, machines, plan, site, lab.connection())
    own = vendors | {"vllm_compiler": False, "vllm_disk_gib": 1}
    groups = {group: {**variables, **own} for group, variables in made.group_vars.items()}
    return made.model_copy(update={"group_vars": groups})


def measure(hosts: int) -> dict[str, object]:
    """One lab of `hosts` GPU nodes and a router, from nothing to ready, and once more."""
    gpu = [f"prefill-{i}" for i in range((hosts + 1) // 2)]
    gpu += [f"decode-{i}" for i in range(max(1, hosts // 2))]
    kinds = dict.fromkeys(gpu[: hosts if hosts > 1 else 2], "p5en") | {"router-0": "none"}
    limit = ("prefill-0",) if hosts == 1 else ("gpu",)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        vendor = Vendor.build(folder / "vendor")
        with HostLab(folder / "lab") as lab:
            lab.up(kinds, hardware=kinds)
            with vendor.serve(lab.gateway) as url:
                found = inventory(lab, vendor, url, folder)
                runs = [run(found, limit, folder) for _ in range(2)]
    return {"hosts": hosts, "first": runs[0], "second": runs[1]}


def run(found: Inventory, limit: tuple[str, ...], folder: Path) -> dict[str, object]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = Ansible(folder / "ansible.jsonl").run(
        Play(playbook="nodes.yml", inventory=found, limit=limit, timeout_s=TIMEOUT_S)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = [host for host in report.hosts if host.ok]
    roles = {role for host in worked for role in host.role_seconds}
    return {
        "seconds": round(report.seconds, 1),
        "control_cpu_s": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "tasks_a_host": max(host.ok + host.skipped for host in worked),
        "changed": report.changed,
        "slowest_role_s": {
            role: round(max(host.role_seconds.get(role, 0.0) for host in worked), 1)
            for role in sorted(roles)
        },
    }


def main() -> None:
    for hosts in [int(word) for word in sys.argv[1:]] or [1, 4, 8]:
        print(json.dumps(measure(hosts)), flush=True)


if __name__ == "__main__":
    main()
