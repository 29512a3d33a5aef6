"""Checks of an existing network, keys and the state's bucket against what AWS says. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.planning.aws_spec_checks import is_hub_model
from kvdeploy.planning.findings import error, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.reports import Finding
    from kvdeploy.planning.aws_case import AwsCheck, Judged

SSM_SERVICES: Final = frozenset({"ssm", "ssmmessages"})
"""Endpoints without which a node that has no way out cannot be reached by SSM."""
ADDRESSES_A_NODE: Final = 1
"""Card 0 alone has an address: the other cards are efa-only and have none."""


def vpc_unusable(case: Judged) -> Iterator[Finding]:
    """Nodes find everything by name."""
    path, vpc = "aws.network.vpc_id", case.facts.vpc
    if case.facts.vpc_missing:
        yield error(path, f"{case.aws.network.vpc_id} is not in {case.aws.region}", _SEE_VPCS)
    if vpc is None:
        return
    if not vpc.dns_support:
        yield error(
            path,
            f"{vpc.id} has DNS support switched off",
            f"aws ec2 modify-vpc-attribute --vpc-id {vpc.id} --enable-dns-support",
        )
    elif not vpc.dns_hostnames and vpc.services:
        yield warning(
            path,
            f"{vpc.id} has DNS hostnames switched off, and its endpoints have no private names",
            f"aws ec2 modify-vpc-attribute --vpc-id {vpc.id} --enable-dns-hostnames",
        )


def subnet_unusable(case: Judged) -> Iterator[Finding]:
    """EFA does not leave its subnet."""
    path, subnet, net = "aws.network.subnet_id", case.facts.subnet, case.aws.network
    if case.facts.subnet_missing:
        yield error(
            path,
            f"{net.subnet_id} is not in {case.aws.region}",
            "See 'aws ec2 describe-subnets'.",
        )
    if subnet is None:
        return
    if net.vpc_id and subnet.vpc_id != net.vpc_id:
        yield error(
            path,
            f"{subnet.id} is in {subnet.vpc_id}, not in {net.vpc_id}",
            f"Set aws.network.vpc_id to {subnet.vpc_id}, or name a subnet of {net.vpc_id}.",
        )
    if subnet.zone != case.aws.zone:
        yield error(
            path,
            f"{subnet.id} is in {subnet.zone}, not in {case.aws.zone}",
            f"Set aws.zone to {subnet.zone}, or name a subnet in {case.aws.zone}.",
        )
    if subnet.way_out == "internet-gateway":
        yield error(
            path,
            f"{subnet.id} is public: its way out is an Internet gateway, which the nodes cannot "
            "use, for they have no public addresses",
            "Name a private subnet, with a NAT gateway or with endpoints.",
        )


def addresses_too_few(case: Judged) -> Iterator[Finding]:
    """The last instance would fail for want of an address."""
    subnet = case.facts.subnet
    needed = max(0, len(case.nodes) - case.facts.held_nodes) * ADDRESSES_A_NODE
    if subnet and subnet.free_addresses < needed:
        yield error(
            "aws.network.subnet_id",
            f"{subnet.id} has {subnet.free_addresses} free addresses, and the cluster needs "
            f"{needed}, one a node",
            "Name a larger subnet.",
        )


def security_group_unusable(case: Judged) -> Iterator[Finding]:
    """EFA traffic passes only under rules that name the group itself, one for each direction."""
    path, group, net = "aws.network.security_group_id", case.facts.security_group, case.aws.network
    if case.facts.security_group_missing:
        yield error(
            path,
            f"{net.security_group_id} is not in {case.aws.region}",
            "See 'aws ec2 describe-security-groups'.",
        )
    if group is None:
        return
    if net.vpc_id and group.vpc_id != net.vpc_id:
        yield error(
            path,
            f"{group.id} is in {group.vpc_id}, not in {net.vpc_id}",
            f"Name a group of {net.vpc_id}, or leave it out.",
        )
    for allowed, word, verb in (
        (group.all_from_itself, "from", "ingress"),
        (group.all_to_itself, "to", "egress"),
    ):
        if not allowed:
            rule = f"IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group.id}}}]"
            yield error(
                path,
                f"{group.id} does not allow all traffic {word} itself, and EFA needs it; a rule "
                "for 0.0.0.0/0 is not enough",
                f"aws ec2 authorize-security-group-{verb} --group-id {group.id} "
                f"--ip-permissions '{rule}'",
            )


def existing_network_closed(case: Judged) -> Iterator[Finding]:
    """Without a way out there must be another way to whatever nodes need."""
    subnet, vpc = case.facts.subnet, case.facts.vpc
    if subnet is None or subnet.way_out != "none":
        return
    missing = SSM_SERVICES - (vpc.services if vpc else SSM_SERVICES)
    if case.aws.access.method == "ssm" and missing:
        yield error(
            "aws.network.subnet_id",
            f"{subnet.id} has no way out and {subnet.vpc_id} no endpoint for "
            f"{' and '.join(sorted(missing))}: SSM could not reach the nodes",
            "Add a NAT gateway or the endpoints.",
        )
    if is_hub_model(case.spec):
        yield error(
            "aws.network.subnet_id",
            f"{subnet.id} has no way out, and {case.spec.model.id} is fetched from a hub over the "
            "Internet",
            "Add a NAT gateway, or put the model into S3 and name it s3://BUCKET/KEY.",
        )


def key_pair_missing(case: Judged) -> Iterator[Finding]:
    """EC2 refuses a launch with a key pair that it does not know."""
    if case.facts.key_pair_exists is False:
        yield error(
            "aws.access.key_name",
            f"{case.aws.access.key_name} is no key pair in {case.aws.region}",
            "See 'aws ec2 describe-key-pairs', or name a public key file in "
            "aws.access.public_key_file.",
        )


def state_bucket_unusable(case: Judged) -> Iterator[Finding]:
    """A state that cannot be written is a cluster that cannot be taken down."""
    bucket, name = case.facts.state_bucket, case.spec.state.bucket
    if bucket is None or not bucket.exists:  # made by `up`
        return
    if not bucket.ours:
        yield error(
            "state.bucket",
            f"{name} is another account's, or this identity may not see it",
            "Choose another name: bucket names are shared by all accounts.",
        )
    elif bucket.region and bucket.region != case.aws.region:
        yield error(
            "state.bucket",
            f"{name} is in {bucket.region}, and the cluster in {case.aws.region}",
            "Name one in the cluster's region; kvdeploy makes it.",
        )


_SEE_VPCS: Final = "See 'aws ec2 describe-vpcs'."

NETWORK_CHECKS: Final[tuple[AwsCheck, ...]] = (
    vpc_unusable,
    subnet_unusable,
    addresses_too_few,
    security_group_unusable,
    existing_network_closed,
    key_pair_missing,
    state_bucket_unusable,
)
