"""`kvdeploy smoke`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import (
    asked_now,
    file_option,
    find,
    json_option,
    name_option,
    recorded,
)
from kvdeploy.cli.tables import show
from kvdeploy.errors import FleetError
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.reports import Verdict
from kvdeploy.stages.fleet import LocalFleetStage
from kvdeploy.stages.ground import LocalGround
from kvdeploy.stages.proof import raise_unless_proven
from kvdeploy.stages.smoke import Smoke

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.model.record import Record
    from kvdeploy.model.reports import SmokeReport
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner

COLOURS = {"passed": "green", "failed": "red", "mocked": "yellow", "not applicable": "yellow"}


@click.command(help=COMMANDS["smoke"])
@file_option
@name_option
@json_option
@click.pass_obj
def smoke(app: App, file: Path | None, cluster: str | None, as_json: bool) -> None:
    store = find(app, file, cluster)
    record = store.read()
    if record.spec is None or not {"model", "fleet"} <= record.stages.keys():
        msg = f"cluster {store.cluster!r} is not up: there is nothing to prove"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    now, source = asked_now(app, file, store)
    with recorded(app, store, "smoke") as (run, runner):
        if record.spec.target == "aws":
            from kvdeploy.cli.aws.fleet import climb

            report = climb(app, store, record, run, runner, now=now, source=source)
        else:
            report = _climb(app, store, record, run, runner, now=now, source=source)
        document = report.model_dump(mode="json") | {"proven": report.proven}
        path = run.report("smoke", document)
    if as_json:
        import json

        click.echo(json.dumps(document, indent=2))
    else:
        _print(report)
        app.ui.say(f"report: {path}")
    raise_unless_proven(report)


def _climb(
    app: App,
    store: Store,
    record: Record,
    run: RunLog,
    runner: Runner,
    *,
    now: ClusterSpec | None,
    source: str,
) -> SmokeReport:
    """On this machine."""
    assert record.spec is not None  # noqa: S101  # looked at before
    processes = Processes(store.processes)
    fleet = FleetOutputs.model_validate(record.stages["fleet"].result)
    model = ModelOutputs.model_validate(record.stages["model"].result)
    stage = LocalFleetStage(
        record.spec, processes, root=store.root, config_path=store.router_config
    )
    if not stage.is_whole(fleet):
        msg = f"cluster {store.cluster!r} is not whole: 'kvdeploy status' shows what is missing"
        raise FleetError(msg, hint="'kvdeploy up' repairs it.")
    runtime = RuntimeOutputs.model_validate(record.stages["runtime"].result)
    log = run.path / "ground.log"
    ground = LocalGround(record.spec, fleet, runtime, runner, now=now, source=source, log=log)
    with app.ui.step("climb the smoke ladder") as step:
        return Smoke(record.spec, model, fleet, processes, step, ground=ground).climb()


def _print(report: SmokeReport) -> None:
    rows = [
        (r.rung, r.subject, r.verdict.value, f"{r.seconds:.1f}", r.message) for r in report.rungs
    ]
    show(("rung", "subject", "verdict", "s", "evidence"), rows, colours=COLOURS)
    counts = {v: sum(1 for r in report.rungs if r.verdict.value == v) for v in COLOURS}
    listed = ", ".join(f"{n} {v}" for v, n in counts.items() if n or v != "mocked")
    proven = "PROVEN" if report.proven else "NOT PROVEN"
    click.echo(f"{proven}: {listed}, in {report.seconds:.1f} s")
    weak = {Verdict.NOT_APPLICABLE, Verdict.MOCKED}
    if unseen := sorted({r.rung for r in report.rungs if r.verdict in weak}):
        click.echo(f"not shown here: {', '.join(unseen)}")
