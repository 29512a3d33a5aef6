"""`kvdeploy doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import file_option, json_option, load, set_option
from kvdeploy.cli.tables import show
from kvdeploy.errors import ToolError
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.doctor import examine

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"ok": "green", "missing": "red", "too little": "red", "too old": "red", "taken": "red"}


@click.command(help=COMMANDS["doctor"])
@file_option
@set_option
@click.option("--node", metavar="NAME", help="aws: look at this node, or at an engine's, instead.")
@json_option
@click.pass_obj
def doctor(
    app: App, file: Path | None, overlays: tuple[str, ...], node: str | None, as_json: bool
) -> None:
    loaded = load(app, file, overlays)
    if node is None:
        symptoms = examine(loaded.spec, LocalRunner(), loaded.root)
    else:
        if loaded.spec.target != "aws":
            msg = "--node: a local cluster has no nodes but this machine"
            raise click.UsageError(msg)
        from kvdeploy.cli.aws.fleet import examined

        symptoms = examined(Store(loaded.root, loaded.spec.name), node)
    if as_json:
        click.echo(json.dumps([asdict(s) for s in symptoms], indent=2))
    else:
        columns = ("what", "found", "needed", "verdict")
        show(columns, [[getattr(s, c) for c in columns] for s in symptoms], colours=COLOURS)
    bad = [s for s in symptoms if s.verdict not in ("ok", "not needed")]
    if bad:
        msg = "; ".join(f"{s.what}: {s.verdict}" for s in bad)
        raise ToolError(msg, hint=" ".join(s.hint for s in bad if s.hint))
