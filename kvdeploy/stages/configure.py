"""Stage `configure`: nodes that run become nodes that engines can run on, by nodes.yml."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.client import Play
from kvdeploy.adapters.recipe import NODES, tree_digest
from kvdeploy.adapters.shipped import playbooks_source
from kvdeploy.errors import FleetError, UnreachableError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.model.outputs import ConfiguredNode, ConfigureOutputs, NodeFacts
from kvdeploy.polling import SystemClock, wait_for
from kvdeploy.stages.nodes import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.inventory import Host, Inventory
    from kvdeploy.polling import Clock
    from kvdeploy.stages.base import Results, Step
    from kvdeploy.stages.nodes import Crew

REACH_S: Final = 1200.0
"""From "running" to a log-in: a machine with eight GPUs boots for minutes."""
AGAIN_S: Final = 3.0
FIRST_BOOT_S: Final = 900.0
NODES_S: Final = 2 * 3600.0
FLEET_YML: Final = ("engine_", "router_config", "router_spec", "router_package")
"""Beginnings of variables that only fleet.yml reads."""


class ConfigureStage:
    name = "configure"

    def __init__(
        self,
        crew: Crew,
        before: Mapping[str, Any] | None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """`before` is this stage's result of last time: only nodes that differ are worked on."""
        self._crew, self._clock = crew, clock or SystemClock()
        self._before = ConfigureOutputs.model_validate(before) if before else None
        self._inventory: Inventory | None = None

    @property
    def title(self) -> str:
        return "make nodes ready for engines"

    def inputs(self, results: Results) -> Mapping[str, Any]:
        provision = ProvisionOutputs.model_validate(results["provision"])
        self._inventory = self._crew.blueprint(provision).inventory
        return {"nodes": self._digests(self._inventory)}

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether every node answers and has not been started again since."""
        known = ConfigureOutputs.model_validate(result)
        assert self._inventory is not None  # noqa: S101  # inputs are always asked for first
        seen = self._crew.remote.ask(self._inventory.hosts)
        return {n: f.boot_id for n, f in seen.items() if isinstance(f, NodeFacts)} == {
            n: f.boot_id for n, f in known.facts.items()
        }

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        provision = ProvisionOutputs.model_validate(results["provision"])
        inventory = self._crew.blueprint(provision).inventory
        digests = self._digests(inventory)
        found = self._reach(inventory.hosts, step)
        limit = self._stale(digests, found)
        if limit:
            self._boot_over([h for h in inventory.hosts if h.name in limit], step)
            self._crew.plays.listener = step
            self._crew.plays.run(
                Play(
                    playbook=NODES,
                    inventory=inventory,
                    variables=self._crew.variables,
                    secrets=self._crew.secrets(),
                    limit=limit,
                    timeout_s=NODES_S,
                )
            )
            found = self._reach(inventory.hosts, step)  # a role may have restarted a node
        nodes = {
            name: ConfiguredNode(digest=digest, facts=_lasting(found[name]))
            for name, digest in digests.items()
        }
        return ConfigureOutputs(nodes=nodes).model_dump(mode="json")

    def _digests(self, inventory: Inventory) -> dict[str, str]:
        """Of everything that nodes.yml makes of each node."""
        playbooks, files = tree_digest(playbooks_source()), self._crew.files()
        routers = {"router_lock": files.pop("router_lock")}
        groups = inventory.group_vars
        return {
            host.name: _digest(
                {
                    "files": [playbooks, routers if host.role == "router" else files],
                    "instance": host.instance_id,
                    "ours": self._crew.variables,
                    "told": _told(groups.get("all", {}))
                    | _told(groups.get("router" if host.role == "router" else "gpu", {}))
                    | _told(host.vars),
                }
            )
            for host in inventory.hosts
        }

    def _stale(self, digests: Mapping[str, str], found: Mapping[str, NodeFacts]) -> tuple[str, ...]:
        """Nodes that nodes.yml has yet to be run on."""
        known = self._before.nodes if self._before else {}
        return tuple(
            name
            for name, digest in digests.items()
            if name not in known
            or name not in found
            or (known[name].digest, known[name].facts.boot_id) != (digest, found[name].boot_id)
        )

    def foresee(
        self, provision: ProvisionOutputs, found: Mapping[str, NodeFacts]
    ) -> tuple[tuple[str, ...], ConfigureOutputs]:
        """On which nodes `apply` would run nodes.yml, and its result as far as it can be known.

        Args:
            provision: nodes as they will be.
            found: what nodes say of themselves now; one that is not there yet says nothing.
        """
        digests = self._digests(self._crew.blueprint(provision).inventory)
        known = self._before.nodes if self._before else {}
        nodes = {
            name: ConfiguredNode(
                digest=digest,
                facts=_lasting(found[name])
                if name in found
                else known[name].facts
                if name in known
                else UNKNOWN,
            )
            for name, digest in digests.items()
        }
        return self._stale(digests, found), ConfigureOutputs(nodes=nodes)

    def _reach(self, hosts: Sequence[Host], step: Step) -> dict[str, NodeFacts]:
        """Wait until every node answers.

        Raises:
            UnreachableError: one does not; with its reason and the names of the others.
        """
        found: dict[str, NodeFacts] = {}
        silent: dict[str, UnreachableError] = {}

        def look() -> bool | None:
            left = [h for h in hosts if h.name not in found]
            for name, said in self._crew.remote.ask(left).items():
                if isinstance(said, NodeFacts):
                    found[name] = said
                    silent.pop(name, None)
                else:
                    silent[name] = said
            waiting = next(iter(silent.values()), None)
            step.update(f"waiting for {', '.join(silent)}: {waiting.message}" if waiting else "")
            return True if not silent else None

        if not wait_for(look, timeout_s=REACH_S, interval_s=AGAIN_S, clock=self._clock):
            first, *others = silent.values()
            more = f"; nor {', '.join(list(silent)[1:])}" if others else ""
            msg = f"{first.message} (after {REACH_S / 60:.0f} min){more}"
            raise UnreachableError(msg, hint=first.hint)
        return found

    def _boot_over(self, hosts: Sequence[Host], step: Step) -> None:
        """Until first boots are over: apt and users are cloud-init's until then."""
        step.update("waiting for first boots to end")
        program = f"! command -v cloud-init || timeout {FIRST_BOOT_S:.0f} cloud-init status --wait"
        for host in hosts:
            self._crew.remote.run(host, "sh", "-c", program, timeout_s=FIRST_BOOT_S + 60)


class NodeModelStage:
    """Stage `model` where nodes hold the weights: only their configuration is wanted here."""

    name = "model"
    title = "read the model's configuration from a node"

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def inputs(self, results: Results) -> Mapping[str, Any]:
        model = self._crew.spec.model
        return {
            "model": model.model_dump(include={"id", "revision", "served_name", "dtype"}),
            "planned": self._crew.model().model_dump(),
            "nodes": dict(results["configure"]),
        }

    def holds(self, result: Mapping[str, Any]) -> bool:
        return bool(result)

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        provision = ProvisionOutputs.model_validate(results["provision"])
        planned = self._crew.model()
        hosts = self._crew.blueprint(provision).inventory.hosts
        host = next(h for h in hosts if h.role == "prefill")
        step.update(host.name)
        path = f"{planned.path}/config.json"
        outcome = self._crew.remote.run(host, "cat", path)
        try:
            config = json.loads(outcome.stdout) if outcome.code == 0 else None
        except ValueError:
            config = None
        if not isinstance(config, dict):
            msg = f"{host.name} has no {path} that can be read: {outcome.tail(1)[:200]}"
            raise FleetError(msg, hint="'kvdeploy up --from configure' stages the model again.")
        return planned.model_copy(update={"config": config}).model_dump()


def _lasting(facts: NodeFacts) -> NodeFacts:
    """What stays as it is until the node is started again."""
    return NodeFacts(boot_id=facts.boot_id, interface=facts.interface, cores=facts.cores)


def _told(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in variables.items() if not k.startswith(FLEET_YML)}


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
