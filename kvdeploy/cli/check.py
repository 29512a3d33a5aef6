"""`kvdeploy check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import (
    Loaded,
    allow_option,
    file_option,
    json_option,
    load,
    set_option,
)
from kvdeploy.errors import CheckError
from kvdeploy.planning.checks import errors_of
from kvdeploy.planning.operator_checks import AWS_CREDENTIALS
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.preflight import find_problems

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvdeploy.model.reports import Finding


@click.command(help=COMMANDS["check"])
@file_option
@set_option
@allow_option
@json_option
@click.pass_obj
def check(
    app: App, file: Path | None, overlays: tuple[str, ...], allow: frozenset[str], as_json: bool
) -> None:
    loaded = load(app, file, overlays)
    found = _found(app, loaded, allow)
    if as_json:
        rows = [asdict(f) | {"severity": f.severity.name.lower()} for f in found]
        click.echo(json.dumps(rows, indent=2))
    else:
        for finding in found:
            click.echo(describe(finding))
        if not found:
            click.echo(f"{loaded.source}: nothing to object to")
    refuse(found, source=loaded.source, quiet=True)


def _found(app: App, loaded: Loaded, allow: frozenset[str]) -> Sequence[Finding]:
    spec, root = loaded.spec, loaded.root
    store = Store(root, spec.name)
    if spec.target == "aws":
        from kvdeploy.cli.aws.site import identity_if_readable
        from kvdeploy.stages.aws_preflight import look, session_of

        aws = session_of(spec)
        if AWS_CREDENTIALS in allow:
            return look(spec, aws, None, LocalRunner(), root, allow=allow).findings
        with app.ui.step("ask AWS"):
            known = identity_if_readable(spec, store.read(target="aws"), store, aws)
            return look(spec, aws, known, LocalRunner(), root, allow=allow).findings
    return find_problems(spec, Processes(store.processes), LocalRunner(), root, allow=allow)


def describe(finding: Finding) -> str:
    where = f"{finding.path}: " if finding.path else ""
    hint = f"\n    {finding.hint}" if finding.hint else ""
    name = finding.severity.name.lower()
    return f"{name}: {where}{finding.message} [{finding.check}]{hint}"


def refuse(found: Sequence[Finding], *, source: str, quiet: bool = False) -> None:
    """Raise if any finding is an error.

    Raises:
        CheckError: at least one is; the message lists them unless `quiet`.
    """
    errors = errors_of(found)
    if not errors:
        return
    plural = "" if len(errors) == 1 else "s"
    told = (describe(f).removeprefix("error: ") for f in errors)  # it is said once for all
    listing = "" if quiet else "\n".join(told) + "\n"
    msg = f"{listing}{len(errors)} problem{plural} with {source}"
    ids = " ".join(f"--allow {name}" for name in sorted({f.check for f in errors}))
    raise CheckError(msg, hint=f"Change it; or, if you know better, go on with {ids}")
