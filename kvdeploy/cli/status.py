"""`kvdeploy status`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import file_option, find, json_option, name_option, spec_of
from kvdeploy.cli.tables import show
from kvdeploy.model.outputs import FleetOutputs
from kvdeploy.stages.asking import ask_ready

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.adapters.local.processes import Observed
    from kvdeploy.adapters.store import Store

SICK = 9
COLOURS = {
    "ready": "green",
    "failed": "red",
    "dead": "red",
    "backoff": "yellow",
    "down": "red",
    "refused": "red",
    "draining": "yellow",
}


@click.command(help=COMMANDS["status"])
@file_option
@name_option
@json_option
@click.pass_obj
def status(app: App, file: Path | None, cluster: str | None, as_json: bool) -> int:
    store = find(app, file, cluster)
    spec = spec_of(app, file, store) if not store.processes.exists() else None
    if spec is not None and spec.target == "aws":
        from kvdeploy.cli.aws.status import status as status_on_aws

        return 0 if status_on_aws(spec, store, as_json=as_json) else SICK
    document = observe(store)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)
    return 0 if document["whole"] or not document["processes"] else SICK


def observe(store: Store) -> dict[str, Any]:
    """The cluster as it is now, asked of processes and router, not of the record."""
    processes = Processes(store.processes)
    rows = [_row(processes, processes.observe(name)) for name in processes.names()]
    known = store.read().stages.get("fleet")
    fleet = FleetOutputs.model_validate(known.result) if known else None
    ready = ask_ready(fleet) if fleet and rows else None
    pairs = ready.body.get("pairs", {}) if ready and isinstance(ready.body, dict) else {}
    whole = (
        bool(rows)
        and all(row["phase"] == "ready" for row in rows)
        and bool(pairs)
        and all(state == "ready" for state in pairs.values())
    )
    return {
        "cluster": store.cluster,
        "url": fleet.url if fleet else None,
        "whole": whole,
        "processes": rows,
        "pairs": pairs,
    }


def _row(processes: Processes, seen: Observed) -> dict[str, Any]:
    state, spec = seen.state, processes.spec(seen.name)
    alive = bool(seen.pids)
    return {
        "name": seen.name,
        "phase": seen.phase,
        "pid": state.pid if state and alive else None,
        "ports": list(spec.ports) if spec else [],
        "cpus": list(spec.cpus) if spec else [],
        "restarts": state.restarts if state else 0,
        "up_s": round(time.time() - state.ready_at) if state and state.ready_at and alive else None,
        "memory_gib": round(machine.resident_gib(seen.pids), 2),
        "reason": state.reason if state else "",
        "log": str(processes.log(seen.name)),
    }


def _print(document: dict[str, Any]) -> None:
    if not document["processes"]:
        click.echo(f"{document['cluster']}: nothing runs")
        return
    click.echo(f"{document['cluster']}: {document['url'] or 'no router yet'}")
    columns = ("name", "phase", "pid", "ports", "cpus", "restarts", "up_s", "memory_gib", "reason")
    rows = [
        [" ".join(map(str, v)) if isinstance(v, list) else ("" if v is None else v) for v in cells]
        for cells in ([row[c] for c in columns] for row in document["processes"])
    ]
    show(columns, rows, colours=COLOURS)
    if document["pairs"]:
        show(("pair", "state"), sorted(document["pairs"].items()), colours=COLOURS)
