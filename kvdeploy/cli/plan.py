"""`kvdeploy plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.check import refuse
from kvdeploy.cli.common import (
    allow_option,
    file_option,
    json_option,
    load,
    replace_option,
    set_option,
)
from kvdeploy.cli.tables import show, show_estimates
from kvdeploy.planning.changes import compare
from kvdeploy.planning.expectation import build_estimates
from kvdeploy.planning.launch import ROUTER, engine_slots
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.expecting import find_local_basis
from kvdeploy.stages.preflight import find_problems

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["plan"])
@file_option
@set_option
@allow_option
@replace_option
@json_option
@click.pass_obj
def plan(
    app: App,
    file: Path | None,
    overlays: tuple[str, ...],
    allow: frozenset[str],
    replace: tuple[str, ...],
    as_json: bool,
) -> None:
    loaded = load(app, file, overlays)
    spec = loaded.spec
    store = Store(loaded.root, spec.name)
    if spec.target == "aws":
        from kvdeploy.cli.aws.plan import plan as plan_on_aws

        plan_on_aws(app, loaded, store, allow=allow, replace=replace, as_json=as_json)
        return
    processes = Processes(store.processes)
    refuse(
        find_problems(spec, processes, LocalRunner(), loaded.root, allow=allow),
        source=loaded.source,
    )
    wanted = [slot.name for slot in engine_slots(spec)] + [ROUTER]
    running = [name for name in processes.names() if processes.observe(name).pids]
    known = store.read().spec if running else None
    changes = compare(known, spec) if known else ()
    estimates = build_estimates(spec, find_local_basis(spec, store, LocalRunner()))
    document: dict[str, Any] = {
        "cluster": spec.name,
        "target": spec.target,
        "changes": [asdict(c) for c in changes],
        "start": [name for name in wanted if name not in running],
        "stop": [name for name in running if name not in wanted],
        "running": running,
        "expected": [asdict(e) for e in estimates],
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"{spec.name} on {spec.target}, from {loaded.source}")
    if changes:
        rows = [(c.path, c.was, c.wanted, c.does.value) for c in changes]
        show(("field", "now", "wanted", "does"), rows)
    for verb in ("start", "stop"):
        if document[verb]:
            click.echo(f"{verb}: {', '.join(document[verb])}")
    if not changes and not document["start"] and not document["stop"]:
        click.echo("nothing to do")
    show_estimates(estimates)
