"""Everything in AWS that is a cluster's, found by its tags and fixed names.

Asked of each service by kind: the tagging API leaves out addresses, placement groups, launch
templates, key pairs and interfaces. What an existing network holds of others is never listed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.children import children
from kvdeploy.adapters.aws.network import found, is_missing
from kvdeploy.adapters.aws.session import by_tag, filters, tags_of
from kvdeploy.errors import AwsError
from kvdeploy.model.infra import ADDRESS_TAG, CLUSTER_TAG, ID_TAG, Leftover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvdeploy.adapters.aws.session import Aws

__all__ = ["KINDS", "children", "find", "iam_name", "named"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How EC2 lists one kind of resource."""

    kind: str
    operation: str
    key: str
    id: str
    """Key of what Terraform imports it by."""
    name: str = ""
    state: str = "State"
    gone: frozenset[str] = frozenset()
    """States in which it is no longer there."""
    billing: frozenset[str] | None = frozenset()
    """States in which it is charged for by the hour; None for every one."""


KINDS: Final = (
    Kind(
        kind="instance",
        operation="ec2:DescribeInstances",
        key="Reservations",
        id="InstanceId",
        gone=frozenset({"terminated"}),
        billing=frozenset({"pending", "running", "stopping"}),
    ),
    Kind(
        kind="network_interface",
        operation="ec2:DescribeNetworkInterfaces",
        key="NetworkInterfaces",
        id="NetworkInterfaceId",
        name="Description",
        state="Status",
    ),
    Kind(
        kind="ebs_volume",
        operation="ec2:DescribeVolumes",
        key="Volumes",
        id="VolumeId",
        gone=frozenset({"deleting", "deleted"}),
        billing=None,
    ),
    Kind(
        kind="eip",
        operation="ec2:DescribeAddresses",
        key="Addresses",
        id="AllocationId",
        name="PublicIp",
        billing=None,
    ),
    Kind(
        kind="nat_gateway",
        operation="ec2:DescribeNatGateways",
        key="NatGateways",
        id="NatGatewayId",
        gone=frozenset({"deleted"}),
        billing=frozenset({"pending", "available"}),
    ),
    Kind(
        kind="vpc_endpoint",
        operation="ec2:DescribeVpcEndpoints",
        key="VpcEndpoints",
        id="VpcEndpointId",
        name="ServiceName",
        gone=frozenset({"deleted", "deleting"}),
        billing=None,
    ),
    Kind(
        kind="internet_gateway",
        operation="ec2:DescribeInternetGateways",
        key="InternetGateways",
        id="InternetGatewayId",
    ),
    Kind(
        kind="route_table",
        operation="ec2:DescribeRouteTables",
        key="RouteTables",
        id="RouteTableId",
    ),
    Kind(kind="subnet", operation="ec2:DescribeSubnets", key="Subnets", id="SubnetId"),
    Kind(
        kind="security_group_rule",
        operation="ec2:DescribeSecurityGroupRules",
        key="SecurityGroupRules",
        id="SecurityGroupRuleId",
        name="Description",
    ),
    Kind(
        kind="security_group",
        operation="ec2:DescribeSecurityGroups",
        key="SecurityGroups",
        id="GroupId",
        name="GroupName",
    ),
    Kind(kind="vpc", operation="ec2:DescribeVpcs", key="Vpcs", id="VpcId"),
    Kind(
        kind="placement_group",
        operation="ec2:DescribePlacementGroups",
        key="PlacementGroups",
        id="GroupName",
        name="GroupName",
        gone=frozenset({"deleting", "deleted"}),
    ),
    Kind(
        kind="launch_template",
        operation="ec2:DescribeLaunchTemplates",
        key="LaunchTemplates",
        id="LaunchTemplateId",
        name="LaunchTemplateName",
    ),
    Kind(
        kind="key_pair",
        operation="ec2:DescribeKeyPairs",
        key="KeyPairs",
        id="KeyName",
        name="KeyName",
    ),
    Kind(
        kind="ec2_capacity_reservation",
        operation="ec2:DescribeCapacityReservations",
        key="CapacityReservations",
        id="CapacityReservationId",
        gone=frozenset({"cancelled", "expired", "failed", "payment-failed", "unsupported"}),
        billing=frozenset({"active", "delayed", "pending"}),
    ),
)


def find(aws: Aws, cluster: str, cluster_id: str | None = None) -> tuple[Leftover, ...]:
    """What is there of a cluster, what bills first.

    Args:
        aws: the region.
        cluster: its name.
        cluster_id: only what carries this id; without, everything that carries the name.
    Raises AwsError.
    """
    asked = by_tag(ID_TAG, cluster_id) if cluster_id else by_tag(CLUSTER_TAG, cluster)
    with ThreadPoolExecutor(max_workers=8) as pool:
        jobs = [pool.submit(_tagged, aws, kind, asked) for kind in KINDS]
        jobs.append(pool.submit(_iam, aws, cluster))
        listed = [one for job in jobs for one in job.result()]
    ours = [one for one in listed if _is_ours(one, cluster_id)]
    ours += _leaked(aws, ours)
    return tuple(sorted(ours, key=lambda one: (not one.bills, one.kind, one.id)))


def named(aws: Aws, cluster: str, *, vpc_id: str | None = None) -> tuple[Leftover, ...]:
    """What holds a fixed name of the cluster and must be unique, whoever made it.

    Args:
        aws: the region.
        cluster: its name.
        vpc_id: of an existing VPC, in which names of security groups are unique.
    Raises AwsError.
    """
    base = f"kvdeploy-{cluster}"
    templates = [f"{base}-{role}" for role in ("prefill", "decode", "router")]
    asked: dict[str, list[dict[str, Any]]] = {
        "launch_template": filters(launch_template_name=templates),
        "placement_group": filters(group_name=base),
        "key_pair": filters(key_name=base),
    }
    groups = [f"{base}-{name}" for name in ("fabric", "router", "endpoints")]
    if vpc_id:
        asked["security_group"] = filters(group_name=groups, vpc_id=vpc_id)
    found_there = [
        one
        for kind in KINDS
        if kind.kind in asked
        for one in _tagged(aws, kind, asked[kind.kind])
        if {one.id, one.name} & {base, *templates, *groups}
    ]
    return (*found_there, *_iam(aws, cluster))


def iam_name(cluster: str, region: str) -> str:
    """Of the cluster's role and instance profile."""
    return f"kvdeploy-{cluster}-{region}"


def _is_ours(one: Leftover, cluster_id: str | None) -> bool:
    return bool(one.cluster_id) and cluster_id in {None, one.cluster_id}


def _tagged(aws: Aws, kind: Kind, asked: list[dict[str, Any]]) -> list[Leftover]:
    described: Iterable[dict[str, Any]] = aws.all(kind.operation, kind.key, Filters=asked)
    if kind.kind == "instance":
        described = [one for group in described for one in group["Instances"]]
    return [made for one in described if (made := _leftover(kind, one)) is not None]


def _leftover(kind: Kind, one: dict[str, Any]) -> Leftover | None:
    state = one.get(kind.state) or ""
    if isinstance(state, dict):
        state = state["Name"]
    state = str(state).lower()
    if state in kind.gone:
        return None
    tags = tags_of(one)
    bills = kind.billing is None or state in kind.billing
    if one.get("VpcEndpointType") == "Gateway" or one.get("ReservationType") == "capacity-block":
        bills = False  # the one is free, the other paid up front
    name = kind.kind
    if name == "security_group_rule":
        direction = "egress" if one.get("IsEgress") else "ingress"
        name = f"vpc_security_group_{direction}_rule"
    if name == "security_group" and one["GroupName"] == "default":
        name = "default_security_group"  # goes with its VPC alone
    return Leftover(
        kind=name,
        id=one[kind.id],
        name=str(one.get(kind.name) or tags.get("Name", "")),
        cluster_id=tags.get(ID_TAG, ""),
        address=tags.get(ADDRESS_TAG, ""),
        state=state,
        bills=bills,
    )


def _leaked(aws: Aws, ours: Iterable[Leftover]) -> list[Leftover]:
    """Interfaces without tags in a group of ours: what an instance left when it ended."""
    owners = {one.id: one.cluster_id for one in ours if one.kind == "security_group"}
    known = {one.id for one in ours}
    if not owners:
        return []
    (kind,) = (k for k in KINDS if k.kind == "network_interface")
    described = found(aws, kind.operation, kind.key, Filters=filters(group_id=sorted(owners)))
    leaked = []
    for one in described:
        owner = next((owners[g["GroupId"]] for g in one["Groups"] if g["GroupId"] in owners), None)
        if owner is None or one.get("RequesterManaged") or one[kind.id] in known:
            continue
        if tags_of(one).get(ID_TAG, owner) != owner:
            continue
        made = _leftover(kind, one)
        if made:
            leaked.append(made.model_copy(update={"cluster_id": owner}))
    return leaked


def _iam(aws: Aws, cluster: str) -> list[Leftover]:
    """The role and the instance profile by their fixed name."""
    name = iam_name(cluster, aws.region)

    def ask(kind: str, operation: str, key: str, **asked: str) -> list[Leftover]:
        try:
            tags = tags_of(aws.call(operation, **asked)[key])
        except AwsError as e:
            if is_missing(e):
                return []
            raise
        return [
            Leftover(
                kind=kind,
                id=name,
                name=name,
                cluster_id=tags.get(ID_TAG, ""),
                address=tags.get(ADDRESS_TAG, ""),
            )
        ]

    asks: tuple[Callable[[], list[Leftover]], ...] = (
        lambda: ask("iam_role", "iam:GetRole", "Role", RoleName=name),
        lambda: ask(
            "iam_instance_profile",
            "iam:GetInstanceProfile",
            "InstanceProfile",
            InstanceProfileName=name,
        ),
    )
    return [one for it in asks for one in it()]
