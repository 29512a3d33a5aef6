"""`kvdeploy doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

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
@json_option
@click.pass_obj
def doctor(app: App, file: Path | None, overlays: tuple[str, ...], as_json: bool) -> None:
    loaded = load(app, file, overlays)
    symptoms = examine(loaded.spec, LocalRunner(), loaded.root)
    if as_json:
        click.echo(json.dumps([asdict(s) for s in symptoms], indent=2))
    else:
        columns = ("what", "found", "needed", "verdict")
        show(columns, [[getattr(s, c) for c in columns] for s in symptoms], colours=COLOURS)
    bad = [s for s in symptoms if s.verdict not in ("ok", "not needed")]
    if bad:
        msg = "; ".join(f"{s.what}: {s.verdict}" for s in bad)
        raise ToolError(msg, hint=" ".join(s.hint for s in bad if s.hint))
