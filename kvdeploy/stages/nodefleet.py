"""Stage `fleet` on nodes: fleet.yml places and starts engines and router as systemd units."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.client import Play
from kvdeploy.adapters.recipe import tree_digest
from kvdeploy.adapters.shipped import playbooks_source
from kvdeploy.errors import FleetError, UnreachableError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.model.outputs import ConfigureOutputs, FleetOutputs, ModelOutputs, NodeFacts
from kvdeploy.stages.asking import pairs_ready, wait_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.stages.base import Results, Step
    from kvdeploy.stages.nodes import Blueprint, Crew

FLEET: Final = "fleet.yml"
FLEET_S: Final = 2 * 3600.0


class NodeFleetStage:
    name = "fleet"
    title = "start the fleet"

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._planned: Blueprint | None = None

    @property
    def planned(self) -> Blueprint:
        """What is to be where, once `inputs` were asked for."""
        assert self._planned is not None  # noqa: S101  # they always are, and first
        return self._planned

    def inputs(self, results: Results) -> Mapping[str, Any]:
        self._planned = self._blueprint(results)
        secrets = "\n".join((*self._crew.api_keys(), *self._crew.tls_texts()))
        return {
            "playbooks": tree_digest(playbooks_source()),
            "plan": self.planned.plan.model_dump(mode="json"),
            "nodes": {h.name: h.instance_id for h in self.planned.inventory.hosts},
            "ours": self._crew.variables,
            "secrets": hashlib.sha256(secrets.encode()).hexdigest(),
        }

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether every engine runs under the id that it had, and every pair is warm."""
        fleet = FleetOutputs.model_validate(result)
        try:
            if self._generations(self.planned) != fleet.generations:
                return False
            with self.reach(fleet) as here:
                return pairs_ready(here)
        except UnreachableError:
            return False

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        self._planned = planned = self._blueprint(results)
        self._crew.plays.listener = step
        self._crew.plays.run(
            Play(
                playbook=FLEET,
                inventory=planned.inventory,
                variables=self._crew.variables,
                secrets=self._crew.secrets(),
                timeout_s=FLEET_S,
            )
        )
        keys, cert = self._crew.api_key_file, self._crew.tls_cert_file
        fleet = planned.plan.outputs(
            {},
            api_key_file=str(keys) if keys else None,
            tls_cert_file=str(cert) if cert else None,
        )
        with self.reach(fleet) as here:
            if missing := wait_pairs(here, step):
                raise FleetError(missing, hint="'kvdeploy logs NAME' shows each side.")
        found = self._generations(planned)
        return fleet.model_copy(update={"generations": found}).model_dump(mode="json")

    @contextmanager
    def reach(self, fleet: FleetOutputs) -> Iterator[FleetOutputs]:
        """The fleet as it can be asked from here."""
        with self._crew.reach(self.planned.router, fleet) as here:
            yield here

    def _blueprint(self, results: Results) -> Blueprint:
        facts = ConfigureOutputs.model_validate(results["configure"]).facts
        return self._crew.blueprint(
            ProvisionOutputs.model_validate(results["provision"]),
            facts,
            ModelOutputs.model_validate(results["model"]),
        )

    def _generations(self, planned: Blueprint) -> dict[str, str]:
        """Of every engine that runs, as its node says.

        Raises:
            UnreachableError: a node does not answer.
        """
        engines = {s.name for specs in planned.plan.engines.values() for s in specs}
        found: dict[str, str] = {}
        for said in self._crew.remote.ask(planned.inventory.hosts).values():
            if not isinstance(said, NodeFacts):
                raise said
            found |= {n: g for n, g in said.generations.items() if n in engines}
        return found
