"""Deletes what leftovers.find() found, in the order in which AWS lets things go.

Only what carries a cluster's id is touched. Every wait is bounded; what could not be deleted is
the answer. Safe to repeat: what is gone already counts as deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.aws.deletions import STEPS
from kvdeploy.adapters.aws.network import found, is_missing
from kvdeploy.adapters.aws.refusals import code_of
from kvdeploy.errors import AwsError
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvdeploy.adapters.aws.deletions import Deletion
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.infra import Leftover
    from kvdeploy.polling import Clock

RETRY_S: Final = 120.0
"""How long AWS may say that something is in use after what used it has gone."""
INTERVAL_S: Final = 5.0
BUSY: Final = frozenset(
    {"DependencyViolation", "DeleteConflict", "IncorrectState", "InvalidIPAddress.InUse"}
    | {"InvalidGroup.InUse", "InvalidNetworkInterface.InUse", "VolumeInUse"}
    | {"InvalidPlacementGroup.InUse", "InvalidAddress.Locked"}
)
"""Codes of "not yet": something still uses it."""

WAITS: Final = {
    # A P5en takes minutes to be wiped after it is terminated.
    "instance": ("ec2:DescribeInstances", "Reservations", "InstanceIds", "terminated", 900.0),
    "nat_gateway": ("ec2:DescribeNatGateways", "NatGateways", "NatGatewayIds", "deleted", 300.0),
    "vpc_endpoint": (
        "ec2:DescribeVpcEndpoints",
        "VpcEndpoints",
        "VpcEndpointIds",
        "deleted",
        300.0,
    ),
}
"""What is deleted in the background: how it is looked at, its last state, and seconds for it."""

CHILDREN: Final = frozenset(
    {"route", "route_table_association", "iam_role_policy", "iam_role_policy_attachment"}
    | {"default_security_group"}
)
"""What goes with its parent."""


def sweep(
    aws: Aws,
    leftovers: Iterable[Leftover],
    *,
    clock: Clock,
    on_detail: Callable[[str], None],
) -> tuple[Leftover, ...]:
    """Delete, and return what is still there.

    Args:
        aws: the region.
        leftovers: of leftovers.find(); those without a cluster's id are not touched.
        clock: for the waits.
        on_detail: told what is being done.
    Raises AwsError when AWS does not answer; a deletion that it refuses leaves its thing.
    """
    todo = [one for one in leftovers if one.kind not in CHILDREN]
    left = {(one.kind, one.id): one for one in todo}
    ours = {one.id for one in todo if one.cluster_id}
    for doing, kinds, delete in STEPS:
        going = [one for one in todo if one.kind in kinds and one.cluster_id]
        for one in going:
            on_detail(f"{doing} {one.kind} {one.id}")
            if _delete(aws, one, delete, ours, clock):
                left.pop((one.kind, one.id), None)
            else:
                left[one.kind, one.id] = one
        going = [one for one in going if (one.kind, one.id) not in left]
        if going and kinds[0] in WAITS:
            on_detail(f"waiting for {len(going)} {kinds[0]} to be gone")
            left |= {(one.kind, one.id): one for one in _wait(aws, kinds[0], going, clock)}
    return tuple(left.values())


def _delete(aws: Aws, one: Leftover, delete: Deletion, ours: set[str], clock: Clock) -> bool:
    """Whether it is gone or going; tried again while something still uses it."""

    def once() -> bool | None:
        try:
            return delete(aws, one, ours) is not False
        except AwsError as e:
            if is_missing(e):
                return True
            if code_of(e) in BUSY:
                return None
            if code_of(e):
                return False
            raise

    return bool(wait_for(once, timeout_s=RETRY_S, interval_s=INTERVAL_S, clock=clock))


def _wait(aws: Aws, kind: str, going: list[Leftover], clock: Clock) -> list[Leftover]:
    """Those that are not gone when the time is over."""
    operation, key, by, last, timeout_s = WAITS[kind]
    ids = [one.id for one in going]
    still = set(ids)

    def look() -> bool | None:
        nonlocal still
        listed = found(aws, operation, key, **{by: ids})
        if kind == "instance":
            listed = [one for group in listed for one in group["Instances"]]
        still = {one[by.removesuffix("s")] for one in listed if _state(one) != last}
        return None if still else True

    wait_for(look, timeout_s=timeout_s, interval_s=INTERVAL_S, clock=clock)
    return [one for one in going if one.id in still]


def _state(described: dict[str, object]) -> str:
    state = described["State"]
    return str(state["Name"] if isinstance(state, dict) else state).lower()
