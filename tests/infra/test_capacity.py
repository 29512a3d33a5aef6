"""Where instances come from: each kind of capacity, and what is found wrong before any is asked."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.infra.conftest import Bench

pytestmark = pytest.mark.real_process

TYPE, ZONE = "p5en.48xlarge", "us-west-2a"
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=20)


def made(bench: Bench, **capacity: Any) -> tuple[str, dict[str, tuple[Any, ...]]]:
    """Bring it up; what was said, and lifecycle, reservation and group of every node."""
    bench.write(aws={"capacity": capacity})
    said = bench.run("up")
    assert said.code == 0, said.err
    assert "terraform: nothing to do" in bench.run("plan").out
    return said.err, {
        m.tags["kvdeploy:node"]: (m.lifecycle or None, m.reservation, m.placement_group or None)
        for m in bench.aws.instances()
    }


@pytest.mark.usefixtures("there")
def test_a_reservation_is_found_by_its_tags(bench: Bench) -> None:
    bench.aws.reservation(TYPE, ZONE, 2, tags={"team": "other"})
    ours = bench.aws.reservation(TYPE, ZONE, 2, tags={"team": "ml"})
    _, nodes = made(bench, kind="odcr", reservation_tags={"team": "ml"})
    assert nodes == {
        "prefill-0": (None, ours, None),
        "decode-0": (None, ours, None),
        "router-0": (None, None, None),
    }


@pytest.mark.usefixtures("there")
def test_a_capacity_block_has_no_placement_group_and_its_end_is_told(bench: Bench) -> None:
    block = bench.aws.reservation(TYPE, ZONE, 2, kind="capacity-block", end=SOON)
    said, nodes = made(bench, kind="capacity-block", reservation_id=block)
    assert nodes["decode-0"] == ("capacity-block", block, None)
    assert nodes["router-0"] == (None, None, None)
    assert f"the Capacity Block is paid up front and ends at {SOON:%Y-%m-%d %H:%M} UTC" in said
    assert f"its Capacity Block ends at {SOON:%Y-%m-%dT%H:%M} UTC" in bench.run("status").out
    assert "[reservation-not-active]" in said  # less than a day is left: a warning


@pytest.mark.usefixtures("there")
def test_spot_nodes_are_one_time_requests_beside_each_other(bench: Bench) -> None:
    bench.aws.spot_price(TYPE, ZONE, 27.5)
    said, nodes = made(bench, kind="spot", spot_max_usd=40)
    assert nodes["decode-0"] == ("spot", None, "kvdeploy-demo")
    assert nodes["router-0"] == (None, None, None)
    assert "cost: $55." in said


def test_everything_wrong_is_told_at_once_and_nothing_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.aws.quota("L-417A185B", 192)
    monkeypatch.setenv("TF_VAR_name", "other")
    bench.write(
        aws={
            "ami": "ami-0123456789abcdef0",
            "access": {"method": "ssh", "key_name": "nobodys", "ssh_cidrs": ["10.0.0.0/8"]},
            "network": {"allowed_cidrs": ["0.0.0.0/0"]},
        },
        fleet={"decode": {"tensor_parallel": 3}},
    )
    checked = bench.run("check", "--json")
    assert checked.code == 4
    found = {f["check"] for f in json.loads(checked.out) if f["severity"] == "error"}
    assert found >= {
        "quota-too-small",
        "terraform-env-set",
        "image-unusable",
        "key-pair-missing",
        "open-to-everyone",
        "tensor-parallel-does-not-divide-node",
    }
    for command in ("up", "plan"):
        refused = bench.run(command)
        assert refused.code == 4
        assert all(f"[{name}]" in refused.err for name in found)
    assert bench.ours == {}
    assert not {"RunInstances", "CreateVpc"} & bench.aws.counts().keys()


@pytest.mark.parametrize(
    ("reservation", "capacity", "found"),
    [
        ({"instance_type": "p5.48xlarge"}, {"kind": "odcr"}, "reservation-does-not-fit"),
        ({"zone": "us-west-2c"}, {"kind": "odcr"}, "reservation-does-not-fit"),
        ({"count": 1}, {"kind": "odcr"}, "reservation-does-not-fit"),
        ({"kind": "capacity-block"}, {"kind": "odcr"}, "reservation-does-not-fit"),
        ({"state": "expired"}, {"kind": "odcr"}, "reservation-not-active"),
        (
            {"kind": "capacity-block", "end": datetime.now(UTC) + timedelta(minutes=20)},
            {"kind": "capacity-block"},
            "reservation-not-active",
        ),
    ],
)
def test_a_reservation_that_does_not_fit_is_found_before(
    bench: Bench, reservation: dict[str, Any], capacity: dict[str, Any], found: str
) -> None:
    asked: dict[str, Any] = {"instance_type": TYPE, "zone": ZONE, "count": 2} | reservation
    made = bench.aws.reservation(**asked)
    bench.write(aws={"capacity": capacity | {"reservation_id": made}})
    said = bench.run("check")
    assert said.code == 4, said.err
    assert f"[{found}]" in said.out


def test_a_zone_without_the_type_is_told_with_those_that_have_it(bench: Bench) -> None:
    bench.write(aws={"zone": "us-west-2b"})
    said = bench.run("check")
    assert said.code == 4
    assert "us-west-2b does not offer p5en.48xlarge [type-not-in-zone]" in said.out
    assert "us-west-2a, us-west-2c and us-west-2d" in said.out
