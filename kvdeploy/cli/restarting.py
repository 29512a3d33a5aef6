"""How smoke's controls get engines that are started otherwise, and the cluster its own again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.cli.held import Held
from kvdeploy.model.record import StageRecord
from kvdeploy.stages.ttft import climb_on, note_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.record import Record
    from kvdeploy.model.reports import SmokeReport
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.stages.base import Stage, Step
    from kvdeploy.stages.restarts import Efa, Screen, Starter
    from kvdeploy.stages.smoke import Smoke

VOID = ""
"""A digest that no inputs have: the next `up` does the stage again, whatever the world is like."""


class Restarting:
    """Of a cluster that is held, and up."""

    def __init__(
        self,
        app: App,
        store: Store,
        record: Record,
        spec: ClusterSpec,
        *,
        stages: Callable[[ClusterSpec], Sequence[Stage]],
        start: Callable[[Sequence[LaunchSpec], Step], None],
        reached: Callable[[FleetOutputs], FleetOutputs] = lambda fleet: fleet,
    ) -> None:
        """
        Args:
            app: shows progress.
            store: keeps the record.
            record: of the cluster as it is.
            spec: as it was brought up.
            stages: `fleet` and `proof` of a cluster file.
            start: starts engines until they are ready.
            reached: makes of the fleet one that can be asked from here.
        """
        self._held, self._spec = Held(app, store, record), spec
        self._stages, self._start, self._reached = stages, start, reached

    def spoil(self, engines: Sequence[LaunchSpec], step: Step) -> None:
        self._void()
        self._start(engines, step)

    def serve_pull(self) -> FleetOutputs:
        self._void()
        connector = self._spec.connector.model_copy(update={"mode": "pull"})
        router = {"mode": "auto", "aggregate_below_tokens": 0}
        return self._bring(
            self._spec.model_copy(
                update={
                    "connector": connector,
                    "router": self._spec.router.model_copy(update=router),
                }
            )
        )

    def restore(self) -> FleetOutputs:
        return self._bring(self._spec)

    def _void(self) -> None:
        """From here on nobody may believe that the fleet is what was proven, least of all the next
        run if this one is killed.
        """
        record = self._held.record
        fleet = StageRecord(digest=VOID, result=record.stages["fleet"].result)
        self._held.write(record.without_stages("proof").with_stage("fleet", fleet))

    def _bring(self, spec: ClusterSpec) -> FleetOutputs:
        return self._reached(self._held.bring(self._stages(spec), self._held.results))


def finish(
    screen: Screen,
    smoke: Smoke,
    run: RunLog,
    restarting: Starter | None,
    *,
    efa: Efa | None = None,
) -> SmokeReport:
    """The rest of a climb: what engines are started anew for, or that it was not asked for. What
    was seen is kept although it breaks off.

    Raises:
        FleetError: the cluster did not get its own engines back.
    """
    if restarting is None:
        note_all(smoke)
        return smoke.report()
    try:
        climb_on(smoke, restarting, screen, efa=efa)
    except BaseException:
        run.report("smoke", smoke.report().model_dump(mode="json"))
        raise
    return smoke.report()
