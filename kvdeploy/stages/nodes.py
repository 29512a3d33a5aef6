"""What the stages that work on nodes have in common: where everything goes, how nodes are reached,
and what playbooks are told.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from kvdeploy.adapters.package import build_router_package
from kvdeploy.adapters.recipe import tree_digest
from kvdeploy.adapters.shipped import playbooks_source
from kvdeploy.model.listing import entries
from kvdeploy.model.outputs import ModelOutputs, NodeFacts
from kvdeploy.planning.configuration import (
    Site,
    build_inventory,
    model_path,
    secret_names,
)
from kvdeploy.planning.fleetplan import machines_of, node_runtime, plan_fleet
from kvdeploy.planning.operator_checks import PASSWORD
from kvdeploy.stages.ingredients import (
    control_files,
    device_of,
    operators_variables,
    shaping_files,
)
from kvdeploy.stages.model import default_name, dtype_of, model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvdeploy.adapters.ansible.client import Play
    from kvdeploy.adapters.ansible.report import PlayReport
    from kvdeploy.errors import UnreachableError
    from kvdeploy.model.infra import ProvisionOutputs
    from kvdeploy.model.inventory import Connection, Host, Inventory
    from kvdeploy.model.outputs import Device, FleetOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.fleetplan import FleetPlan
    from kvdeploy.proc import Outcome
    from kvdeploy.progress import Listener
    from kvdeploy.stages.writing import Talker

UNKNOWN: Final = NodeFacts(boot_id="", interface="lo", cores=(0,))
"""In the place of what a node has not been asked yet; nothing is done to it because of this."""
TOKEN: Final = "HF_TOKEN"  # noqa: S105  # the name of a variable


class Plays(Protocol):
    """Runs playbooks: adapters/ansible has the one that does it for real."""

    listener: Listener

    def run(self, play: Play) -> PlayReport:
        """Raises PlaybookError, UnreachableError, ToolError or CheckError."""


class Nodes(Protocol):
    """Nodes that can be asked: adapters/remote does it over SSH."""

    @property
    def connection(self) -> Connection: ...

    def run(self, host: Host, *argv: str, timeout_s: float = ...) -> Outcome:
        """Raises UnreachableError or ToolError."""

    def ask(self, hosts: Sequence[Host]) -> dict[str, NodeFacts | UnreachableError]:
        """What nodes say of themselves; or why one does not."""

    def way(
        self, through: Host, targets: Sequence[tuple[str, int]]
    ) -> AbstractContextManager[Mapping[tuple[str, int], int]]:
        """Ports of this machine that lead to `targets`. Raises UnreachableError."""

    def follow(self, host: Host, *argv: str, log: Path) -> None: ...

    def talk(self, host: Host, *argv: str) -> AbstractContextManager[Talker]:
        """A program on a node that is spoken with. Raises ToolError."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What is to be where, on nodes that are there."""

    plan: FleetPlan
    inventory: Inventory

    @property
    def router(self) -> Host:
        return self.host(self.plan.router_node)

    def host(self, name: str) -> Host:
        return next(host for host in self.inventory.hosts if host.name == name)


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Whoever works on the nodes of one cluster."""

    spec: ClusterSpec
    root: Path
    """Of relative paths in the cluster file."""
    packages: Path
    """Folder for the router's code."""
    plays: Plays
    remote: Nodes
    environment: Mapping[str, str]
    """Of the operator: secrets that the cluster file does not hold."""

    @property
    def device(self) -> Device:
        return device_of(self.spec)

    @property
    def variables(self) -> dict[str, Any]:
        """Of the operator's own choice: they go before all others. Raises CheckError."""
        return operators_variables(self.spec, self.root)

    def files(self) -> dict[str, str]:
        """What shapes nodes beside the playbooks: file -> its text, whoever chose it."""
        return shaping_files(self.device, self.variables)

    def made_of(self) -> dict[str, str]:
        """Digests of what processes are started from beside their LaunchSpecs: 'engine' and
        'router'. A process whose digest is another one is restarted.
        """
        files, variables = self.files(), self.variables
        parts = {
            "engine": ("vllm_lock", "vllm_site_files"),
            "router": ("router_lock",),
        }
        templates = playbooks_source() / "roles"
        return {
            role: _digest(
                {
                    "files": [list(entries(files[name])) for name in names],
                    "units": tree_digest(templates / role / "templates"),
                    "told": {n: v for n, v in variables.items() if n.startswith(f"{role}_")},
                }
            )
            for role, names in parts.items()
        }

    def model(self) -> ModelOutputs:
        """The model as far as it is known before any node has it."""
        model = self.spec.model
        return ModelOutputs(
            path=model_path(self.spec, model_folder(self.spec, self.root)),
            served_name=model.served_name or default_name(model.id),
            config={},
            dtype=dtype_of(self.spec, self.device),
        )

    def blueprint(
        self,
        provision: ProvisionOutputs,
        facts: Mapping[str, NodeFacts] | None = None,
        model: ModelOutputs | None = None,
    ) -> Blueprint:
        """Place everything; without facts it tells no more than what nodes are prepared with."""
        package = build_router_package(self.packages)
        machines = machines_of(provision, facts or dict.fromkeys(provision.nodes, UNKNOWN))
        runtime = node_runtime(self.device, self.files()["vllm_lock"], self.spec.runtime.env)
        plan = plan_fleet(self.spec, machines, runtime, model or self.model(), package)
        site = Site(
            device=self.device,
            files=control_files(self.device, package),
            model_folder=model_folder(self.spec, self.root),
        )
        connection = self.remote.connection
        return Blueprint(
            plan=plan, inventory=build_inventory(self.spec, machines, plan, site, connection)
        )

    def secrets(self) -> dict[str, Any]:
        """Values of the roles' secret variables."""
        cert, key = self.tls_texts()
        found: dict[str, Any] = {
            "model_token": self.environment.get(TOKEN, ""),
            "router_api_keys": self.api_keys(),
            "router_tls_cert": cert,
            "router_tls_key": key,
            "monitoring_grafana_password": self.environment.get(PASSWORD, ""),
        }
        return {name: found[name] for name in secret_names(self.spec)}

    def api_keys(self) -> list[str]:
        path = self.api_key_file
        return [] if path is None else list(entries(path.read_text(encoding="utf-8")))

    @property
    def api_key_file(self) -> Path | None:
        return self._find(self.spec.router.api_key_file)

    @property
    def tls_cert_file(self) -> Path | None:
        return self._find(self.spec.router.tls_cert_file)

    def tls_texts(self) -> tuple[str, str]:
        """Of the router's certificate chain and its key; '' where it serves plain HTTP."""
        files = (self.tls_cert_file, self._find(self.spec.router.tls_key_file))
        cert, key = ("" if f is None else f.read_text(encoding="ascii") for f in files)
        return cert, key

    def _find(self, named: str | None) -> Path | None:
        return None if named is None else self.root / Path(named).expanduser()

    @contextmanager
    def reach(self, router: Host, fleet: FleetOutputs) -> Iterator[FleetOutputs]:
        """The fleet as it can be asked from here: through the router's node, which reaches it all.

        Raises:
            UnreachableError: that node does not answer.
        """
        engines = fleet.router_config.engines
        targets = [_place(fleet.url), *(_place(e.url) for e in engines)]
        with self.remote.way(router, targets) as ports:

            def here(url: str) -> str:
                return f"{urlsplit(url).scheme}://127.0.0.1:{ports[_place(url)]}"

            yield fleet.asked_over(here(fleet.url), {e.name: here(e.url) for e in engines})


def _place(url: str) -> tuple[str, int]:
    """'http://10.0.0.1:8000' -> ('10.0.0.1', 8000)."""
    address, _, port = urlsplit(url).netloc.rpartition(":")
    return address, int(port)


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
