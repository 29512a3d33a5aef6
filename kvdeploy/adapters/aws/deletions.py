"""How each kind of resource is deleted, and in which order.

A deletion answers False when the thing has to stay; it raises AwsError when AWS says no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.aws.network import found

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.infra import Leftover

Deletion = Callable[["Aws", "Leftover", set[str]], bool | None]
"""Given the thing, and the ids of everything that is the cluster's."""


def _instance(aws: Aws, one: Leftover, _: set[str]) -> None:
    aws.call("ec2:TerminateInstances", InstanceIds=[one.id])


def _interface(aws: Aws, one: Leftover, ours: set[str]) -> bool:
    """Detached only from an instance of the cluster: one of a stranger's stays as it is."""
    described = found(
        aws, "ec2:DescribeNetworkInterfaces", "NetworkInterfaces", NetworkInterfaceIds=[one.id]
    )
    for interface in described:
        link = interface.get("Attachment") or {}
        if link and link.get("InstanceId") not in ours:
            return False
        if link.get("DeviceIndex"):  # the first one goes with its instance alone
            aws.call("ec2:DetachNetworkInterface", AttachmentId=link["AttachmentId"], Force=True)
        aws.call("ec2:DeleteNetworkInterface", NetworkInterfaceId=one.id)
    return True


def _address(aws: Aws, one: Leftover, _: set[str]) -> None:
    for address in found(aws, "ec2:DescribeAddresses", "Addresses", AllocationIds=[one.id]):
        if address.get("AssociationId") and not address.get("ServiceManaged"):
            aws.call("ec2:DisassociateAddress", AssociationId=address["AssociationId"])
        aws.call("ec2:ReleaseAddress", AllocationId=one.id)


def _endpoint(aws: Aws, one: Leftover, _: set[str]) -> None:
    aws.call("ec2:DeleteVpcEndpoints", VpcEndpointIds=[one.id])


def _rule(aws: Aws, one: Leftover, _: set[str]) -> None:
    """One rule, of whoever's group."""
    rules = found(
        aws, "ec2:DescribeSecurityGroupRules", "SecurityGroupRules", SecurityGroupRuleIds=[one.id]
    )
    for rule in rules:
        aws.call(
            "ec2:RevokeSecurityGroupEgress"
            if rule["IsEgress"]
            else "ec2:RevokeSecurityGroupIngress",
            GroupId=rule["GroupId"],
            SecurityGroupRuleIds=[one.id],
        )


def _rules(aws: Aws, one: Leftover, _: set[str]) -> None:
    """All rules of a group: two groups that name each other could not be deleted otherwise."""
    for group in found(aws, "ec2:DescribeSecurityGroups", "SecurityGroups", GroupIds=[one.id]):
        for key, operation in (
            ("IpPermissions", "ec2:RevokeSecurityGroupIngress"),
            ("IpPermissionsEgress", "ec2:RevokeSecurityGroupEgress"),
        ):
            if group.get(key):
                aws.call(operation, GroupId=one.id, IpPermissions=group[key])


def _table(aws: Aws, one: Leftover, _: set[str]) -> None:
    for table in found(aws, "ec2:DescribeRouteTables", "RouteTables", RouteTableIds=[one.id]):
        for link in table.get("Associations", []):
            if not link.get("Main"):
                aws.call(
                    "ec2:DisassociateRouteTable", AssociationId=link["RouteTableAssociationId"]
                )
        aws.call("ec2:DeleteRouteTable", RouteTableId=one.id)


def _internet_gateway(aws: Aws, one: Leftover, _: set[str]) -> None:
    gateways = found(
        aws,
        "ec2:DescribeInternetGateways",
        "InternetGateways",
        InternetGatewayIds=[one.id],
    )
    for gateway in gateways:
        for link in gateway.get("Attachments", []):
            aws.call("ec2:DetachInternetGateway", InternetGatewayId=one.id, VpcId=link["VpcId"])
        aws.call("ec2:DeleteInternetGateway", InternetGatewayId=one.id)


def _reservation(aws: Aws, one: Leftover, _: set[str]) -> None:
    aws.call("ec2:CancelCapacityReservation", CapacityReservationId=one.id)


def _profile(aws: Aws, one: Leftover, _: set[str]) -> None:
    profile = aws.call("iam:GetInstanceProfile", InstanceProfileName=one.id)["InstanceProfile"]
    for role in profile["Roles"]:
        aws.call(
            "iam:RemoveRoleFromInstanceProfile",
            InstanceProfileName=one.id,
            RoleName=role["RoleName"],
        )
    aws.call("iam:DeleteInstanceProfile", InstanceProfileName=one.id)


def _role(aws: Aws, one: Leftover, _: set[str]) -> None:
    for policy in aws.all("iam:ListAttachedRolePolicies", "AttachedPolicies", RoleName=one.id):
        aws.call("iam:DetachRolePolicy", RoleName=one.id, PolicyArn=policy["PolicyArn"])
    for name in aws.call("iam:ListRolePolicies", RoleName=one.id)["PolicyNames"]:
        aws.call("iam:DeleteRolePolicy", RoleName=one.id, PolicyName=name)
    aws.call("iam:DeleteRole", RoleName=one.id)


def _by_id(operation: str, parameter: str) -> Deletion:
    def delete(aws: Aws, one: Leftover, _: set[str]) -> None:
        aws.call(operation, **{parameter: one.id})

    return delete


STEPS: Final[tuple[tuple[str, tuple[str, ...], Deletion], ...]] = (
    ("deleting", ("instance",), _instance),
    ("deleting", ("ec2_capacity_reservation",), _reservation),
    ("deleting", ("ebs_volume",), _by_id("ec2:DeleteVolume", "VolumeId")),
    ("deleting", ("nat_gateway",), _by_id("ec2:DeleteNatGateway", "NatGatewayId")),
    ("deleting", ("vpc_endpoint",), _endpoint),
    ("deleting", ("network_interface",), _interface),
    ("deleting", ("eip",), _address),
    ("deleting", ("launch_template",), _by_id("ec2:DeleteLaunchTemplate", "LaunchTemplateId")),
    ("deleting", ("placement_group",), _by_id("ec2:DeletePlacementGroup", "GroupName")),
    ("deleting", ("key_pair",), _by_id("ec2:DeleteKeyPair", "KeyName")),
    ("deleting", ("vpc_security_group_ingress_rule", "vpc_security_group_egress_rule"), _rule),
    ("emptying", ("security_group",), _rules),
    ("deleting", ("security_group",), _by_id("ec2:DeleteSecurityGroup", "GroupId")),
    ("deleting", ("route_table",), _table),
    ("deleting", ("subnet",), _by_id("ec2:DeleteSubnet", "SubnetId")),
    ("deleting", ("internet_gateway",), _internet_gateway),
    ("deleting", ("vpc",), _by_id("ec2:DeleteVpc", "VpcId")),
    ("deleting", ("iam_instance_profile",), _profile),
    ("deleting", ("iam_role",), _role),
)
"""In this order: what is done, to which kinds, and how."""
