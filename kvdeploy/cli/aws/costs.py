"""What a cluster on AWS costs, in the words of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdeploy.adapters.aws.prices import prices_of
from kvdeploy.model.prices import listed
from kvdeploy.planning.cost import Cost, cost_of, spent
from kvdeploy.stages.aws_preflight import aws_section

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.awsfacts import AwsFacts
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node, NodeSeen
    from kvdeploy.model.prices import Price
    from kvdeploy.model.spec import ClusterSpec


def price(spec: ClusterSpec, nodes: Sequence[Node], facts: AwsFacts | None) -> Cost:
    """What the cluster of the file would cost, at today's prices."""
    prices = facts.prices if facts else listed(aws_section(spec).region)
    block = facts.reservation if facts else None
    ends = block.end if block and block.kind == "capacity-block" else None
    return cost_of(nodes, spec, prices, block_ends_at=ends)


def _prices(spec: ClusterSpec, types: Iterable[str], aws: Aws) -> dict[str, Price]:
    section = aws_section(spec)
    spot = [section.instance_type] if section.capacity.kind == "spot" else []
    return prices_of(aws, types, spot_zone=section.zone, spot_types=spot)


def cost_line(cost: Cost) -> str:
    """E.g. 'cost: $127.17 an hour, $3052 a day'."""
    at_least = "at least " if cost.unknown else ""
    line = f"cost: {at_least}${cost.usd_hour:.2f} an hour, ${cost.usd_day:.0f} a day"
    if cost.unknown:
        line += f"; no price is known for {', '.join(cost.unknown)}"
    if cost.ends_at is not None:
        line += f"; the Capacity Block is paid up front and ends at {cost.ends_at:%F %R} UTC"
    return line


def cost_lines(cost: Cost) -> Iterable[str]:
    """The parts, dearest first, and the sum."""
    by_cost = sorted(cost.lines, key=lambda one: -(one.usd_hour or 0.0))
    for one in by_cost:
        figure = "unknown" if one.usd_hour is None else f"${one.usd_hour:.4f}/h"
        yield f"  {figure:>12}  {one.count:g} x {one.what} ({one.source})"
    yield cost_line(cost)
    yield "  without traffic: NAT gateway, endpoints and the Internet charge by the GiB"


def cost_document(cost: Cost) -> dict[str, Any]:
    return {
        "usd_hour": round(cost.usd_hour, 4),
        "usd_day": round(cost.usd_day, 2),
        "unknown": list(cost.unknown),
        "capacity_block_ends": cost.ends_at.isoformat() if cost.ends_at else None,
        "lines": [
            {
                "what": one.what,
                "count": one.count,
                "usd_hour_each": one.usd_hour_each,
                "usd_hour": one.usd_hour,
                "source": one.source,
            }
            for one in cost.lines
        ],
    }


def spent_document(
    seen: Sequence[NodeSeen], spec: ClusterSpec, aws: Aws, now: datetime
) -> dict[str, Any]:
    """What the machines have cost since each was launched."""
    found = spent(seen, _prices(spec, {n.instance_type for n in seen}, aws), now)
    return {"usd_since_launch": round(found.usd, 2), "unknown": list(found.unknown)}


def spent_line(document: dict[str, Any], section: AwsSpec) -> str:
    usd = document["usd_since_launch"]
    line = f"cost since launch: ${usd:.2f} (machines alone)"
    if document["unknown"]:
        line += f"; no price is known for {', '.join(document['unknown'])}"
    if section.budget_usd is not None:
        over = " and is used up" if usd >= section.budget_usd else ""
        line += f"; the budget is ${section.budget_usd:.0f}{over}"
    return line
