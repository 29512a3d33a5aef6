"""Makes the scenario's hosts, as nodes.yml leaves them, and the inventory of their fleet.

python -m tests.playbooks.molecule.fleet.make FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.hostlab.lab import HostLab
from tests.playbooks.fleets import (
    AT,
    STANDIN_PATH,
    STANDINS,
    WHEELS_AT,
    Fleet,
    prepare,
    wheelhouse,
)

if TYPE_CHECKING:
    from kvdeploy.model.launch import Role

ROLES: Final[dict[str, Role]] = {
    "prefill-0": "prefill",
    "decode-0": "decode",
    "router-0": "router",
}


def main(folder: Path) -> None:
    lab = HostLab(folder / "lab", owned=False)
    lab.up(ROLES, hardware="none", binds={STANDINS: Path(AT), wheelhouse(): Path(WHEELS_AT)})
    for host in lab.hosts:
        prepare(host)
    fleet = Fleet(
        lab=lab,
        folder=folder,
        roles=ROLES,
        spec={"fleet": {"prefill": {"count": 2}, "decode": {}}},
        env={"PYTHONPATH": STANDIN_PATH},
    )
    inventory = fleet.inventory
    told = json.loads(lab.ansible_inventory(ROLES, inventory.group_vars["all"]))["all"]
    for group in ("gpu", "router"):
        told["children"][group]["vars"] = inventory.group_vars[group]
    for node in inventory.hosts:
        told["hosts"][node.name] |= node.vars
    (folder / "hosts.json").write_text(json.dumps({"all": told}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
