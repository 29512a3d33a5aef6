"""How a bench gets the fleets that it measures, and how the cluster gets its own back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvdeploy import pipeline
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.common import Loaded
from kvdeploy.cli.up import local_stages
from kvdeploy.errors import CheckError, FleetError, KvdeployError, SmokeError
from kvdeploy.model.bench import BenchReport
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.reports import SmokeReport
from kvdeploy.planning.bench import matrix
from kvdeploy.planning.sizing import find_vocabulary
from kvdeploy.stages.bench import Bench, Pace
from kvdeploy.stages.bench_environment import describe
from kvdeploy.stages.fleet import LocalFleetStage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.record import Record
    from kvdeploy.model.routing import Connector, Mode
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.proc import Runner

CPU_NOTE: Final = (
    "engines ran on CPUs: these figures say nothing about GPUs, only that the bench works"
)


@dataclass(frozen=True, kw_only=True)
class Up:
    """A cluster that is up, as its record has it."""

    record: Record
    spec: ClusterSpec
    runtime: RuntimeOutputs
    model: ModelOutputs
    fleet: FleetOutputs
    vocabulary: int
    """Tokens that the model knows."""


def require_fleet(store: Store) -> Up:
    """Raises FleetError when nothing is up, CheckError where a bench cannot be made."""
    record = store.read()
    if record.spec is None or "fleet" not in record.stages:
        msg = f"cluster {store.cluster!r} is not up: there is nothing to measure"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    if record.spec.target != "local":
        msg = f"bench measures fleets on this machine so far, and {store.cluster!r} is on aws"
        raise CheckError(msg, hint="Run it on a machine with GPUs of its own, with target: local.")
    model = ModelOutputs.model_validate(record.stages["model"].result)
    try:
        vocabulary = find_vocabulary(model.config)
    except ValueError as e:
        msg = f"{record.spec.model.id}: {e}"
        raise CheckError(msg) from e
    return Up(
        record=record,
        spec=record.spec,
        runtime=RuntimeOutputs.model_validate(record.stages["runtime"].result),
        model=model,
        vocabulary=vocabulary,
        fleet=FleetOutputs.model_validate(record.stages["fleet"].result),
    )


class Benching:
    """One bench of one cluster, which is held meanwhile."""

    def __init__(
        self, app: App, store: Store, up: Up, runner: Runner, run: RunLog, *, prove: bool
    ) -> None:
        """Raises FleetError when the fleet is not whole, SmokeError when it should be proven and
        is not.
        """
        self._app, self._store, self._up = app, store, up
        self._runner, self._run, self._prove = runner, run, prove
        self._processes = Processes(store.processes)
        self._record = up.record
        self.kept: Path | None = None
        """Where the report is."""
        stage = LocalFleetStage(
            up.spec, self._processes, root=store.root, config_path=store.router_config
        )
        if not stage.is_whole(up.fleet):
            msg = f"cluster {store.cluster!r} is not whole: 'kvdeploy status' shows what is missing"
            raise FleetError(msg, hint="'kvdeploy up' repairs it.")
        proof = up.record.stages.get("proof")
        proven = proof is not None and SmokeReport.model_validate(proof.result).proven
        if prove and not (proven and stage.holds(up.record.stages["fleet"].result)):
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
        bench = Bench(
            vocabulary=self._up.vocabulary,
            seed=seed,
            mark=str(time.time_ns()),
            pace=pace,
            runs=sum(len(planned) for _, planned in blocks),
        )
        began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        up = self._up
        environment = describe(up.spec, up.runtime, up.model, up.fleet, self._runner)
        options = {
            "seed": seed,
            "rounds": rounds,
            "requests": pace.requests,
            "seconds": pace.seconds,
        }
        notes = (*((CPU_NOTE,) if up.runtime.device == "cpu" else ()), matrix.COLD)
        try:
            for connector, planned in blocks:
                self._measure_block(bench, connector, planned)
        finally:
            report = BenchReport(
                cluster=self._store.cluster,
                target=up.spec.target,
                started_at=started_at,
                seconds=round(time.monotonic() - began, 1),
                modes=modes,
                runs=tuple(bench.runs),
                environment=environment,
                options=options,
                notes=notes,
                failed=bench.failed,
            )
            self.kept = self._run.report("bench", report.model_dump(mode="json"))
            self._app.ui.say(f"{len(bench.runs)} runs, every sample: {self.kept}")
            try:
                keep(report)
            finally:
                self._bring(up.spec)
        return report

    def _measure_block(
        self, bench: Bench, connector: Connector, planned: Sequence[Planned]
    ) -> None:
        modes = tuple(dict.fromkeys(p.mode for p in planned))
        try:
            fleet = self._bring(_for_bench(self._up.spec, connector))
            with self._app.ui.step(f"measure {', '.join(modes)}") as step:
                bench.measure(fleet, planned, step)
        except KvdeployError as e:
            for mode in modes:
                bench.fail(mode, e.message)

    def _bring(self, spec: ClusterSpec) -> FleetOutputs:
        """The cluster as `spec` says, which may be what it is already."""
        loaded = Loaded(spec=spec, source="bench", root=self._store.root)
        stages = local_stages(loaded, self._processes, self._store, self._runner)
        ran = pipeline.up(
            stages if self._prove else stages[:-1],
            self._record.model_copy(update={"spec": spec}),
            store=self._store,
            progress=self._app.ui,
        )
        self._record = ran.record
        self._store.write(self._record)
        return FleetOutputs.model_validate(ran.record.stages["fleet"].result)


def _for_bench(spec: ClusterSpec, connector: Connector) -> ClusterSpec:
    """The cluster with this connector, and a router that serves each request as it is asked."""
    router = {"mode": "auto", "mode_header": True, "aggregate_below_tokens": 0}
    return spec.model_copy(
        update={
            "connector": spec.connector.model_copy(update={"mode": connector}),
            "router": spec.router.model_copy(update=router),
        }
    )
