"""`kvdeploy up` on AWS: from a checked cluster file to a fleet that was seen to push."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from kvdeploy import pipeline
from kvdeploy.cli.aws.billing import say_what_bills
from kvdeploy.cli.aws.costs import cost_line, price
from kvdeploy.cli.aws.crew import crew_of, public_key_of, refuse_lost_key
from kvdeploy.cli.aws.site import (
    EndingMachines,
    identity_if_readable,
    known_identity,
    may_ask,
    refuse_moves,
    replacing,
    site_of,
)
from kvdeploy.cli.check import describe, refuse
from kvdeploy.cli.common import begin, recorded
from kvdeploy.cli.tables import show
from kvdeploy.cli.up import check_stages
from kvdeploy.errors import AwsError, KvdeployError
from kvdeploy.model.infra import ProvisionOutputs
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.model.reports import Severity
from kvdeploy.stages.aws_preflight import look, new_identity, session_of
from kvdeploy.stages.configure import ConfigureStage, NodeModelStage
from kvdeploy.stages.nodefleet import NodeFleetStage
from kvdeploy.stages.proof import ProofStage
from kvdeploy.stages.provision import ProvisionStage, generations_of

if TYPE_CHECKING:
    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.common import Loaded
    from kvdeploy.model.record import Record
    from kvdeploy.pipeline import Ran
    from kvdeploy.stages.base import Stage
    from kvdeploy.stages.nodes import Crew

ON_ERROR: Final = ("ask", "stop", "down")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the command line says beside the cluster file."""

    allow: frozenset[str]
    yes: bool = False
    on_error: str = "ask"
    replace: tuple[str, ...] = ()
    adopt: str | None = None
    again_from: str | None = None
    until: str | None = None
    break_lock: str | None = None
    as_json: bool = False


def up(app: App, loaded: Loaded, store: Store, wishes: Wishes) -> None:
    spec = loaded.spec
    aws = session_of(spec)
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
        wanted = replacing(record, seen.nodes, wishes.replace)
        store.write(record)  # before anything is made: what carries this id is ours
        public_key = public_key_of(spec, store, runner, aws=aws, make_in=store.dir)
        crew = crew_of(spec, store, run.path, runner)
        if wishes.until != "provision":
            refuse_lost_key(spec, store)
            crew.files()  # one that is not there is told before anything is made
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
            public_key=public_key,
        )
        consent = EndingMachines(app.ui, yes=wishes.yes, then=lambda: store.write(wanted))
        provision = ProvisionStage(site, consent=consent, break_lock=wishes.break_lock)
        stages = (provision, *stages_on_nodes(crew, wanted))
        check_stages(stages, wishes.again_from, wishes.until)
        try:
            ran = pipeline.up(
                stages,
                wanted,
                store=store,
                progress=app.ui,
                again_from=wishes.again_from,
                until=wishes.until,
            )
        except KvdeployError as e:
            _all_or_none(app, e, provision, wishes.on_error)
            raise
        except KeyboardInterrupt:
            then = "'kvdeploy up' goes on, 'kvdeploy down' ends everything"
            say_what_bills(app, spec, aws, identity, then)
            raise
    _show(ran, wishes.until, as_json=wishes.as_json)


def stages_on_nodes(crew: Crew, record: Record) -> tuple[Stage, ...]:
    """Everything after the nodes are there."""
    before = record.stages.get("configure")
    configure = ConfigureStage(crew, before.result if before else None)
    fleet = NodeFleetStage(crew)
    return (configure, NodeModelStage(crew), fleet, ProofStage(crew.spec, fleet.reach))


def _checked(cluster_id: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{8,32}", cluster_id):
        msg = f"--adopt: a kvdeploy:id is 8 to 32 of the letters 0-9 and a-f, not {cluster_id!r}"
        raise click.UsageError(msg)
    return cluster_id


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


def _show(ran: Ran, until: str | None, *, as_json: bool) -> None:
    results = {name: stage.result for name, stage in ran.record.stages.items()}
    made = ProvisionOutputs.model_validate(results["provision"])
    whole = until in {None, "proof"}
    fleet = FleetOutputs.model_validate(results["fleet"]) if whole else None
    if as_json:
        document = {
            "cluster": ran.record.cluster,
            "id": made.cluster_id,
            "nodes": {name: node.model_dump() for name, node in made.nodes.items()},
            "done": list(ran.done),
        }
        if fleet is not None:
            document |= {"url": fleet.url, "engines": [e.name for e in fleet.engines]}
        click.echo(json.dumps(document, indent=2))
        return
    rows = [
        (name, node.role, node.instance_type, node.id, node.private_ip)
        for name, node in sorted(made.nodes.items())
    ]
    show(("node", "role", "type", "instance", "address"), rows)
    state = f" ({', '.join(ran.done)} done)" if ran.done else " (all holds; nothing to do)"
    if fleet is None:
        click.echo(f"up: {len(made.nodes)} nodes run, until {until}{state}")
    else:
        model = ModelOutputs.model_validate(results["model"])
        click.echo(f"up: {model.served_name} on {fleet.url}/v1{state}")
