"""`kvdeploy down`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import (
    break_lock_option,
    file_option,
    find,
    json_option,
    name_option,
    recorded,
    spec_of,
    yes_option,
)
from kvdeploy.errors import FleetError
from kvdeploy.planning.launch import ROUTER

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["down"])
@file_option
@name_option
@yes_option
@break_lock_option
@json_option
@click.pass_obj
def down(
    app: App,
    file: Path | None,
    cluster: str | None,
    yes: bool,
    break_lock: str | None,
    as_json: bool,
) -> None:
    store = find(app, file, cluster)
    spec = spec_of(app, file, store) if not store.processes.exists() else None
    if spec is not None and spec.target == "aws":
        from kvdeploy.cli.aws.down import down as down_on_aws

        down_on_aws(app, spec, store, yes=yes, break_lock=break_lock, as_json=as_json)
        return
    if not store.exists():
        _say(store.cluster, [], as_json=as_json)
        return
    with recorded(app, store, "down") as (run, _):
        processes = Processes(store.processes)
        names = processes.names()
        with app.ui.step(f"stop {', '.join(names) or 'nothing'}") as step:
            if ROUTER in names:  # first, so that nobody asks engines that are going
                step.update(ROUTER)
                processes.stop(ROUTER)
            engines = [name for name in names if name != ROUTER]
            step.update(", ".join(engines))
            with ThreadPoolExecutor(max(1, len(engines))) as pool:
                list(pool.map(processes.stop, engines))
        left = [name for name in names if processes.observe(name).pids]
        if left:
            msg = f"still alive: {', '.join(left)}"
            raise FleetError(msg, hint="Run 'kvdeploy down' again; look with 'ps'.")
        store.forget_fleet(run)
    _say(store.cluster, names, as_json=as_json)


def _say(cluster: str, stopped: list[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"cluster": cluster, "stopped": stopped, "left": []}, indent=2))
    elif stopped:
        click.echo(f"down: {cluster}: stopped {', '.join(stopped)}; nothing is left")
    else:
        click.echo(f"down: {cluster}: nothing runs, nothing is left")
