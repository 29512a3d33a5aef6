"""`kvdeploy init`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from kvdeploy.adapters import specfile
from kvdeploy.adapters.store import write_text
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import DEFAULT_FILE, file_option
from kvdeploy.errors import SpecError
from kvdeploy.model.schema import key_at
from kvdeploy.planning.template import render_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.model.spec import ClusterSpec

CHOICES = {"name": "--name", "aws.zone": "--zone", "state.bucket": "--state"}
"""Keys of the file that have an option, and it."""


@click.command(help=COMMANDS["init"])
@click.option("--target", type=click.Choice(["local", "aws"]), help="Default: local.")
@click.option("--name", default="demo", show_default=True, help="The cluster's name.")
@click.option("--zone", metavar="ZONE", help="aws: the availability zone, e.g. us-west-2a.")
@click.option(
    "--state",
    "bucket",
    metavar="BUCKET",
    help="aws: keep Terraform's state in this S3 bucket; make it, or make it fit for that.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@file_option
@click.pass_obj
def init(
    app: App,
    target: Literal["local", "aws"] | None,
    name: str,
    zone: str | None,
    bucket: str | None,
    force: bool,
    file: Path | None,
) -> None:
    target = target or ("aws" if bucket or zone else "local")
    if target != "aws" and (bucket or zone):
        msg = "--zone and --state are for --target aws"
        raise click.UsageError(msg)
    path = app.root / (file or DEFAULT_FILE)
    if bucket is not None and path.is_file() and not force:
        _make_bucket(app, _agreeing(path, bucket), bucket)
        return
    _write(path, target, name, zone=zone, bucket=bucket, force=force)
    if bucket is not None:
        _make_bucket(app, specfile.load(path).spec, bucket)


def _write(
    path: Path,
    target: Literal["local", "aws"],
    name: str,
    *,
    zone: str | None,
    bucket: str | None,
    force: bool,
) -> None:
    asked = {"name": name, "aws.zone": zone, "state.bucket": bucket}
    chosen = {key: value for key, value in asked.items() if value is not None}
    for dotted, value in chosen.items():
        key = key_at(tuple(dotted.split(".")))
        if key is not None and not key.fits_pattern(value):
            msg = f"{CHOICES[dotted]}: must be {key.doc}, not {value!r}"
            raise SpecError(msg)
    if zone is not None:
        chosen["aws.region"] = zone[:-1]
    if path.exists() and not force:
        msg = f"{path} is already there"
        raise SpecError(msg, hint="Take another name with -f, or replace it with --force.")
    if path.is_dir():
        msg = f"{path} is a folder"
        raise SpecError(msg, hint="Name a file with -f.")
    if not path.parent.is_dir():
        msg = f"{path.parent}: no such folder"
        raise SpecError(msg, hint="Make it first.")
    write_text(path, render_cluster(target, name, chosen), mode=0o644)
    click.echo(f"wrote {path}; 'kvdeploy check' looks at it, 'kvdeploy up' brings it up")


def _agreeing(path: Path, bucket: str) -> ClusterSpec:
    """The file that is there, if it names the same bucket.

    Raises:
        SpecError: it does not, or is wrong.
    """
    spec = specfile.load(path).spec
    if spec.target != "aws" or spec.state.bucket != bucket:
        msg = f"{path} is already there, and its state.bucket is not {bucket}"
        raise SpecError(
            msg, hint=f"Write 'state: {{bucket: {bucket}}}' into it and repeat this command."
        )
    return spec


def _make_bucket(app: App, spec: ClusterSpec, bucket: str) -> None:
    from kvdeploy.adapters.aws import statebucket
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.stages.aws_preflight import aws_section

    region = aws_section(spec).region
    with app.ui.step(f"make the bucket {bucket} in {region} fit for a state"):
        made = statebucket.ensure(Aws(region), bucket)
    word = "made" if made else "was there; it is"
    click.echo(f"bucket {bucket}: {word} versioned, encrypted, private")
