"""A bench of a fleet on nodes: asked through the router's node, started anew by fleet.yml."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters import http
from kvdeploy.adapters.recipe import lock_file
from kvdeploy.cli.held import Held
from kvdeploy.errors import CheckError, FleetError, UnreachableError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.planning.fleetplan import node_runtime
from kvdeploy.stages.asking import pairs_ready
from kvdeploy.stages.bench_environment import describe, describe_nodes
from kvdeploy.stages.nodefleet import NodeFleetStage
from kvdeploy.stages.proof import ProofStage
from kvdeploy.stages.units import units_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.benching import Up
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.stages.base import Results, Step
    from kvdeploy.stages.nodes import Crew

LEFT_ALONE: Final = ("provision", "configure", "model")
"""Stages of `up` that a bench takes as they are: it makes no node, and changes none."""
WAYS: Final = 9
"""How often the way to the router is measured."""


class NodeGround:
    def __init__(
        self, app: App, store: Store, up: Up, crew_for: Callable[[ClusterSpec], Crew]
    ) -> None:
        """Raises CheckError when the record does not tell of nodes."""
        self._up, self._crew_for = up, crew_for
        self._held = Held(app, store, up.record)
        missing = [name for name in LEFT_ALONE if name not in up.record.stages]
        if missing:
            msg = f"cluster {store.cluster!r}: its record has no {', '.join(missing)}"
            raise CheckError(msg, hint="'kvdeploy up' writes it again.")
        self._given: Results = {n: up.record.stages[n].result for n in LEFT_ALONE}
        self._fleet = self._stage(up.spec)

    def is_whole(self) -> bool:
        try:
            with self.reach(self._up.fleet) as here:
                return pairs_ready(here)
        except UnreachableError:
            return False

    def holds(self) -> bool:
        return self._fleet.holds(self._up.record.stages["fleet"].result)

    def bring(self, spec: ClusterSpec, *, prove: bool) -> FleetOutputs:
        self._fleet = fleet = self._stage(spec)
        proof = (ProofStage(spec, fleet.reach),) if prove else ()
        return self._held.bring((fleet, *proof), self._given)

    def reach(self, fleet: FleetOutputs) -> AbstractContextManager[FleetOutputs]:
        return self._fleet.reach(fleet)

    def renew(self, fleet: FleetOutputs, here: FleetOutputs, step: Step) -> None:
        units = units_of(self._held.record, self._crew_for(self._up.spec))
        if units is None:  # pragma: no cover  # there were nodes when it began
            msg = "there are no nodes any more"
            raise FleetError(msg)
        names = [e.name for e in fleet.engines if e.role == "decode"]
        units.renew(names, here, step, timeout_s=self._up.spec.runtime.start_timeout_s)

    def describe(self) -> dict[str, Any]:
        up, crew = self._up, self._crew_for(self._up.spec)
        lock = lock_file(f"{crew.device}.txt").read_text(encoding="utf-8")
        runtime = node_runtime(crew.device, lock, up.spec.runtime.env)
        made = ProvisionOutputs.model_validate(self._given["provision"])
        return describe(up.spec, runtime, up.model, up.fleet, describe_nodes(made))

    def notes(self, here: FleetOutputs) -> tuple[str, ...]:
        """How long the way is that every TTFT has in it."""
        ways = [
            http.get(f"{here.url}/health", timeout_s=10, trust=here.trust).seconds
            for _ in range(WAYS)
        ]
        return (
            "clients asked from here, through SSH to the router's node, and every TTFT has that "
            f"way in it: /health took {statistics.median(ways) * 1e3:.1f} ms at the median, each "
            "time over a new connection",
        )

    def _stage(self, spec: ClusterSpec) -> NodeFleetStage:
        stage = NodeFleetStage(self._crew_for(spec))
        stage.inputs(self._given)  # places everything
        return stage
