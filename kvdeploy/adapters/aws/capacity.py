"""What of EC2's capacity there is for a cluster: types, quotas, reservations, placement groups."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal

from kvdeploy.adapters.aws.nodes import instances, lifecycle_of
from kvdeploy.adapters.aws.refusals import code_of
from kvdeploy.adapters.aws.session import by_tag, filters, tags_of
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import PlacementGroup, Quota, Reservation
from kvdeploy.model.infra import ID_TAG
from kvdeploy.model.prices import quota_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdeploy.adapters.aws.session import Aws

ALIVE: Final = ("pending", "running", "stopping", "stopped", "shutting-down")
COUNTED: Final = ("pending", "running")
"""States of instances that a quota counts."""
RESERVING: Final = frozenset({"active", "assessing", "delayed", "pending", "scheduled"})
"""States of reservations that a quota counts, used or not."""


def zones_of(aws: Aws, types: Iterable[str]) -> dict[str, frozenset[str]]:
    """Which zones of the region offer each type. Raises AwsError."""
    types = list(types)
    offered = aws.all(
        "ec2:DescribeInstanceTypeOfferings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=filters(instance_type=types),
    )
    return {
        name: frozenset(o["Location"] for o in offered if o["InstanceType"] == name)
        for name in types
    }


def vcpus_of(aws: Aws, types: Iterable[str]) -> dict[str, int]:
    """How many vCPUs a type has, for those that the region has. Raises AwsError."""
    names = sorted(set(types))
    if not names:  # EC2 refuses a filter without values
        return {}
    found = aws.all(
        "ec2:DescribeInstanceTypes", "InstanceTypes", Filters=filters(instance_type=names)
    )
    return {t["InstanceType"]: int(t["VCpuInfo"]["DefaultVCpus"]) for t in found}


def quotas_of(
    aws: Aws, codes: Iterable[str], *, account: str, held: frozenset[str]
) -> dict[str, Quota]:
    """Limits and use of vCPU quotas.

    Counted is what AWS counts: instances that run, and reservations whether used or not;
    instances in a reservation once, those in Capacity Blocks and shared reservations not at all.

    Args:
        aws: the region.
        codes: quota codes.
        account: whose reservations count.
        held: ids of clusters whose nodes are not counted as used but as held.
    Raises AwsError.
    """
    codes = list(codes)
    running = instances(aws, Filters=filters(instance_state_name=list(COUNTED)))
    reserved = [
        r
        for r in aws.all("ec2:DescribeCapacityReservations", "CapacityReservations")
        if r["State"] in RESERVING
        and r.get("ReservationType", "default") == "default"
        and r.get("OwnerId", account) == account
    ]
    vcpus = vcpus_of(
        aws, [i["InstanceType"] for i in running] + [r["InstanceType"] for r in reserved]
    )
    used: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for one in running:
        code = _code_for(one["InstanceType"], lifecycle_of(one))
        into = ours if tags_of(one).get(ID_TAG) in held else used
        into[code] += vcpus.get(one["InstanceType"], 0)
    for one in reserved:  # the used part of it is among the instances
        code = _code_for(one["InstanceType"], "on-demand")
        used[code] += one["AvailableInstanceCount"] * vcpus.get(one["InstanceType"], 0)
    return {code: _quota(aws, code, used[code], ours[code]) for code in codes}


def reservations_of(
    aws: Aws, *, reservation_id: str | None, tags: dict[str, str], held: frozenset[str]
) -> tuple[Reservation, ...]:
    """One reservation by id, or all active ones that have every one of the tags.

    Raises AwsError.
    """
    asked: dict[str, Any] = (
        {"CapacityReservationIds": [reservation_id]}
        if reservation_id
        else {"Filters": [f for k, v in tags.items() for f in by_tag(k, v)]}
    )
    try:
        found = aws.all("ec2:DescribeCapacityReservations", "CapacityReservations", **asked)
    except AwsError as e:
        if code_of(e).startswith("InvalidCapacityReservationId"):
            return ()
        raise
    if not reservation_id:
        found = [r for r in found if r["State"] == "active"]
    return tuple(_reservation(aws, one, held) for one in found)


def placement_groups_of(aws: Aws) -> dict[str, PlacementGroup]:
    """Every placement group of the region by name. Raises AwsError."""
    found = aws.all("ec2:DescribePlacementGroups", "PlacementGroups")
    return {
        p["GroupName"]: PlacementGroup(
            name=p["GroupName"], strategy=p.get("Strategy", ""), state=p.get("State", "")
        )
        for p in found
    }


def _code_for(instance_type: str, lifecycle: str) -> str:
    """The quota that counts an instance; '' for none."""
    known = quota_class(instance_type)
    if known is None or lifecycle == "capacity-block":
        return ""
    return known.spot if lifecycle == "spot" else known.on_demand


def _quota(aws: Aws, code: str, used: int, held: int) -> Quota:
    try:
        found = aws.call("servicequotas:GetServiceQuota", ServiceCode="ec2", QuotaCode=code)
    except AwsError as e:  # an account that never had it changed may have the default only
        if code_of(e) != "NoSuchResourceException":
            raise
        found = aws.call(
            "servicequotas:GetAWSDefaultServiceQuota", ServiceCode="ec2", QuotaCode=code
        )
    quota = found["Quota"]
    return Quota(
        code=code, name=quota["QuotaName"], limit=float(quota["Value"]), used=used, held=held
    )


def _reservation(aws: Aws, one: dict[str, Any], held: frozenset[str]) -> Reservation:
    block = one.get("ReservationType") == "capacity-block"
    kind: Literal["odcr", "capacity-block"] = "capacity-block" if block else "odcr"
    group = str(one.get("PlacementGroupArn") or "").rpartition("/")[2]
    return Reservation(
        id=one["CapacityReservationId"],
        instance_type=one["InstanceType"],
        zone=one["AvailabilityZone"],
        total=int(one["TotalInstanceCount"]),
        available=int(one["AvailableInstanceCount"]),
        held=_held_in(aws, one["CapacityReservationId"], held),
        state=one["State"],
        kind=kind,
        start=one.get("StartDate"),
        end=one.get("EndDate"),
        placement_group=group,
        tags=tags_of(one),
    )


def _held_in(aws: Aws, reservation: str, held: frozenset[str]) -> int:
    if not held:
        return 0
    ours = instances(
        aws,
        Filters=[*filters(instance_state_name=list(ALIVE)), *by_tag(ID_TAG, *sorted(held))],
    )
    return sum(one.get("CapacityReservationId") == reservation for one in ours)
