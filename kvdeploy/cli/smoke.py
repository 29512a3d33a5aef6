"""`kvdeploy smoke`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import write_text
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import (
    Loaded,
    asked_now,
    file_option,
    find,
    json_option,
    name_option,
    recorded,
)
from kvdeploy.cli.restarting import Restarting, finish
from kvdeploy.cli.tables import show
from kvdeploy.cli.up import local_stages
from kvdeploy.errors import CheckError, FleetError
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.reports import Verdict
from kvdeploy.planning import junit
from kvdeploy.planning.controls import RUNG
from kvdeploy.stages.fleet import LocalFleetStage
from kvdeploy.stages.ground import LocalGround
from kvdeploy.stages.proof import raise_unless_proven
from kvdeploy.stages.smoke import Smoke

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.record import Record
    from kvdeploy.model.reports import RungReport, SmokeReport
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Stage, Step

COLOURS = {
    "passed": "green",
    "failed": "red",
    "mocked": "yellow",
    "not applicable": "yellow",
    "not run": "yellow",
}


@click.command(help=COMMANDS["smoke"])
@file_option
@name_option
@click.option(
    "--restart",
    is_flag=True,
    help="Also start engines otherwise and back again, for controls that must go red and for "
    "push against pull: minutes in which the fleet serves nobody.",
)
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the rungs there as JUnit XML, a test case each.",
)
@json_option
@click.pass_obj
def smoke(
    app: App,
    file: Path | None,
    cluster: str | None,
    restart: bool,
    junit_file: Path | None,
    as_json: bool,
) -> None:
    store = find(app, file, cluster)
    record = store.read()
    if record.spec is None or not {"model", "fleet"} <= record.stages.keys():
        msg = f"cluster {store.cluster!r} is not up: there is nothing to prove"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    now, source = asked_now(app, file, store)
    if junit_file is not None:
        junit_file = app.root / junit_file
        _write(junit_file, junit.render_unfinished(store.cluster))
    with recorded(app, store, "smoke") as (run, runner):
        if record.spec.target == "aws":
            from kvdeploy.cli.aws.fleet import climb

            report = climb(app, store, record, run, runner, restart=restart, now=now, source=source)
        else:
            report = _climb(
                app, store, record, run, runner, restart=restart, now=now, source=source
            )
        document = report.model_dump(mode="json") | {"proven": report.proven}
        path = run.report("smoke", document)
    if junit_file is not None:
        _write(junit_file, junit.render(report))
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
    restart: bool,
    now: ClusterSpec | None,
    source: str,
) -> SmokeReport:
    """On this machine."""
    assert record.spec is not None  # noqa: S101  # looked at before
    spec, processes = record.spec, Processes(store.processes)
    fleet = FleetOutputs.model_validate(record.stages["fleet"].result)
    model = ModelOutputs.model_validate(record.stages["model"].result)
    stage = LocalFleetStage(spec, processes, root=store.root, config_path=store.router_config)
    if not stage.is_whole(fleet):
        msg = f"cluster {store.cluster!r} is not whole: 'kvdeploy status' shows what is missing"
        raise FleetError(msg, hint="'kvdeploy up' repairs it.")
    runtime = RuntimeOutputs.model_validate(record.stages["runtime"].result)
    log = run.path / "ground.log"
    ground = LocalGround(record.spec, fleet, runtime, runner, now=now, source=source, log=log)
    with app.ui.step("climb the smoke ladder") as step:
        smoke = Smoke(spec, model, fleet, processes, step, ground=ground)
        smoke.climb()

    def stages(wanted: ClusterSpec) -> Sequence[Stage]:
        loaded = Loaded(spec=wanted, source="smoke", root=store.root)
        return local_stages(loaded, processes, store, runner)[-2:]

    def start(engines: Sequence[LaunchSpec], step: Step) -> None:
        for engine in engines:
            step.update(f"starting {engine.name}")
            processes.start(engine)
        stage.wait_ready(engines, step)

    restarting = Restarting(app, store, record, spec, stages=stages, start=start)
    return finish(app.ui, smoke, run, restarting if restart else None)


def _print(report: SmokeReport) -> None:
    rows = [
        (r.rung, r.subject, r.verdict.value, f"{r.seconds:.1f}", r.message) for r in report.rungs
    ]
    show(("rung", "subject", "verdict", "s", "evidence"), rows, colours=COLOURS)
    counts = {v: sum(1 for r in report.rungs if r.verdict.value == v) for v in COLOURS}
    optional = (Verdict.MOCKED, Verdict.NOT_RUN)
    listed = ", ".join(f"{n} {v}" for v, n in counts.items() if n or v not in optional)
    proven = "PROVEN" if report.proven else "NOT PROVEN"
    click.echo(f"{proven}: {listed}, in {report.seconds:.1f} s")
    shown = {Verdict.PASSED, Verdict.FAILED}
    if unseen := sorted({_short(r) for r in report.rungs if r.verdict not in shown}):
        click.echo(f"not shown here: {', '.join(unseen)}")


def _short(rung: RungReport) -> str:
    """Of controls some are shown and others are not."""
    return f"{rung.rung} ({rung.subject})" if rung.rung == RUNG else rung.rung


def _write(path: Path, text: str) -> None:
    """Raises CheckError."""
    try:
        write_text(path, text, mode=0o644)
    except OSError as e:
        why = "its folder is a file" if isinstance(e, FileExistsError) else e.strerror
        msg = f"--junit: {path} cannot be written: {why}"
        raise CheckError(msg, hint="Name a file in a folder that may be written to.") from e
