"""`kvdeploy image`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import file_option, json_option, load, set_option
from kvdeploy.errors import CheckError

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["image"])
@file_option
@set_option
@click.option(
    "--instance-type",
    metavar="TYPE",
    help="Of the builder: nodes.yml proves GPUs and EFA, so it must have both. "
    "Default: aws.instance_type, which the image then fits to the last setting.",
)
@click.option("--base", metavar="AMI", help="Image to begin with. Default: the nodes' image.")
@click.option("--subnet", metavar="ID", help="Of the builder. Default: the nodes' subnet.")
@click.option("--security-group", metavar="ID", help="Of the builder. Default: the nodes' group.")
@click.option("--instance-profile", metavar="NAME", help="Of the builder. Default: the nodes'.")
@click.option(
    "--keep-builder", is_flag=True, help="Do not end a builder on which something failed."
)
@click.option("--list", "listing", is_flag=True, help="Only show the images that there are.")
@click.option("--yes", is_flag=True, help="Do not ask before an earlier run's builder ends.")
@json_option
@click.pass_obj
def image(
    app: App,
    file: Path | None,
    overlays: tuple[str, ...],
    instance_type: str | None,
    base: str | None,
    subnet: str | None,
    security_group: str | None,
    instance_profile: str | None,
    keep_builder: bool,
    listing: bool,
    yes: bool,
    as_json: bool,
) -> None:
    loaded = load(app, file, overlays)
    if loaded.spec.target != "aws":
        msg = f"{loaded.source} is for target {loaded.spec.target}, and images are for target aws"
        raise CheckError(msg, hint="'kvdeploy init --target aws' writes a cluster file for AWS.")
    from kvdeploy.cli.aws import image as on_aws
    from kvdeploy.stages.image_preflight import Wishes

    if listing:
        on_aws.show_images(loaded, as_json=as_json)
        return
    wishes = Wishes(
        instance_type=instance_type,
        base=base,
        subnet=subnet,
        security_group=security_group,
        instance_profile=instance_profile,
    )
    store = Store(loaded.root, loaded.spec.name)
    on_aws.image(app, loaded, store, wishes, keep=keep_builder, yes=yes, as_json=as_json)
