"""The machine that an image is taken from: launched, waited for, stopped, and always ended.

What one run makes carries its tag kvdeploy:build, so that it is found again also when the answer
that named it was never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.network import found, is_missing
from kvdeploy.adapters.aws.nodes import instances
from kvdeploy.adapters.aws.refusals import code_of, is_login, is_refusal
from kvdeploy.adapters.aws.session import by_tag, filters
from kvdeploy.errors import AwsError
from kvdeploy.model.image import BUILD_TAG, BUILDER, Builder
from kvdeploy.model.infra import CLUSTER_TAG, NODE_TAG
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.polling import Clock

RUNNING_S: Final = 900.0
STOPPED_S: Final = 900.0
END_S: Final = 180.0
LOOKS: Final = 4
"""How often nothing must be seen of a launch whose answer was not read: EC2 tells late."""
INTERVAL_S: Final = 5.0
ALIVE: Final = ("pending", "running", "stopping", "stopped")

_NO_CAPACITY: Final = frozenset({"InsufficientInstanceCapacity", "ReservationCapacityExceeded"})
_NO_QUOTA: Final = frozenset({"VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"})


@dataclass(frozen=True, kw_only=True)
class Order:
    """The machine that a builder is to be."""

    build: str
    """Value of the tag kvdeploy:build, and what makes a launch that is asked for twice one."""
    image: str
    root_device: str
    root_gib: int
    instance_type: str
    interfaces: Sequence[Mapping[str, Any]]
    profile: str | None
    user_data: str
    tags: Mapping[str, str]
    reservation: str | None = None
    market: str | None = None
    """'capacity-block', or None."""


def launch(aws: Aws, order: Order) -> str:
    """Ask for the builder; its id. Raises AwsError."""
    tags = [{"Key": k, "Value": v} for k, v in {**order.tags, BUILD_TAG: order.build}.items()]
    asked: dict[str, Any] = {
        "ClientToken": order.build,
        "MinCount": 1,
        "MaxCount": 1,
        "ImageId": order.image,
        "InstanceType": order.instance_type,
        "NetworkInterfaces": list(order.interfaces),
        "EbsOptimized": True,
        # From within, the machine can only end, never stop: see build_cloud_config.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required"},
        "BlockDeviceMappings": [
            {
                "DeviceName": order.root_device,
                "Ebs": {
                    "VolumeType": "gp3",
                    "VolumeSize": order.root_gib,
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "UserData": order.user_data,
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags}
            for kind in ("instance", "volume", "network-interface")
        ],
    }
    if order.profile:
        asked["IamInstanceProfile"] = {"Name": order.profile}
    if order.reservation:
        target = {"CapacityReservationId": order.reservation}
        asked["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if order.market:
        asked["InstanceMarketOptions"] = {"MarketType": order.market}
    try:
        return str(aws.call("ec2:RunInstances", **asked)["Instances"][0]["InstanceId"])
    except AwsError as e:
        raise _explained(e, order) from e


def wait_running(aws: Aws, instance_id: str, *, clock: Clock) -> Builder:
    """Until the builder runs and has an address. Raises AwsError: it ends, or is too slow."""
    seen: list[Builder] = []

    def look() -> Builder | None:
        for one in found(aws, "ec2:DescribeInstances", "Reservations", InstanceIds=[instance_id]):
            (described,) = one["Instances"]
            seen[:] = [_builder(described)]
            if seen[0].state in {"shutting-down", "terminated", "stopping", "stopped"}:
                raise _ended(described)
            if seen[0].state == "running" and seen[0].address:
                return seen[0]
        return None  # also when EC2 does not know yet what it has just made

    if (ready := wait_for(look, timeout_s=RUNNING_S, interval_s=INTERVAL_S, clock=clock)) is None:
        state = seen[0].state if seen else "not known to EC2"
        msg = f"the builder {instance_id} is {state} {RUNNING_S:.0f} s after it was launched"
        raise AwsError(msg, hint="Try again, or in another zone, or on another --instance-type.")
    return ready


def stop(aws: Aws, instance_id: str, *, clock: Clock) -> None:
    """Stop the builder, and wait until it is off: its disk then holds all that was written.

    Raises AwsError: EC2 refuses, or it does not stop in time.
    """
    aws.call("ec2:StopInstances", InstanceIds=[instance_id])

    def look() -> bool | None:
        (one,) = instances(aws, InstanceIds=[instance_id])
        if one["State"]["Name"] in {"shutting-down", "terminated"}:
            raise _ended(one)
        return one["State"]["Name"] == "stopped" or None

    if not wait_for(look, timeout_s=STOPPED_S, interval_s=INTERVAL_S, clock=clock):
        msg = f"the builder {instance_id} does not stop: still not off after {STOPPED_S:.0f} s"
        raise AwsError(msg, hint="Run 'kvdeploy image' again.")


def find(aws: Aws, cluster: str) -> tuple[Builder, ...]:
    """Builders of a cluster that are still there: of runs that were killed. Raises AwsError."""
    asked = [
        *by_tag(CLUSTER_TAG, cluster),
        *by_tag(NODE_TAG, BUILDER),
        *filters(instance_state_name=list(ALIVE)),
    ]
    return tuple(_builder(one) for one in instances(aws, Filters=asked))


def end(
    aws: Aws, known: Iterable[str], *, clock: Clock, build: str | None = None
) -> tuple[str, ...]:
    """End builders: those that are known by id, and whatever else is of the build.

    Returns:
        Ids of what EC2 said it ends.

    Raises AwsError: one may still run, and bill.
    """
    todo, ended = set(known), set[str]()
    blank, said = 0, ""

    def look() -> bool | None:
        nonlocal blank, said
        try:
            alive = todo - ended
            if build:
                mine = instances(aws, Filters=by_tag(BUILD_TAG, build))
                alive |= {one["InstanceId"] for one in mine if one["State"]["Name"] in ALIVE}
            for one in sorted(alive):
                aws.call("ec2:TerminateInstances", InstanceIds=[one])
                ended.add(one)
            if alive:
                return None
        except AwsError as e:
            if is_refusal(e) or is_login(e):
                raise
            if not is_missing(e):  # EC2 tells late of what it has just made
                said = e.message
                return None
        blank += 1
        return True if (ended and todo <= ended) or blank >= LOOKS else None

    if not wait_for(look, timeout_s=END_S, interval_s=INTERVAL_S, clock=clock):
        raise AwsError(said or "EC2 goes on showing it as running")
    return tuple(sorted(ended))


def _builder(described: dict[str, Any]) -> Builder:
    return Builder(
        id=described["InstanceId"],
        state=described["State"]["Name"],
        address=described.get("PrivateIpAddress") or "",
        instance_type=described["InstanceType"],
        launched_at=described["LaunchTime"].astimezone(UTC),
    )


def _ended(described: dict[str, Any]) -> AwsError:
    why = str((described.get("StateReason") or {}).get("Message") or "EC2 does not say why")
    msg = f"the builder {described['InstanceId']} is {described['State']['Name']}: {why}"
    return AwsError(msg, hint="Run 'kvdeploy image' again.")


def _explained(error: AwsError, order: Order) -> AwsError:
    """What a launch that was refused means for an image."""
    code, kind = code_of(error), order.instance_type
    other = "another --instance-type with EFA and GPUs may be had (g6.8xlarge is cheap)"
    if code in _NO_CAPACITY:
        where = "in the reservation" if order.reservation else "in this zone"
        msg = f"there is no capacity {where} for a builder, a {kind}, now ({code})"
        return AwsError(msg, hint=f"Try again later; {other}.")
    if code in _NO_QUOTA:
        msg = f"the account's vCPU quota has no room for a builder, a {kind} ({code})"
        return AwsError(msg, hint=f"'kvdeploy check' shows the quota; {other}.")
    return error
