"""`kvdeploy init`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from kvdeploy.adapters.store import write_text
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import DEFAULT_FILE, file_option
from kvdeploy.errors import SpecError
from kvdeploy.model.schema import key_at
from kvdeploy.planning.template import render_cluster

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["init"])
@click.option("--target", type=click.Choice(["local", "aws"]), default="local", show_default=True)
@click.option("--name", default="demo", show_default=True, help="The cluster's name.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@file_option
@click.pass_obj
def init(
    app: App, target: Literal["local", "aws"], name: str, force: bool, file: Path | None
) -> None:
    key = key_at(("name",))
    if key is not None and not key.fits_pattern(name):
        msg = f"--name: must be {key.doc}, not {name!r}"
        raise SpecError(msg)
    path = app.root / (file or DEFAULT_FILE)
    if path.exists() and not force:
        msg = f"{path} is already there"
        raise SpecError(msg, hint="Take another name with -f, or replace it with --force.")
    if path.is_dir():
        msg = f"{path} is a folder"
        raise SpecError(msg, hint="Name a file with -f.")
    if not path.parent.is_dir():
        msg = f"{path.parent}: no such folder"
        raise SpecError(msg, hint="Make it first.")
    write_text(path, render_cluster(target, name), mode=0o644)
    click.echo(f"wrote {path}; 'kvdeploy check' looks at it, 'kvdeploy up' brings it up")
