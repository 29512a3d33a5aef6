"""What a cluster on AWS costs, and what it has cost. Pure: prices and times are given.

Traffic is not in it: what a NAT gateway and endpoints charge for each GiB depends on use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from kvdeploy.model.prices import (
    GP3_GIB,
    GP3_IOPS,
    GP3_MBPS,
    INTERFACE_ENDPOINT,
    NAT_GATEWAY,
    PUBLIC_ADDRESS,
    spot_key,
)
from kvdeploy.planning.aws_spec_checks import RESERVED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node, NodeSeen
    from kvdeploy.model.prices import Price
    from kvdeploy.model.spec import ClusterSpec

HOURS_A_DAY: Final = 24
ENDPOINTS: Final = 3
"""Interface endpoints of a new network: ssm, ssmmessages, ec2messages, each in one zone."""
ROUTER_VOLUME_GIB: Final = 200
"""Root volume of the router's node, as infra/ makes it."""
GPU_NODE_IOPS: Final = 6000 - 3000
GPU_NODE_MBPS: Final = 500 - 125
"""What the root volume of a GPU node has above gp3's free rates, as infra/ makes it."""
PAID: Final = "paid up front"
BILLED: Final = frozenset({"pending", "running"})
"""States of an instance in which its hours count."""


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """One kind of thing that is charged for by the hour."""

    what: str
    count: float
    usd_hour_each: float | None
    """None when the price is not known."""
    source: str
    """Where the price is from, with its date; or why there is none."""

    @property
    def usd_hour(self) -> float | None:
        return None if self.usd_hour_each is None else self.count * self.usd_hour_each


@dataclass(frozen=True, kw_only=True)
class Cost:
    lines: tuple[CostLine, ...]
    ends_at: datetime | None = None
    """Of a Capacity Block, which is paid for already."""

    @property
    def usd_hour(self) -> float:
        """Of all that has a known price: at least this much."""
        return sum(line.usd_hour or 0.0 for line in self.lines)

    @property
    def usd_day(self) -> float:
        return self.usd_hour * HOURS_A_DAY

    @property
    def unknown(self) -> tuple[str, ...]:
        """What has no known price, and is not in the sums."""
        return tuple(line.what for line in self.lines if line.usd_hour_each is None)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What nodes have cost since each was launched: instance hours alone."""

    usd: float
    """Of all that has a known price: at least this much."""
    unknown: tuple[str, ...] = ()
    """Instance types without a known price."""


def cost_of(
    nodes: Iterable[Node],
    spec: ClusterSpec,
    prices: Mapping[str, Price],
    *,
    block_ends_at: datetime | None = None,
) -> Cost:
    """What the nodes and what is made around them cost.

    Args:
        nodes: of planning/nodes.py.
        spec: a cluster with an `aws` section; without, nothing costs anything.
        prices: by instance type, spot_key(type), or a name of model/prices.py.
        block_ends_at: when the Capacity Block ends.
    """
    aws, nodes = spec.aws, tuple(nodes)
    if aws is None:
        return Cost(lines=())
    lines = [*_instance_lines(nodes, aws, prices), *_volume_lines(nodes, aws, prices)]
    if aws.network.vpc_id is None:
        if aws.network.egress == "nat":
            lines += [_line(NAT_GATEWAY, 1, prices), _line(PUBLIC_ADDRESS, 1, prices)]
        if aws.network.endpoints:
            lines.append(_line(INTERFACE_ENDPOINT, ENDPOINTS, prices))
    return Cost(lines=tuple(lines), ends_at=block_ends_at)


def spent(seen: Iterable[NodeSeen], prices: Mapping[str, Price], now: datetime) -> Spent:
    """What the nodes that run have cost since launch.

    Instances of a Capacity Block cost nothing more; those that ended or stopped are not counted,
    for EC2 does not say when. A spot price is today's.
    """
    usd, unknown = 0.0, set()
    for node in seen:
        if node.state not in BILLED or node.lifecycle == "capacity-block":
            continue
        name = node.instance_type
        price = prices.get(spot_key(name) if node.lifecycle == "spot" else name)
        if price is None:
            unknown.add(name)
        else:
            hours = max(now - node.launched_at, timedelta()) / timedelta(hours=1)
            usd += hours * price.usd_hour
    return Spent(usd=usd, unknown=tuple(sorted(unknown)))


def _instance_lines(
    nodes: Iterable[Node], aws: AwsSpec, prices: Mapping[str, Price]
) -> list[CostLine]:
    """One line a role."""
    lines = []
    for (role, name), count in Counter((n.role, n.instance_type) for n in nodes).items():
        kind = "on-demand" if role == "router" else aws.capacity.kind
        what = f"{role} {name}"
        if kind == "capacity-block":
            lines.append(CostLine(what=what, count=count, usd_hour_each=0.0, source=PAID))
        elif kind == "spot":
            lines.append(_line(what, count, prices, key=spot_key(name)))
        else:
            source = (
                "; a reservation costs the same when it is not used" if kind in RESERVED else ""
            )
            lines.append(_line(what, count, prices, key=name, note=source))
    return lines


def _volume_lines(
    nodes: Iterable[Node], aws: AwsSpec, prices: Mapping[str, Price]
) -> list[CostLine]:
    nodes = tuple(nodes)
    engines = [node for node in nodes if node.role != "router"]
    amounts = {
        GP3_GIB: aws.root_volume_gib * len(engines)
        + ROUTER_VOLUME_GIB * (len(nodes) - len(engines)),
        GP3_IOPS: GPU_NODE_IOPS * len(engines),
        GP3_MBPS: GPU_NODE_MBPS * len(engines),
    }
    return [_line(what, amount, prices) for what, amount in amounts.items() if amount]


def _line(
    what: str, count: float, prices: Mapping[str, Price], *, key: str = "", note: str = ""
) -> CostLine:
    price = prices.get(key or what)
    return CostLine(
        what=what,
        count=count,
        usd_hour_each=price.usd_hour if price else None,
        source=f"{price.source}{note}" if price else "price not known",
    )
