"""Which nodes of a cluster EC2 knows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.session import by_tag, filters, tags_of
from kvdeploy.errors import AwsError
from kvdeploy.model.infra import GENERATION_TAG, ID_TAG, NODE_TAG, ROLE_TAG, NodeSeen
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.polling import Clock

STOP_S: Final = 300.0
START_S: Final = 600.0
"""How long EC2 may take to stop and to start a machine; a P5en boots for minutes."""


def observe(aws: Aws, cluster_id: str) -> tuple[NodeSeen, ...]:
    """Every instance of the cluster by node and launch, what ended in the last hour included.

    Raises AwsError.
    """
    found = [_seen(one) for one in instances(aws, Filters=by_tag(ID_TAG, cluster_id))]
    return tuple(sorted(found, key=lambda n: (n.node, n.launched_at, n.id)))


def start(aws: Aws, nodes: Iterable[NodeSeen], *, clock: Clock) -> None:
    """Start machines that were stopped, and wait until each runs.

    Raises AwsError: EC2 refuses, e.g. for want of capacity, or they do not run in time.
    """
    waiting = [node.id for node in nodes]
    stopping = {"Filters": filters(instance_state_name=["stopping"]), "InstanceIds": waiting}
    wait_for(lambda: None if instances(aws, **stopping) else True, timeout_s=STOP_S, clock=clock)
    aws.call("ec2:StartInstances", InstanceIds=waiting)

    def all_run() -> bool | None:
        found = instances(aws, InstanceIds=waiting)
        return all(one["State"]["Name"] == "running" for one in found) or None

    if not wait_for(all_run, timeout_s=START_S, interval_s=2.0, clock=clock):
        msg = f"{', '.join(waiting)}: started, and not running after {START_S:.0f} s"
        raise AwsError(
            msg, hint="See 'kvdeploy status'; replace them with 'kvdeploy up --replace'."
        )


def instances(aws: Aws, **asked: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Instances as EC2 describes them. Raises AwsError."""
    groups = aws.all("ec2:DescribeInstances", "Reservations", **asked)
    return [one for group in groups for one in group["Instances"]]


def lifecycle_of(instance: dict[str, Any]) -> str:
    """on-demand, spot or capacity-block; EC2 leaves out the first."""
    return str(instance.get("InstanceLifecycle") or "on-demand")


def _seen(one: dict[str, Any]) -> NodeSeen:
    tags = tags_of(one)
    launched: datetime = one["LaunchTime"]
    return NodeSeen(
        id=one["InstanceId"],
        node=tags.get(NODE_TAG, ""),
        role=tags.get(ROLE_TAG, ""),
        state=one["State"]["Name"],
        instance_type=one["InstanceType"],
        zone=one["Placement"]["AvailabilityZone"],
        private_ip=one.get("PrivateIpAddress"),
        launched_at=launched.astimezone(UTC),
        lifecycle=lifecycle_of(one),
        generation=_number(tags.get(GENERATION_TAG, "")),
    )


def _number(generation: str) -> int:
    """2-9f3c01ab -> 2; 1 for a tag that is none of ours."""
    number = generation.partition("-")[0]
    return int(number) if number.isdecimal() else 1
