"""A bench of a fleet on this machine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.common import Loaded
from kvdeploy.cli.held import Held
from kvdeploy.cli.up import local_stages
from kvdeploy.model.outputs import RuntimeOutputs
from kvdeploy.stages.bench_environment import describe, describe_machine
from kvdeploy.stages.fleet import LocalFleetStage

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.benching import Up
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Step


class LocalGround:
    def __init__(self, app: App, store: Store, up: Up, runner: Runner) -> None:
        self._store, self._up, self._runner = store, up, runner
        self._processes = Processes(store.processes)
        self._held = Held(app, store, up.record)

    def is_whole(self) -> bool:
        return self._stage(self._up.spec).is_whole(self._up.fleet)

    def holds(self) -> bool:
        return self._stage(self._up.spec).holds(self._up.record.stages["fleet"].result)

    def bring(self, spec: ClusterSpec, *, prove: bool) -> FleetOutputs:
        loaded = Loaded(spec=spec, source="bench", root=self._store.root)
        stages = local_stages(loaded, self._processes, self._store, self._runner)
        return self._held.bring(stages if prove else stages[:-1])

    def reach(self, fleet: FleetOutputs) -> AbstractContextManager[FleetOutputs]:
        return nullcontext(fleet)

    def renew(self, fleet: FleetOutputs, here: FleetOutputs, step: Step) -> None:  # noqa: ARG002
        self._stage(self._up.spec).renew(fleet, "decode", step)

    def describe(self) -> dict[str, Any]:
        up = self._up
        runtime = RuntimeOutputs.model_validate(up.record.stages["runtime"].result)
        hardware = describe_machine(up.fleet, self._runner)
        return describe(up.spec, runtime, up.model, up.fleet, hardware)

    def notes(self, here: FleetOutputs) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def _stage(self, spec: ClusterSpec) -> LocalFleetStage:
        return LocalFleetStage(
            spec, self._processes, root=self._store.root, config_path=self._store.router_config
        )
