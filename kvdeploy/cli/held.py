"""A cluster that a command holds, and whose fleet it brings to what it needs for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy import pipeline
from kvdeploy.model.outputs import FleetOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.record import Record
    from kvdeploy.stages.base import Results, Stage


class Held:
    """Its record keeps the cluster's own spec: what is brought is borrowed."""

    def __init__(self, app: App, store: Store, record: Record) -> None:
        self._app, self._store, self.record = app, store, record

    @property
    def results(self) -> Results:
        """Of every stage, as last done."""
        return {name: stage.result for name, stage in self.record.stages.items()}

    def bring(self, stages: Sequence[Stage], given: Results | None = None) -> FleetOutputs:
        """The fleet, after what these stages found to do; `given` are results of stages that are
        left alone. Raises KvdeployError.
        """
        ran = pipeline.up(
            stages, self.record, store=self._store, progress=self._app.ui, given=given
        )
        self.record = ran.record
        return FleetOutputs.model_validate(ran.record.stages["fleet"].result)

    def write(self, record: Record) -> None:
        self.record = record
        self._store.write(record)
