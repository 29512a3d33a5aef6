"""Which nodes of a cluster EC2 knows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvdeploy.adapters.aws.session import by_tag, tags_of
from kvdeploy.model.infra import ID_TAG, NODE_TAG, ROLE_TAG, NodeSeen

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws


def observe(aws: Aws, cluster_id: str) -> tuple[NodeSeen, ...]:
    """Every instance of the cluster by node and launch, what ended in the last hour included.

    Raises AwsError.
    """
    found = [_seen(one) for one in instances(aws, Filters=by_tag(ID_TAG, cluster_id))]
    return tuple(sorted(found, key=lambda n: (n.node, n.launched_at, n.id)))


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
    )
