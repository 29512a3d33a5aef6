"""`kvdeploy up` on AWS: from a checked cluster file to running nodes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from kvdeploy import pipeline
from kvdeploy.adapters.aws.session import Aws
from kvdeploy.cli.aws.costs import cost_line, price
from kvdeploy.cli.aws.site import (
    EndingMachines,
    identity_if_readable,
    known_identity,
    may_ask,
    refuse_moves,
    site_of,
)
from kvdeploy.cli.check import describe, refuse
from kvdeploy.cli.common import begin, recorded
from kvdeploy.cli.tables import show
from kvdeploy.errors import AwsError, CheckError, KvdeployError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.model.reports import Severity
from kvdeploy.stages.aws_preflight import aws_section, look, new_identity
from kvdeploy.stages.provision import ProvisionStage, generations_of

if TYPE_CHECKING:
    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.common import Loaded
    from kvdeploy.model.infra import Node
    from kvdeploy.model.record import Record
    from kvdeploy.pipeline import Ran

ON_ERROR: Final = ("ask", "stop", "down")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the command line says beside the cluster file."""

    allow: frozenset[str]
    yes: bool = False
    on_error: str = "ask"
    replace: tuple[str, ...] = ()
    adopt: str | None = None
    break_lock: str | None = None
    as_json: bool = False


def up(app: App, loaded: Loaded, store: Store, wishes: Wishes) -> None:
    spec = loaded.spec
    aws = Aws(aws_section(spec).region)
    with recorded(app, store, "up") as (run, runner):
        app.ui.say(f"cluster {spec.name!r} from {loaded.source}; log: {run.log}")
        known_record = store.read(target="aws")
        refuse_moves(known_record, spec)
        record = begin(known_record, loaded)
        with app.ui.step("check the account") as step:
            step.update("asking AWS")
            known = identity_if_readable(spec, record, store, aws)
            if known is None and wishes.adopt is not None:
                known = new_identity(aws.identity().user, id=_checked(wishes.adopt))
            seen = look(spec, aws, known, runner, loaded.root, allow=wishes.allow)
        refuse(seen.findings, source=loaded.source)
        for warning in (f for f in seen.findings if f.severity is Severity.WARNING):
            app.ui.say(describe(warning))
        identity = known or known_identity(spec, record, store, aws) or new_identity(seen.user)
        generations = generations_of(aws, known, record.generations)
        record = record.model_copy(update={"identity": identity, "generations": generations})
        wanted = _replacing(record, seen.nodes, wishes.replace)
        store.write(record)  # before anything is made: what carries this id is ours
        app.ui.say(cost_line(price(spec, seen.nodes, seen.facts)))
        site = site_of(
            spec,
            identity,
            aws=aws,
            runner=runner,
            store=store,
            work=store.terraform,
            log=run.path / "terraform.log",
            generations=wanted.generations,
            reservation_id=seen.reservation_id,
        )
        consent = EndingMachines(app.ui, yes=wishes.yes, then=lambda: store.write(wanted))
        stage = ProvisionStage(site, consent=consent, break_lock=wishes.break_lock)
        try:
            ran = pipeline.up((stage,), wanted, store=store, progress=app.ui)
        except KvdeployError as e:
            _all_or_none(app, e, stage, wishes.on_error)
            raise
    _show(app, ran, as_json=wishes.as_json)


def _checked(cluster_id: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{8,32}", cluster_id):
        msg = f"--adopt: a kvdeploy:id is 8 to 32 of the letters 0-9 and a-f, not {cluster_id!r}"
        raise click.UsageError(msg)
    return cluster_id


def _replacing(record: Record, nodes: tuple[Node, ...], names: tuple[str, ...]) -> Record:
    """With a new generation for every node that is to be replaced.

    Raises:
        CheckError: there is no such node.
    """
    known = [node.name for node in nodes]
    for name in names:
        if name not in known:
            msg = f"there is no node {name!r} to replace"
            raise CheckError(msg, hint=f"Nodes of this cluster: {', '.join(known)}.")
    raised = {name: record.generations.get(name, 1) + 1 for name in names}
    return record.model_copy(update={"generations": {**record.generations, **raised}})


def _all_or_none(app: App, error: KvdeployError, stage: ProvisionStage, on_error: str) -> None:
    """After a failure: the nodes that this run made go again, or stay, as is wished."""
    try:
        alive = stage.alive()
    except AwsError as e:
        app.ui.say(f"warning: what this run made cannot be told: {e.message}")
        return
    if not alive:
        return
    names = ", ".join(alive)
    asked = on_error == "ask" and may_ask()
    if asked:
        app.ui.error(error)
        asked = click.confirm(f"End {names} again?", err=True)
    if asked or on_error == "down":
        with app.ui.step(f"end {names}") as step:
            stage.undo(step)
        app.ui.say(f"gone: {names}; the rest stays for the next try")
    else:
        app.ui.say(
            f"kept: {names}, at their price an hour; 'kvdeploy up' goes on from here, "
            "'kvdeploy down' ends everything"
        )


def _show(app: App, ran: Ran, *, as_json: bool) -> None:
    made = ProvisionOutputs.model_validate(ran.record.stages["provision"].result)
    if as_json:
        document = {
            "cluster": ran.record.cluster,
            "id": made.cluster_id,
            "nodes": {name: node.model_dump() for name, node in made.nodes.items()},
            "done": list(ran.done),
        }
        click.echo(json.dumps(document, indent=2))
    else:
        rows = [
            (name, node.role, node.instance_type, node.id, node.private_ip)
            for name, node in sorted(made.nodes.items())
        ]
        show(("node", "role", "type", "instance", "address"), rows)
        state = "" if ran.done else " (all holds; nothing to do)"
        click.echo(f"up: {len(made.nodes)} nodes run{state}")
    app.ui.say(
        "note: this version goes no further on aws: nodes are not configured and no engine is "
        "started. They bill until 'kvdeploy down'."
    )
