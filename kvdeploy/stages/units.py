"""Processes on nodes, as systemd units: which, where, how they are, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.client import Play
from kvdeploy.errors import FleetError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.model.outputs import ConfigureOutputs, FleetOutputs, ModelOutputs, NodeFacts
from kvdeploy.planning.launch import ROUTER
from kvdeploy.polling import wait_for
from kvdeploy.stages.asking import pairs_ready
from kvdeploy.stages.nodefleet import FLEET, FLEET_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvdeploy.model.inventory import Host
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.record import Record
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.nodes import Blueprint, Crew

NOTICED_S: Final = 15.0
"""For the router to see that an engine has gone: it looks every second."""
SYSTEMCTL_S: Final = 180.0
"""An engine that is stopped lets its requests end first."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """The fleet of a record, on its nodes."""

    crew: Crew
    blueprint: Blueprint
    model: ModelOutputs
    fleet: FleetOutputs

    @property
    def hosts(self) -> dict[str, Host]:
        """By process: engines as planned, then the router."""
        plan = self.blueprint.plan
        engines = {s.name: node for node, specs in plan.engines.items() for s in specs}
        places = dict(sorted(engines.items())) | {ROUTER: plan.router_node}
        return {name: self.blueprint.host(node) for name, node in places.items()}

    def host(self, name: str) -> Host:
        """Where a process is, or the node of that name.

        Raises:
            FleetError: there is neither.
        """
        nodes = {host.name: host for host in self.blueprint.inventory.hosts}
        known = nodes | self.hosts
        if name not in known:
            msg = f"nothing of this cluster is called {name!r}"
            raise FleetError(msg, hint=f"There are: {', '.join(sorted(known))}.")
        return known[name]

    def reach(self) -> AbstractContextManager[FleetOutputs]:
        """The fleet as it can be asked from here."""
        return self.crew.reach(self.blueprint.router, self.fleet)

    def observe(self) -> Iterator[dict[str, Any]]:
        """How every process is, as its node says; or why a node does not say."""
        said = self.crew.remote.ask(self.blueprint.inventory.hosts)
        for name, host in self.hosts.items():
            told = said[host.name]
            row = {"name": name, "node": host.name, "state": "unreachable", "restarts": None}
            if not isinstance(told, NodeFacts):
                yield row | {"since": "", "generation": "", "reason": told.message}
                continue
            unit = told.units.get(name, {})
            yield row | {
                "state": unit.get("ActiveState", "absent"),
                "restarts": int(unit.get("NRestarts", 0)),
                "since": unit.get("ActiveEnterTimestamp", ""),
                "generation": told.generations.get(name, ""),
                "reason": "",
            }

    def start(self, engines: Sequence[LaunchSpec], step: Step) -> None:
        """Start these in the place of those of the same names, until all are ready, and leave the
        rest of the fleet alone.

        Raises KvdeployError: a node does not answer, or an engine does not start so.
        """
        anew = {engine.name: engine for engine in engines}
        touched = [
            host.model_copy(update={"vars": {**host.vars, "engine_specs": wanted}})
            for host in self.blueprint.inventory.hosts
            if (wanted := self._specs_on(host, anew)) is not None
        ]
        self.crew.plays.listener = step
        self.crew.plays.run(
            Play(
                playbook=FLEET,
                inventory=self.blueprint.inventory.model_copy(update={"hosts": tuple(touched)}),
                variables=self.crew.variables,
                secrets=self.crew.secrets(),
                timeout_s=FLEET_S,
            )
        )

    def _specs_on(self, host: Host, anew: Mapping[str, LaunchSpec]) -> list[dict[str, Any]] | None:
        """What a host's engines are to be started from; None where none of them changes."""
        here = self.blueprint.plan.engines.get(host.name, ())
        if not any(engine.name in anew for engine in here):
            return None
        return [anew.get(engine.name, engine).model_dump(mode="json") for engine in here]

    def renew(
        self, names: Sequence[str], here: FleetOutputs, step: Step, *, timeout_s: float
    ) -> None:
        """Start engines anew, and wait until the router has them again.

        Raises:
            FleetError: one does not come back in time.
        """
        for name in names:
            step.update(f"starting {name} anew")
            self._run(name, "restart", unit_of(name))
        wait_for(lambda: None if pairs_ready(here) else True, timeout_s=NOTICED_S, interval_s=0.1)
        step.update(f"waiting for {', '.join(names)}")
        back = wait_for(lambda: pairs_ready(here) or None, timeout_s=timeout_s, interval_s=0.5)
        if not back:
            msg = f"{', '.join(names)}: started anew, and not back within {timeout_s:.0f} s"
            raise FleetError(msg, hint="'kvdeploy logs NAME' shows why; 'kvdeploy up' repairs it.")

    def pause(self, name: str) -> None:
        self._signal(name, "SIGSTOP")

    def resume(self, name: str) -> None:
        self._signal(name, "SIGCONT")

    def _signal(self, name: str, number: str) -> None:
        self._run(name, "kill", f"--signal={number}", unit_of(name))

    def _run(self, name: str, verb: str, *words: str) -> None:
        argv = ("sudo", "-n", "systemctl", verb, *words)
        outcome = self.crew.remote.run(self.hosts[name], *argv, timeout_s=SYSTEMCTL_S)
        if outcome.code:
            msg = f"systemctl {verb} of {name} failed: {outcome.tail(1)}"
            raise FleetError(msg)


def unit_of(process: str) -> str:
    """'decode-0' -> 'kvdeploy-engine@decode-0.service'."""
    return "kvdeploy-router.service" if process == ROUTER else f"kvdeploy-engine@{process}.service"


def units_of(record: Record, crew: Crew) -> Units | None:
    """The fleet that was brought up, or was to be; None before there were nodes for it."""
    done = {name: stage.result for name, stage in record.stages.items()}
    if not {"provision", "configure", "model"} <= done.keys():
        return None
    model = ModelOutputs.model_validate(done["model"])
    facts = ConfigureOutputs.model_validate(done["configure"]).facts
    provision = ProvisionOutputs.model_validate(done["provision"])
    if not provision.nodes.keys() <= facts.keys():
        return None
    blueprint = crew.blueprint(provision, facts, model)
    fleet = FleetOutputs.model_validate(done["fleet"]) if "fleet" in done else None
    return Units(
        crew=crew,
        blueprint=blueprint,
        model=model,
        fleet=fleet or blueprint.plan.outputs({}),
    )
