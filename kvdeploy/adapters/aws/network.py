"""An existing network as EC2 describes it: VPC, subnet, security group, key pair.

Each answers None where AWS says that there is no such thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvdeploy.adapters.aws.refusals import code_of
from kvdeploy.adapters.aws.session import filters
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import SecurityGroup, Subnet, Vpc

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws


def found(aws: Aws, operation: str, key: str, **asked: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """What a call lists; [] where AWS says that what was named is not there. Raises AwsError."""
    try:
        return aws.all(operation, key, **asked)
    except AwsError as e:
        if is_missing(e):
            return []
        raise


def is_missing(error: AwsError) -> bool:
    """Whether AWS said that the thing is not there."""
    code = code_of(error)
    return (
        "NotFound" in code
        or ".Unknown" in code
        or code in {"404", "NoSuchEntity", "NoSuchKey", "NoSuchBucket", "NatGatewayNotFound"}
        or code.endswith(".Malformed")
    )


def vpc(aws: Aws, vpc_id: str) -> Vpc | None:
    """A VPC with its DNS settings and endpoints. Raises AwsError."""
    if not found(aws, "ec2:DescribeVpcs", "Vpcs", VpcIds=[vpc_id]):
        return None

    def flag(attribute: str) -> bool:
        answer = aws.call("ec2:DescribeVpcAttribute", VpcId=vpc_id, Attribute=attribute)
        key = attribute[0].upper() + attribute[1:]
        return bool(answer[key]["Value"])

    endpoints = aws.all("ec2:DescribeVpcEndpoints", "VpcEndpoints", Filters=filters(vpc_id=vpc_id))
    prefix = f"com.amazonaws.{aws.region}."
    return Vpc(
        id=vpc_id,
        dns_support=flag("enableDnsSupport"),
        dns_hostnames=flag("enableDnsHostnames"),
        services=frozenset(str(e["ServiceName"]).removeprefix(prefix) for e in endpoints),
    )


def subnet(aws: Aws, subnet_id: str) -> Subnet | None:
    """A subnet and where its default route leads. Raises AwsError."""
    subnets = found(aws, "ec2:DescribeSubnets", "Subnets", SubnetIds=[subnet_id])
    if not subnets:
        return None
    one = subnets[0]
    return Subnet(
        id=subnet_id,
        vpc_id=one["VpcId"],
        zone=one["AvailabilityZone"],
        free_addresses=int(one["AvailableIpAddressCount"]),
        way_out=_way_out(aws, subnet_id, one["VpcId"]),
    )


def security_group(aws: Aws, group_id: str) -> SecurityGroup | None:
    """A security group and whether it lets EFA through. Raises AwsError."""
    groups = found(aws, "ec2:DescribeSecurityGroups", "SecurityGroups", GroupIds=[group_id])
    if not groups:
        return None
    one = groups[0]
    return SecurityGroup(
        id=group_id,
        vpc_id=one["VpcId"],
        all_from_itself=_names(one["IpPermissions"], group_id),
        all_to_itself=_names(one["IpPermissionsEgress"], group_id),
    )


def key_pair_exists(aws: Aws, name: str) -> bool:
    """Whether EC2 has a key pair of that name. Raises AwsError."""
    return bool(found(aws, "ec2:DescribeKeyPairs", "KeyPairs", KeyNames=[name]))


def public_key_of(aws: Aws, name: str) -> str | None:
    """The public key of a key pair; None when there is no such pair. Raises AwsError."""
    wanted = {"KeyNames": [name], "IncludePublicKey": True}
    pairs = found(aws, "ec2:DescribeKeyPairs", "KeyPairs", **wanted)
    return next((str(pair.get("PublicKey", "")).strip() or None for pair in pairs), None)


def _names(rules: list[dict[str, Any]], group_id: str) -> bool:
    """Whether a rule lets all traffic pass between members of the group."""
    return any(
        str(rule["IpProtocol"]) == "-1"
        and any(pair.get("GroupId") == group_id for pair in rule.get("UserIdGroupPairs", []))
        for rule in rules
    )


def _way_out(
    aws: Aws, subnet_id: str, vpc_id: str
) -> Literal["nat", "internet-gateway", "other", "none"]:
    tables = aws.all("ec2:DescribeRouteTables", "RouteTables", Filters=filters(vpc_id=vpc_id))

    def belongs(table: dict[str, Any], *, main: bool) -> bool:
        links = table.get("Associations", [])
        if main:
            return any(link.get("Main") for link in links)
        return any(link.get("SubnetId") == subnet_id for link in links)

    own = [t for t in tables if belongs(t, main=False)]
    table = next(iter(own or [t for t in tables if belongs(t, main=True)]), None)
    default = next(
        (
            route
            for route in (table["Routes"] if table else [])
            if route.get("DestinationCidrBlock") == "0.0.0.0/0"
        ),
        None,
    )
    if default is None or default.get("State") == "blackhole":
        return "none"
    if default.get("NatGatewayId"):
        return "nat"
    return "internet-gateway" if str(default.get("GatewayId")).startswith("igw-") else "other"
