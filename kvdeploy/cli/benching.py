"""How a bench gets the fleets that it measures, and how the cluster gets its own back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from kvdeploy.errors import CheckError, FleetError, KvdeployError, SmokeError
from kvdeploy.model.bench import BenchReport
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.model.reports import SmokeReport
from kvdeploy.planning.bench.notes import find_notes
from kvdeploy.planning.sizing import find_vocabulary
from kvdeploy.stages.bench import Bench, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.record import Record
    from kvdeploy.model.routing import Connector, Mode
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.stages.base import Step


@dataclass(frozen=True, kw_only=True)
class Up:
    """A cluster that is up, as its record has it."""

    record: Record
    spec: ClusterSpec
    model: ModelOutputs
    fleet: FleetOutputs
    vocabulary: int
    """Tokens that the model knows."""

    @property
    def was_proven(self) -> bool:
        proof = self.record.stages.get("proof")
        return proof is not None and SmokeReport.model_validate(proof.result).proven


class Ground(Protocol):
    """Where the fleet is: on this machine, or on nodes."""

    def is_whole(self) -> bool:
        """Whether everything runs, and every pair is warm."""

    def holds(self) -> bool:
        """Whether no engine was started anew since the fleet was brought up."""

    def bring(self, spec: ClusterSpec, *, prove: bool) -> FleetOutputs:
        """The cluster as `spec` says, which may be what it is already."""

    def reach(self, fleet: FleetOutputs) -> AbstractContextManager[FleetOutputs]:
        """It, as it can be asked from here."""

    def renew(self, fleet: FleetOutputs, here: FleetOutputs, step: Step) -> None:
        """Start its decode engines anew, and wait until the router has them again."""

    def describe(self) -> dict[str, Any]:
        """What is measured."""

    def notes(self, here: FleetOutputs) -> tuple[str, ...]:
        """What a reader has to know of figures that are measured here."""


def require_fleet(store: Store) -> Up:
    """Raises FleetError when nothing is up, CheckError where a bench cannot be made."""
    record = store.read()
    if record.spec is None or not {"model", "fleet"} <= record.stages.keys():
        msg = f"cluster {store.cluster!r} is not up: there is nothing to measure"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    model = ModelOutputs.model_validate(record.stages["model"].result)
    try:
        vocabulary = find_vocabulary(model.config)
    except ValueError as e:
        msg = f"{record.spec.model.id}: {e}"
        raise CheckError(msg) from e
    return Up(
        record=record,
        spec=record.spec,
        model=model,
        vocabulary=vocabulary,
        fleet=FleetOutputs.model_validate(record.stages["fleet"].result),
    )


class Benching:
    """One bench of one cluster, which is held meanwhile."""

    def __init__(
        self, app: App, store: Store, up: Up, ground: Ground, run: RunLog, *, prove: bool
    ) -> None:
        """Raises FleetError when the fleet is not whole, SmokeError when it should be proven and
        is not.
        """
        self._app, self._store, self._up = app, store, up
        self._ground, self._run, self._prove = ground, run, prove
        self._notes: tuple[str, ...] = ()
        self.kept: Path | None = None
        """Where the report is."""
        if not ground.is_whole():
            msg = f"cluster {store.cluster!r} is not whole: 'kvdeploy status' shows what is missing"
            raise FleetError(msg, hint="'kvdeploy up' repairs it.")
        if prove and not (up.was_proven and ground.holds()):
            msg = f"cluster {store.cluster!r} was not proven to push since its engines were started"
            hint = "'kvdeploy up' or 'kvdeploy smoke' shows why; or measure it with --unproven."
            raise SmokeError(msg, hint=hint)

    def measure(
        self,
        modes: tuple[Mode, ...],
        blocks: Sequence[tuple[Connector, Sequence[Planned]]],
        pace: Pace,
        *,
        seed: int,
        rounds: int,
        keep: Callable[[BenchReport], None],
    ) -> BenchReport:
        """Make all runs. What was measured is kept, also when it is interrupted; then the cluster
        has its own fleet again.
        """
        began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        environment = self._ground.describe()
        options = {
            "seed": seed,
            "rounds": rounds,
            "requests": pace.requests,
            "seconds": pace.seconds,
        }
        total = sum(len(planned) for _, planned in blocks)

        def tell() -> BenchReport:
            """As far as it has come."""
            report = BenchReport(
                cluster=self._store.cluster,
                target=self._up.spec.kind,
                started_at=started_at,
                seconds=round(time.monotonic() - began, 1),
                modes=modes,
                runs=tuple(bench.runs),
                environment=environment,
                options=options,
                notes=self._notes,
                failed=bench.failed,
            )
            noted = (*find_notes(report, planned=total), *report.notes)
            return report.model_copy(update={"notes": noted})

        def save() -> None:
            self.kept = self._run.report("bench", tell().model_dump(mode="json"))

        bench = Bench(
            vocabulary=self._up.vocabulary,
            seed=seed,
            mark=str(time.time_ns()),
            pace=pace,
            runs=total,
            on_run=save,
        )
        try:
            for connector, planned in blocks:
                self._measure_block(bench, connector, planned)
        finally:
            save()
            report = tell()
            self._app.ui.say(f"{len(bench.runs)} runs, every sample: {self.kept}")
            try:
                keep(report)
            finally:
                self._ground.bring(self._up.spec, prove=self._prove)
        return report

    def _measure_block(
        self, bench: Bench, connector: Connector, planned: Sequence[Planned]
    ) -> None:
        """Cold pairs apart: for them alone the router leaves pairs cold."""
        for cold in (False, True):
            part = [p for p in planned if (p.cell.scenario == "cold") == cold]
            if part:
                self._measure_part(bench, connector, part, cold=cold)

    def _measure_part(
        self, bench: Bench, connector: Connector, planned: Sequence[Planned], *, cold: bool
    ) -> None:
        modes = tuple(dict.fromkeys(p.mode for p in planned))
        ground = self._ground
        try:
            spec = _for_bench(self._up.spec, connector, warm_pairs=not cold)
            fleet = ground.bring(spec, prove=self._prove)
            with (
                ground.reach(fleet) as here,
                self._app.ui.step(f"measure {', '.join(modes)}") as step,
            ):
                self._notes = ground.notes(here)
                bench.measure(here, planned, step, lambda: ground.renew(fleet, here, step))
        except KvdeployError as e:
            for mode in modes:
                bench.fail(mode, e.message)


def _for_bench(spec: ClusterSpec, connector: Connector, *, warm_pairs: bool) -> ClusterSpec:
    """The cluster with this connector, and a router that serves each request as it is asked."""
    router = {
        "mode": "auto",
        "mode_header": True,
        "aggregate_below_tokens": 0,
        "pair_header": True,
        "warm_pairs": warm_pairs,
    }
    return spec.model_copy(
        update={
            "connector": spec.connector.model_copy(update={"mode": connector}),
            "router": spec.router.model_copy(update=router),
        }
    )
