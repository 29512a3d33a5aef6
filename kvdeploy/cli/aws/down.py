"""`kvdeploy down` on AWS: destroy, ask AWS what is left, and end well only when nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.aws import leftovers
from kvdeploy.cli.aws.billing import say_what_bills
from kvdeploy.cli.aws.crew import public_key_of
from kvdeploy.cli.aws.site import ask, known_identity, site_of
from kvdeploy.cli.common import recorded
from kvdeploy.stages.aws_preflight import session_of
from kvdeploy.stages.teardown import destroy, remove_leftovers

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.infra import ClusterIdentity
    from kvdeploy.model.record import Record
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def down(
    app: App,
    spec: ClusterSpec,
    store: Store,
    *,
    yes: bool,
    break_lock: str | None,
    as_json: bool,
) -> None:
    """Take down the cluster that was made of `spec`, also when nothing is remembered of it."""
    aws = session_of(spec)
    with recorded(app, store, "down") as (run, runner):
        record = store.read(target="aws")
        identity = known_identity(spec, record, store, aws)
        with app.ui.step("ask AWS what there is") as step:
            found = leftovers.find(aws, spec.name, identity.id if identity else None)
            step.update(f"{len(found)} found")
        if found:
            ids = {f.cluster_id for f in found if f.cluster_id}
            bills = sum(f.bills for f in found)
            lost = "" if identity else f" (nothing here remembers it; id {', '.join(sorted(ids))})"
            ask(
                f"This ends cluster {spec.name!r} in {aws.region}{lost}: {len(found)} things, "
                f"{bills} of which bill by the hour. There is no way back.",
                yes=yes,
            )
        try:
            if identity is not None and (found or store.terraform.exists()):
                _destroy(app, record, spec, store, run, runner, aws, identity, break_lock)
            with app.ui.step("make sure that nothing is left") as step:
                removed = remove_leftovers(aws, spec.name, identity.id if identity else None, step)
        except KeyboardInterrupt:
            say_what_bills(app, spec, aws, identity, "'kvdeploy down' goes on")
            raise
        store.forget_nodes()
    if as_json:
        document = {
            "cluster": spec.name,
            "found": [f.model_dump() for f in found],
            "swept": [f.model_dump() for f in removed],
            "left": [],
        }
        click.echo(json.dumps(document, indent=2))
    elif found:
        click.echo(f"down: {spec.name}: {len(found)} things are gone; nothing is left that bills")
    else:
        click.echo(f"down: {spec.name}: nothing is there, nothing is left")


def _destroy(
    app: App,
    record: Record,
    spec: ClusterSpec,
    store: Store,
    run: RunLog,
    runner: Runner,
    aws: Aws,
    identity: ClusterIdentity,
    break_lock: str | None,
) -> None:
    """All that Terraform knows."""
    site = site_of(
        spec,
        identity,
        aws=aws,
        runner=runner,
        store=store,
        work=store.terraform,
        log=run.path / "terraform.log",
        generations=record.generations,
        public_key=public_key_of(spec, store, runner, aws=aws, make_in=store.dir),
    )
    site = replace(site, variables={**site.variables, "nodes": {}})
    with app.ui.step("destroy what Terraform knows") as step:
        destroy(site, step, break_lock=break_lock)
