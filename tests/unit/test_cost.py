from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvdeploy.model.infra import NodeSeen
from kvdeploy.model.prices import (
    GP3_GIB,
    GP3_IOPS,
    GP3_MBPS,
    HOURS_A_MONTH,
    INTERFACE_ENDPOINT,
    NAT_GATEWAY,
    PRICED_REGIONS,
    PRICES_DATE,
    PUBLIC_ADDRESS,
    Price,
    listed,
    spot_key,
)
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.cost import Cost, cost_of, spent
from kvdeploy.planning.nodes import nodes_of

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TODAY = "AWS price list, 2026-11-30"
PRICES = {
    "p5en.48xlarge": Price(usd_hour=60.0, source=TODAY),
    "c7i.2xlarge": Price(usd_hour=0.4, source=TODAY),
    spot_key("p5en.48xlarge"): Price(usd_hour=27.0, source="spot price in us-west-2a"),
    NAT_GATEWAY: Price(usd_hour=0.05, source="list"),
    PUBLIC_ADDRESS: Price(usd_hour=0.005, source="list"),
    INTERFACE_ENDPOINT: Price(usd_hour=0.01, source="list"),
    GP3_GIB: Price(usd_hour=0.0001, source="list"),
    GP3_IOPS: Price(usd_hour=0.000001, source="list"),
    GP3_MBPS: Price(usd_hour=0.00001, source="list"),
}


def cost(prices: dict[str, Price] = PRICES, **aws: Any) -> Cost:
    spec = ClusterSpec.model_validate(
        {
            "name": "demo",
            "target": "aws",
            "aws": {"region": "us-west-2", "zone": "us-west-2a"} | aws,
        }
    )
    return cost_of(nodes_of(spec), spec, prices)


def node(hours: float, **over: Any) -> NodeSeen:
    good: dict[str, Any] = {
        "id": "i-1",
        "node": "decode-0",
        "role": "decode",
        "state": "running",
        "instance_type": "p5en.48xlarge",
        "zone": "us-west-2a",
        "private_ip": "10.0.0.4",
        "launched_at": NOW - timedelta(hours=hours),
    }
    return NodeSeen(**(good | over))


def shown(cost: Cost) -> list[tuple[str, float, float | None]]:
    return [(line.what, line.count, line.usd_hour) for line in cost.lines]


def test_a_new_network_costs_nodes_volumes_gateway_address_and_endpoints() -> None:
    found = cost()
    assert shown(found) == [
        ("prefill p5en.48xlarge", 1, 60.0),
        ("decode p5en.48xlarge", 1, 60.0),
        ("router c7i.2xlarge", 1, 0.4),
        ("gp3 GiB", 600, pytest.approx(0.06)),
        ("gp3 IOPS above 3000", 6000, pytest.approx(0.006)),
        ("gp3 MB/s above 125", 750, pytest.approx(0.0075)),
        ("NAT gateway", 1, 0.05),
        ("public IPv4 address", 1, 0.005),
        ("interface endpoint", 3, pytest.approx(0.03)),
    ]
    assert found.usd_hour == pytest.approx(120.5585)
    assert found.usd_day == pytest.approx(120.5585 * 24)
    assert found.unknown == ()


def test_an_existing_network_is_paid_for_by_whoever_made_it() -> None:
    found = cost(network={"vpc_id": "vpc-1", "subnet_id": "subnet-1"})
    assert [line.what for line in found.lines][3:] == [GP3_GIB, GP3_IOPS, GP3_MBPS]
    bare = cost(network={"egress": "none", "endpoints": False})
    assert [line.what for line in bare.lines][3:] == [GP3_GIB, GP3_IOPS, GP3_MBPS]


def test_the_routers_volume_is_infras_and_the_others_are_the_files() -> None:
    (volumes,) = [line for line in cost(root_volume_gib=500).lines if line.what == GP3_GIB]
    assert volumes.count == 2 * 500 + 200


def test_spot_has_its_own_price_and_the_router_is_on_demand() -> None:
    assert shown(cost(capacity={"kind": "spot"}))[:3] == [
        ("prefill p5en.48xlarge", 1, 27.0),
        ("decode p5en.48xlarge", 1, 27.0),
        ("router c7i.2xlarge", 1, 0.4),
    ]


def test_a_capacity_block_is_paid_for_already_and_its_end_is_kept() -> None:
    spec = ClusterSpec.model_validate(
        {
            "name": "demo",
            "target": "aws",
            "aws": {
                "region": "us-west-2",
                "zone": "us-west-2a",
                "capacity": {"kind": "capacity-block", "reservation_id": "cr-1"},
            },
        }
    )
    found = cost_of(nodes_of(spec), spec, PRICES, block_ends_at=NOW)
    assert [(line.usd_hour, line.source) for line in found.lines][:2] == [
        (0.0, "paid up front"),
        (0.0, "paid up front"),
    ]
    assert found.ends_at == NOW
    assert found.usd_hour == pytest.approx(0.5585)


def test_a_reservation_costs_as_much_as_it_does_unused_and_says_so() -> None:
    line = cost(capacity={"kind": "odcr", "reservation_id": "cr-1"}).lines[0]
    assert line.usd_hour == 60.0
    assert line.source == f"{TODAY}; a reservation costs the same when it is not used"


def test_a_price_that_is_not_known_is_said_to_be_unknown_and_never_zero() -> None:
    found = cost({k: v for k, v in PRICES.items() if k != "p5en.48xlarge"})
    assert found.unknown == ("prefill p5en.48xlarge", "decode p5en.48xlarge")
    assert found.lines[0].usd_hour is None
    assert found.lines[0].source == "price not known"
    assert found.usd_hour == pytest.approx(0.5585)
    assert cost({}).usd_hour == 0.0
    assert len(cost({}).unknown) == 9


def test_another_target_costs_nothing() -> None:
    local = ClusterSpec.model_validate({"name": "demo"})
    assert cost_of(nodes_of(local), local, PRICES) == Cost(lines=())


def test_what_was_spent_is_counted_from_each_nodes_launch() -> None:
    seen = [
        node(2.0),
        node(0.5, id="i-2", lifecycle="spot"),
        node(9.0, id="i-3", lifecycle="capacity-block"),
        node(9.0, id="i-4", state="terminated"),
        node(9.0, id="i-5", state="stopped"),
        node(3.0, id="i-6", instance_type="p9.metal"),
        node(-1.0, id="i-7"),  # another machine's clock
    ]
    found = spent(seen, PRICES, NOW)
    assert found.usd == pytest.approx(2 * 60 + 0.5 * 27)
    assert found.unknown == ("p9.metal",)


def test_every_listed_price_has_a_source_with_a_date() -> None:
    for region in PRICED_REGIONS:
        prices = listed(region)
        assert prices["p5en.48xlarge"].usd_hour == 63.296
        assert prices[GP3_GIB].usd_hour * HOURS_A_MONTH == pytest.approx(0.08)
        assert all(p.source.endswith(PRICES_DATE) and p.usd_hour > 0 for p in prices.values())


def test_a_region_that_is_not_listed_has_no_prices() -> None:
    assert listed("eu-north-1") == {}
