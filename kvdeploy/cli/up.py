"""`kvdeploy up`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvdeploy import pipeline
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.check import describe, refuse
from kvdeploy.cli.common import (
    Loaded,
    allow_option,
    begin,
    break_lock_option,
    file_option,
    from_option,
    json_option,
    load,
    recorded,
    replace_option,
    set_option,
    until_option,
    yes_option,
)
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.reports import Severity
from kvdeploy.planning.launch import caveats
from kvdeploy.stages.fleet import LocalFleetStage
from kvdeploy.stages.model import ModelStage
from kvdeploy.stages.preflight import device_of, find_problems
from kvdeploy.stages.proof import ProofStage
from kvdeploy.stages.runtime import RuntimeStage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvdeploy.pipeline import Ran
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Stage


@click.command(help=COMMANDS["up"])
@file_option
@set_option
@allow_option
@yes_option
@click.option(
    "--on-error",
    type=click.Choice(["ask", "stop", "down"]),
    default="ask",
    show_default=True,
    help="aws: when it fails, keep the nodes that this run made (stop) or end them (down).",
)
@replace_option
@click.option(
    "--adopt",
    metavar="ID",
    help="aws: take over the cluster of this kvdeploy:id, whose record and state are lost.",
)
@from_option
@until_option
@break_lock_option
@json_option
@click.pass_obj
def up(
    app: App,
    file: Path | None,
    overlays: tuple[str, ...],
    allow: frozenset[str],
    yes: bool,
    on_error: str,
    replace: tuple[str, ...],
    adopt: str | None,
    again_from: str | None,
    until: str | None,
    break_lock: str | None,
    as_json: bool,
) -> None:
    loaded = load(app, file, overlays)
    store = Store(loaded.root, loaded.spec.name)
    if loaded.spec.target == "aws":
        from kvdeploy.cli.aws.up import Wishes
        from kvdeploy.cli.aws.up import up as up_on_aws

        wishes = Wishes(
            allow=allow,
            yes=yes,
            on_error=on_error,
            replace=replace,
            adopt=adopt,
            again_from=again_from,
            until=until,
            break_lock=break_lock,
            as_json=as_json,
        )
        up_on_aws(app, loaded, store, wishes)
        return
    with recorded(app, store, "up") as (run, runner):
        app.ui.say(f"cluster {loaded.spec.name!r} from {loaded.source}; log: {run.log}")
        processes = Processes(store.processes)
        found = find_problems(loaded.spec, processes, runner, loaded.root, allow=allow)
        refuse(found, source=loaded.source)
        for warning in (f for f in found if f.severity is Severity.WARNING):
            app.ui.say(describe(warning))
        record = begin(store.read(), loaded)
        store.write(record)
        stages = local_stages(loaded, processes, store, runner)
        check_stages(stages, again_from, until)
        ran = pipeline.up(
            stages, record, store=store, progress=app.ui, again_from=again_from, until=until
        )
        runtime = RuntimeOutputs.model_validate(ran.record.stages["runtime"].result)
        for caveat in caveats(loaded.spec, runtime):
            app.ui.say(f"warning: {caveat}")
    if until in {None, stages[-1].name}:
        _show(ran, as_json=as_json)
    else:
        show_part(ran, until, as_json=as_json)


def check_stages(stages: Sequence[Stage], *named: str | None) -> None:
    """Refuse the name of a stage that this target does not have."""
    names = [stage.name for stage in stages]
    for name in named:
        if name is not None and name not in names:
            msg = f"this target has no stage {name!r}: there are {', '.join(names)}"
            raise click.UsageError(msg)


def show_part(ran: Ran, until: str | None, *, as_json: bool) -> None:
    """What `up` says when it was to stop on the way."""
    if as_json:
        document = {"cluster": ran.record.cluster, "until": until, "done": list(ran.done)}
        click.echo(json.dumps(document, indent=2))
    else:
        done = f"{', '.join(ran.done)} done" if ran.done else "all of it holds; nothing to do"
        click.echo(f"up: until {until} ({done})")


def local_stages(
    loaded: Loaded, processes: Processes, store: Store, runner: Runner
) -> tuple[Stage, ...]:
    spec = loaded.spec
    return (
        RuntimeStage(spec, runner, device_of(spec, len(machine.gpus(runner))), loaded.root),
        ModelStage(spec, runner, loaded.root),
        LocalFleetStage(spec, processes, root=loaded.root, config_path=store.router_config),
        ProofStage(spec),
    )


def _show(ran: Ran, *, as_json: bool) -> None:
    results = {name: stage.result for name, stage in ran.record.stages.items()}
    fleet = FleetOutputs.model_validate(results["fleet"])
    model = ModelOutputs.model_validate(results["model"])
    runtime = RuntimeOutputs.model_validate(results["runtime"])
    if as_json:
        document = {
            "cluster": ran.record.cluster,
            "url": fleet.url,
            "model": model.served_name,
            "versions": runtime.versions,
            "engines": [e.name for e in fleet.engines],
            "done": list(ran.done),
        }
        click.echo(json.dumps(document, indent=2))
        return
    if ran.done:
        click.echo(f"up: {model.served_name} on {fleet.url}/v1 ({', '.join(ran.done)} done)")
    else:
        click.echo(f"up: {model.served_name} on {fleet.url}/v1 (all holds; nothing to do)")
    body = json.dumps({"model": model.served_name, "prompt": "Hello", "stream": True})
    key = " -H 'Authorization: Bearer KEY'" if fleet.router_config.api_key_file else ""
    trust = " -k" if fleet.trust else ""  # the certificate is for a name, and this is an address
    kind = "-H 'Content-Type: application/json'"
    click.echo(f"try: curl -N{trust} {fleet.url}/v1/completions{key} {kind} -d '{body}'")
