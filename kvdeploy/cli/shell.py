"""`kvdeploy shell`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import file_option, find, name_option, spec_of
from kvdeploy.errors import CheckError

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["shell"], context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@file_option
@name_option
@click.pass_obj
def shell(
    app: App, node: str, command: tuple[str, ...], file: Path | None, cluster: str | None
) -> None:
    store = find(app, file, cluster)
    spec = spec_of(app, file, store)
    if spec is None or spec.target != "aws":
        msg = f"cluster {store.cluster!r} has no nodes: its processes run on this machine"
        raise CheckError(msg, hint="'kvdeploy status' names them.")
    from kvdeploy.cli.aws.fleet import shell as shell_on_aws

    shell_on_aws(store, node, command)
