"""`kvdeploy status` on AWS: what EC2 says of every node, and what it has cost since launch."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from kvdeploy.adapters.aws import leftovers
from kvdeploy.adapters.aws.capacity import reservations_of
from kvdeploy.adapters.aws.nodes import observe
from kvdeploy.cli.aws.costs import spent_document, spent_line
from kvdeploy.cli.aws.fleet import observed as fleet_observed
from kvdeploy.cli.aws.site import known_identity
from kvdeploy.cli.tables import show
from kvdeploy.planning.infrastructure import expires_at
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.stages.aws_preflight import aws_section, session_of
from kvdeploy.stages.provision import GONE, RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.store import Store
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.spec import ClusterSpec

COLOURS = {
    "running": "green",
    "active": "green",
    "ready": "green",
    "pending": "yellow",
    "activating": "yellow",
    "draining": "yellow",
    "stopped": "red",
    "missing": "red",
    "failed": "red",
    "absent": "red",
    "inactive": "red",
    "unreachable": "red",
    "down": "red",
}


def status(spec: ClusterSpec, store: Store, *, as_json: bool) -> bool:
    """Show it; whether every node that is wanted runs, or nothing is there."""
    section = aws_section(spec)
    document = observed(spec, section, store)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        for line in _lines(document, section):
            click.echo(line)
    return bool(document["whole"])


def observed(spec: ClusterSpec, section: AwsSpec, store: Store) -> dict[str, Any]:
    """The cluster as AWS has it now."""
    aws = session_of(spec)
    identity = known_identity(spec, store.read(target="aws"), store, aws)
    seen = observe(aws, identity.id) if identity else ()
    unknown = () if identity else leftovers.find(aws, spec.name)
    alive = [n for n in seen if n.state not in GONE]
    missing = {n.name for n in nodes_of(spec)} - {n.node for n in alive} if identity else set()
    fleet = fleet_observed(store) if alive else {}
    ends = expires_at(section, identity) if identity else None
    return {
        "cluster": spec.name,
        "target": spec.kind,
        "id": identity.id if identity else None,
        "owner": identity.owner if identity else None,
        "whole": not unknown
        and not missing
        and all(n.state == RUNNING for n in alive)
        and fleet.get("whole", True),
        "url": fleet.get("url"),
        "processes": fleet.get("processes", []),
        "pairs": fleet.get("pairs", {}),
        "nodes": [n.model_dump(mode="json") for n in alive],
        "missing": sorted(missing),
        "not_remembered": [one.model_dump() for one in unknown],
        "ends": ends.isoformat() if ends else None,
        "capacity_block_ends": _block_end(aws, section) if alive else None,
        "cost": spent_document(seen, spec, aws, datetime.now(UTC)),
    }


def _fleet_lines(document: dict[str, Any]) -> Iterator[str]:
    if not document["processes"]:
        if document["nodes"]:
            yield "nothing serves on them yet: 'kvdeploy up' goes on"
        return
    yield f"router: {document['url']}"
    columns = ("name", "node", "state", "restarts", "since", "reason")
    rows = [["" if p[c] is None else p[c] for c in columns] for p in document["processes"]]
    show(columns, rows, colours=COLOURS)
    if document["pairs"]:
        show(("pair", "state"), sorted(document["pairs"].items()), colours=COLOURS)


def _block_end(aws: Aws, section: AwsSpec) -> str | None:
    """When the Capacity Block of the nodes ends."""
    wanted = section.capacity
    if wanted.kind != "capacity-block":
        return None
    found = reservations_of(
        aws, reservation_id=wanted.reservation_id, tags=wanted.reservation_tags, held=frozenset()
    )
    return next((one.end.isoformat() for one in found if one.end), None)


def _lines(document: dict[str, Any], section: AwsSpec) -> Iterator[str]:
    name, nodes = document["cluster"], document["nodes"]
    if unknown := document["not_remembered"]:
        ids = ", ".join(sorted({one["cluster_id"] for one in unknown}))
        yield f"{name}: {len(unknown)} things in {section.region} carry its name (id {ids})"
        yield "nothing here remembers it: end it with 'kvdeploy down', or take it over with"
        yield "'kvdeploy up --adopt ID'"
        return
    if not nodes and not document["missing"]:
        yield f"{name}: nothing runs in {section.region}"
        return
    yield f"{name} in {section.zone}, id {document['id']}, of {document['owner']}"
    rows = [
        (
            n["node"],
            n["state"],
            n["instance_type"],
            n["id"],
            n["private_ip"] or "",
            n["launched_at"][:16],
        )
        for n in nodes
    ]
    rows += [(node, "missing", "", "", "", "") for node in document["missing"]]
    columns = ("node", "state", "type", "instance", "address", "since (UTC)")
    show(columns, sorted(rows), colours=COLOURS)
    yield from _fleet_lines(document)
    yield spent_line(document["cost"], section)
    if document["capacity_block_ends"]:
        end = document["capacity_block_ends"][:16]
        yield f"its Capacity Block ends at {end} UTC; EC2 ends the nodes from half an hour before"
    if document["ends"]:
        over = datetime.fromisoformat(document["ends"]) < datetime.now(UTC)
        yield (
            f"it {'was' if over else 'is'} due to end at {document['ends'][:16]} UTC "
            "(aws.ttl_hours); nothing ends it by itself"
        )
