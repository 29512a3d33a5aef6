"""`kvdeploy status` on AWS: what EC2 says of every node, and what it has cost since launch."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from kvdeploy.adapters.aws.nodes import observe
from kvdeploy.adapters.aws.session import Aws
from kvdeploy.cli.aws.costs import spent_document, spent_line
from kvdeploy.cli.aws.site import known_identity
from kvdeploy.cli.tables import show
from kvdeploy.planning.infrastructure import expires_at
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.stages.aws_preflight import aws_section
from kvdeploy.stages.provision import GONE, RUNNING

if TYPE_CHECKING:
    from kvdeploy.adapters.store import Store
    from kvdeploy.model.spec import ClusterSpec

COLOURS = {"running": "green", "pending": "yellow", "stopped": "red", "missing": "red"}


def status(spec: ClusterSpec, store: Store, *, as_json: bool) -> bool:
    """Show it; whether every node that is wanted runs, or nothing is there."""
    section = aws_section(spec)
    aws = Aws(section.region)
    identity = known_identity(spec, store.read(target="aws"), store, aws)
    seen = observe(aws, identity.id) if identity else ()
    alive = {n.node: n for n in seen if n.state not in GONE}
    wanted = [node.name for node in nodes_of(spec)] if identity else []
    now = datetime.now(UTC)
    ends = expires_at(section, identity) if identity else None
    document: dict[str, Any] = {
        "cluster": spec.name,
        "target": spec.target,
        "id": identity.id if identity else None,
        "owner": identity.owner if identity else None,
        "whole": all(n in alive and alive[n].state == RUNNING for n in wanted),
        "nodes": [n.model_dump(mode="json") for n in alive.values()],
        "missing": [n for n in wanted if n not in alive],
        "ends": ends.isoformat() if ends else None,
        "cost": spent_document(seen, spec, aws, now),
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
    elif not alive and not document["missing"]:
        click.echo(f"{spec.name}: nothing runs in {section.region}")
    else:
        click.echo(f"{spec.name} in {section.zone}, id {document['id']}, of {document['owner']}")
        rows = [
            (n.node, n.state, n.instance_type, n.id, n.private_ip or "", f"{n.launched_at:%F %R}Z")
            for n in alive.values()
        ]
        rows += [(name, "missing", "", "", "", "") for name in document["missing"]]
        columns = ("node", "state", "type", "instance", "address", "since")
        show(columns, sorted(rows), colours=COLOURS)
        click.echo(spent_line(document["cost"], section))
        if ends is not None:
            when = "was due to end" if ends < now else "is due to end"
            click.echo(f"it {when} at {ends:%F %R} UTC (aws.ttl_hours); nothing ends it by itself")
    return bool(document["whole"])
