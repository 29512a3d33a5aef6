from __future__ import annotations

import copy
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.model.awsfacts import (
    AwsFacts,
    Identity,
    Image,
    ModelFiles,
    PlacementGroup,
    Quota,
    Refusal,
    Reservation,
    SecurityGroup,
    StateBucket,
    Subnet,
    Versions,
    Vpc,
)
from kvdeploy.model.catalog import IMAGE_PARAMETERS
from kvdeploy.model.infra import Leftover
from kvdeploy.model.prices import Price, listed, quota_class, spot_key
from kvdeploy.model.reports import Finding, Severity
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.aws_access_checks import ACCESS_CHECKS
from kvdeploy.planning.aws_checks import AWS_CHECKS, check_aws
from kvdeploy.planning.aws_spec_checks import AWS_SPEC_CHECKS
from kvdeploy.planning.checks import check_spec, known_ids
from kvdeploy.planning.cost import ENDPOINTS, ROUTER_VOLUME_GIB
from kvdeploy.planning.findings import check_id

INFRA = Path(__file__).parents[2] / "infra"
ERROR, WARNING = Severity.ERROR, Severity.WARNING
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
AWS: dict[str, Any] = {
    "target": "aws",
    "model.id": "meta-llama/Llama-3.3-70B-Instruct",
    "aws.region": "us-west-2",
    "aws.zone": "us-west-2a",
}
SSH = {"aws.access.method": "ssh", "aws.access.key_name": "ops"} | {
    "aws.access.ssh_cidrs": ["192.0.2.0/24"],
    "aws.access.bastion": "ops@192.0.2.7",
}
EXISTING = {
    "aws.network.vpc_id": "vpc-1",
    "aws.network.subnet_id": "subnet-1",
    "aws.network.security_group_id": "sg-1",
}
ODCR = {"aws.capacity.kind": "odcr", "aws.capacity.reservation_id": "cr-1"}
BLOCK = {"aws.capacity.kind": "capacity-block", "aws.capacity.reservation_id": "cr-1"}
SPOT = {"aws.capacity.kind": "spot"}
BY_TAGS = {"aws.capacity.kind": "odcr", "aws.capacity.reservation_tags": {"team": "kv"}}
S3 = {"model.id": "s3://models/llama"}
WIDE = {"fleet.prefill.tensor_parallel": 2, "fleet.decode.tensor_parallel": 2}
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def spec(values: dict[str, Any] | None = None) -> ClusterSpec:
    """A cluster on AWS with values at dotted paths."""
    top: dict[str, Any] = {"name": "demo"}
    for path, value in (AWS | (values or {})).items():
        *parents, last = path.split(".")
        level = top
        for part in parents:
            level = level.setdefault(part, {})
        level[last] = copy.deepcopy(value)
    return ClusterSpec.model_validate(top)


def quota(code: str, limit: float, used: int = 0) -> Quota:
    return Quota(code=code, name=f"quota {code}", limit=limit, used=used)


def image(**over: Any) -> Image:
    good: dict[str, Any] = {
        "id": "ami-1",
        "name": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260901",
        "os": "Ubuntu 24.04",
        "architecture": "x86_64",
        "state": "available",
        "root_device": "/dev/sda1",
    }
    return Image(**(good | over))


def reservation(**over: Any) -> Reservation:
    good: dict[str, Any] = {
        "id": "cr-1",
        "instance_type": "p5en.48xlarge",
        "zone": "us-west-2a",
        "total": 4,
        "available": 4,
        "held": 0,
        "state": "active",
        "kind": "odcr",
    }
    return Reservation(**(good | over))


def block(**over: Any) -> Reservation:
    good: dict[str, Any] = {
        "kind": "capacity-block",
        "start": NOW - timedelta(days=1),
        "end": NOW + timedelta(days=7),
    }
    return reservation(**(good | over))


def subnet(**over: Any) -> Subnet:
    good: dict[str, Any] = {
        "id": "subnet-1",
        "vpc_id": "vpc-1",
        "zone": "us-west-2a",
        "free_addresses": 100,
        "way_out": "nat",
    }
    return Subnet(**(good | over))


def group(**over: Any) -> SecurityGroup:
    good: dict[str, Any] = {
        "id": "sg-1",
        "vpc_id": "vpc-1",
        "all_from_itself": True,
        "all_to_itself": True,
    }
    return SecurityGroup(**(good | over))


def vpc(**over: Any) -> Vpc:
    good: dict[str, Any] = {"id": "vpc-1", "dns_support": True, "dns_hostnames": True}
    return Vpc(**(good | over))


def leftover(kind: str, name: str, cluster_id: str = "") -> Leftover:
    return Leftover(kind=kind, id=name, cluster_id=cluster_id)


def files(**over: Any) -> ModelFiles:
    good: dict[str, Any] = {
        "readable": True,
        "region": "us-west-2",
        "config": LLAMA_70B,
        "weights_bytes": 141 * 10**9,
    }
    return ModelFiles(**(good | over))


def facts(**over: Any) -> AwsFacts:
    """An account in which everything is there."""
    good: dict[str, Any] = {
        "now": NOW,
        "identity": Identity(
            account="123456789012", arn="arn:aws:iam::123456789012:user/ana", user="ana"
        ),
        "versions": Versions(vllm="0.33.0", nixl="1.5.1"),
        "zones": {
            "p5en.48xlarge": frozenset({"us-west-2a", "us-west-2c"}),
            "c7i.2xlarge": frozenset({"us-west-2a"}),
        },
        "vcpus": {"p5en.48xlarge": 192, "c7i.2xlarge": 8},
        "quotas": {
            "L-417A185B": quota("L-417A185B", 768, 384),
            "L-7212CCBC": quota("L-7212CCBC", 768),
            "L-1216C47A": quota("L-1216C47A", 64),
        },
        "image": image(),
        "router_image": image(id="ami-2", name="ubuntu-noble-24.04-amd64-server-20260901"),
        "placement_groups": {
            "ours": PlacementGroup(name="ours", strategy="cluster", state="available"),
            "wide": PlacementGroup(name="wide", strategy="spread", state="available"),
        },
        "prices": listed("us-west-2")
        | {
            spot_key("p5en.48xlarge"): Price(
                usd_hour=27.0, source="spot price in us-west-2a, 2026-11-30"
            )
        },
        "vpc": vpc(),
        "subnet": subnet(),
        "security_group": group(),
        "key_pair_exists": True,
        "reservations": (reservation(),),
        "model": files(),
        "state_bucket": StateBucket(exists=False),
    }
    return AwsFacts(**(good | over))


def told(finding: Finding) -> tuple[str, str, str, str]:
    return finding.check, finding.path, finding.message, finding.hint


# --- against the account ---------------------------------------------------------------------
Case = tuple[dict[str, Any], dict[str, Any], str, Severity, str, str, str]
QUOTA_HINT = (
    "Ask for more, which takes hours to days: aws service-quotas request-service-quota-increase "
    "--service-code ec2 --quota-code {} --desired-value {} --region us-west-2"
)
IMAGE_HINT = "Use an x86-64 image of Ubuntu 22.04 or Ubuntu 24.04, e.g. the Deep Learning Base AMI."
ELSEWHERE = "Images differ from region to region: name one of this region in aws.ami."
CASES: list[Case] = [
    (
        {},
        {
            "refused": (
                Refusal(action="ec2:DescribeImages", question="the image of the GPU nodes"),
                Refusal(action="ec2:DescribeImages", question="the image of the router"),
            )
        },
        "permission-missing",
        WARNING,
        "aws",
        "ec2:DescribeImages is not allowed to ana, so nothing is known about the image of the "
        "GPU nodes and the image of the router",
        "Allow it in the IAM policy of this identity: docs/aws-permissions.md has all of it.",
    ),
    (
        {},
        {"unanswered": {"the placement groups": "ec2:DescribePlacementGroups: InternalError"}},
        "question-unanswered",
        WARNING,
        "aws",
        "AWS gave no answer about the placement groups: ec2:DescribePlacementGroups: InternalError",
        "Run it again; what stays unknown shows when nodes are made.",
    ),
    (
        {"aws.zone": "us-west-2b"},
        {
            "zones": {
                "p5en.48xlarge": frozenset({"us-west-2c", "us-west-2a"}),
                "c7i.2xlarge": frozenset({"us-west-2b"}),
            },
        },
        "type-not-in-zone",
        ERROR,
        "aws.zone",
        "us-west-2b does not offer p5en.48xlarge",
        "Zones that offer it: us-west-2a and us-west-2c.",
    ),
    (
        {},
        {
            "zones": {
                "p5en.48xlarge": frozenset({"us-west-2a"}),
                "c7i.2xlarge": frozenset[str](),
            }
        },
        "type-not-in-zone",
        ERROR,
        "aws.router_instance_type",
        "no zone of us-west-2 offers c7i.2xlarge",
        "Choose another type or another region.",
    ),
    (
        {},
        {
            "quotas": {
                "L-417A185B": quota("L-417A185B", 384, 192),
                "L-1216C47A": quota("L-1216C47A", 64),
            }
        },
        "quota-too-small",
        ERROR,
        "aws.capacity",
        "2 p5en.48xlarge need 384 vCPUs of the quota 'quota L-417A185B' (L-417A185B), which is "
        "384 with 192 in use",
        QUOTA_HINT.format("L-417A185B", 576),
    ),
    (
        {"aws.capacity.kind": "spot"},
        {"quotas": {"L-7212CCBC": quota("L-7212CCBC", 0)}},
        "quota-too-small",
        ERROR,
        "aws.capacity",
        "2 p5en.48xlarge need 384 vCPUs of the quota 'quota L-7212CCBC' (L-7212CCBC), which is 0 "
        "with 0 in use",
        QUOTA_HINT.format("L-7212CCBC", 384),
    ),
    (
        {},
        {"quotas": {"L-1216C47A": quota("L-1216C47A", 5)}},
        "quota-too-small",
        ERROR,
        "aws.router_instance_type",
        "1 c7i.2xlarge need 8 vCPUs of the quota 'quota L-1216C47A' (L-1216C47A), which is 5 "
        "with 0 in use",
        QUOTA_HINT.format("L-1216C47A", 8),
    ),
    (
        SPOT | {"aws.capacity.spot_max_usd": 26.9},
        {},
        "spot-price-too-low",
        ERROR,
        "aws.capacity.spot_max_usd",
        "$26.9 an hour is less than the spot price in us-west-2a, 2026-11-30, $27",
        "Set it to 27 or more, or leave it out: then the on-demand price is the most.",
    ),
    (
        ODCR,
        {"reservations": ()},
        "reservation-not-found",
        ERROR,
        "aws.capacity.reservation_id",
        "cr-1 is not in us-west-2",
        "See 'aws ec2 describe-capacity-reservations'.",
    ),
    (
        BY_TAGS,
        {"reservations": ()},
        "reservation-not-found",
        ERROR,
        "aws.capacity.reservation_tags",
        "no active reservation in us-west-2 has these tags",
        "See 'aws ec2 describe-capacity-reservations'.",
    ),
    (
        BY_TAGS,
        {"reservations": (reservation(id="cr-2"), reservation())},
        "reservation-not-found",
        ERROR,
        "aws.capacity.reservation_tags",
        "2 active reservations have these tags: cr-1 and cr-2",
        "Name one in reservation_id instead, or add a tag that only one has.",
    ),
    (
        ODCR,
        {"reservations": (block(),)},
        "reservation-does-not-fit",
        ERROR,
        "aws.capacity.kind",
        "odcr, and cr-1 is of kind capacity-block",
        "Set it to capacity-block.",
    ),
    (
        ODCR,
        {"reservations": (reservation(instance_type="p5.48xlarge"),)},
        "reservation-does-not-fit",
        ERROR,
        "aws.instance_type",
        "p5en.48xlarge, and cr-1 is for p5.48xlarge",
        "Set it to p5.48xlarge, or name another reservation.",
    ),
    (
        ODCR,
        {"reservations": (reservation(zone="us-west-2c"),)},
        "reservation-does-not-fit",
        ERROR,
        "aws.zone",
        "us-west-2a, and cr-1 is in us-west-2c",
        "Set it to us-west-2c, or name another reservation.",
    ),
    (
        ODCR,
        {"reservations": (reservation(available=0, held=1),)},
        "reservation-does-not-fit",
        ERROR,
        "aws.capacity.reservation_id",
        "cr-1 has room for 1 of its 4 instances, and the cluster needs 2",
        "Ask for at most 1 nodes, end what runs in it, or name another reservation.",
    ),
    (
        ODCR,
        {"reservations": (reservation(state="cancelled"),)},
        "reservation-not-active",
        ERROR,
        "aws.capacity.reservation_id",
        "cr-1 is cancelled",
        "Name one that is active.",
    ),
    (
        BLOCK,
        {"reservations": (block(state="scheduled", start=NOW + timedelta(hours=5)),)},
        "reservation-not-active",
        ERROR,
        "aws.capacity.reservation_id",
        "cr-1 begins at 2026-11-30 17:00 UTC",
        "Run this again then.",
    ),
    (
        BLOCK,
        {"reservations": (block(end=NOW + timedelta(minutes=30)),)},
        "reservation-not-active",
        ERROR,
        "aws.capacity.reservation_id",
        "cr-1 ends at 2026-11-30 12:30 UTC, and EC2 begins to end its instances at 2026-11-30 "
        "12:00 UTC: that is now",
        "Name another Capacity Block.",
    ),
    (
        BLOCK,
        {"reservations": (block(end=NOW + timedelta(hours=6)),)},
        "reservation-not-active",
        WARNING,
        "aws.capacity.reservation_id",
        "cr-1 ends at 2026-11-30 18:00 UTC, and EC2 begins to end its instances at 2026-11-30 "
        "17:30 UTC: in 5.5 hours",
        "Take the cluster down before, or extend the Capacity Block.",
    ),
    (
        ODCR,
        {"reservations": (reservation(placement_group="ours"),)},
        "reservation-in-group",
        ERROR,
        "aws.capacity.placement_group",
        "cr-1 was made in the placement group ours",
        "Set it to ours.",
    ),
    (
        ODCR | {"aws.capacity.placement_group": "create"},
        {},
        "reservation-in-group",
        ERROR,
        "aws.capacity.placement_group",
        "cr-1 was not made in a placement group, and create would not get its capacity",
        "Leave it out, or make the reservation in the group.",
    ),
    (
        {"aws.capacity.placement_group": "theirs"},
        {},
        "placement-group-unusable",
        ERROR,
        "aws.capacity.placement_group",
        "theirs is not in us-west-2",
        "Leave it out, and kvdeploy makes one.",
    ),
    (
        {"aws.capacity.placement_group": "wide"},
        {},
        "placement-group-unusable",
        ERROR,
        "aws.capacity.placement_group",
        "wide is of strategy spread and available; it must be of strategy cluster and available",
        "Leave it out, and kvdeploy makes one.",
    ),
    (
        {},
        {
            "placement_groups": {
                f"g{i}": PlacementGroup(name=f"g{i}", strategy="cluster", state="available")
                for i in range(500)
            }
        },
        "placement-groups-used-up",
        ERROR,
        "aws.capacity.placement_group",
        "us-west-2 has 500 placement groups, and 500 are allowed",
        "Delete some, or name an existing cluster group here.",
    ),
    (
        {"aws.ami": "ami-9"},
        {"image": None, "image_missing": True},
        "image-unusable",
        ERROR,
        "aws.ami",
        "ami-9 is not in us-west-2, or not shared with this account",
        ELSEWHERE,
    ),
    (
        {},
        {"router_image": None, "router_image_missing": True},
        "image-unusable",
        ERROR,
        "aws.router_ami",
        "the image that /aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/"
        "ebs-gp3/ami-id names is not in us-west-2, or not shared with this account",
        "Images differ from region to region: name one of this region in aws.router_ami.",
    ),
    (
        {},
        {"image": image(state="pending")},
        "image-unusable",
        ERROR,
        "aws.ami",
        "ami-1 is pending, not available",
        IMAGE_HINT,
    ),
    (
        {},
        {"image": image(architecture="arm64")},
        "image-unusable",
        ERROR,
        "aws.ami",
        "ami-1 is for arm64, not x86_64",
        IMAGE_HINT,
    ),
    (
        {},
        {"image": image(os="Amazon Linux 2023")},
        "image-unusable",
        ERROR,
        "aws.ami",
        "ami-1 is Amazon Linux 2023, which kvdeploy cannot set up",
        IMAGE_HINT,
    ),
    (
        {},
        {"image": image(os="", name="golden-7")},
        "image-unusable",
        WARNING,
        "aws.ami",
        "the name of ami-1, 'golden-7', does not say which system it is",
        IMAGE_HINT,
    ),
    (
        {},
        {"same_name": tuple(leftover("instance", f"i-{i}", "beef") for i in range(7))},
        "name-taken",
        ERROR,
        "name",
        "demo is another cluster in us-west-2 already (kvdeploy:id beef): instance i-0, instance "
        "i-1, instance i-2, instance i-3, instance i-4 and 2 more",
        "Choose another name; or, if that one is yours and what was known of it here is lost, end "
        "it with 'kvdeploy down', or take it over with 'kvdeploy up --adopt beef'.",
    ),
    (
        {},
        {"same_name": (leftover("key_pair", "kvdeploy-demo"),)},
        "name-taken",
        ERROR,
        "name",
        "names that demo needs are taken by what kvdeploy did not make: key_pair kvdeploy-demo",
        "Choose another name, or delete them.",
    ),
    (
        {"aws.budget_usd": 1000},
        {},
        "budget-too-small",
        WARNING,
        "aws.budget_usd",
        "$1000 are spent after 7.9 hours at $127.18 an hour",
        "A day is $3052. Nothing ends by itself when it is spent.",
    ),
    (
        EXISTING,
        {"vpc": None, "vpc_missing": True},
        "vpc-unusable",
        ERROR,
        "aws.network.vpc_id",
        "vpc-1 is not in us-west-2",
        "See 'aws ec2 describe-vpcs'.",
    ),
    (
        EXISTING,
        {"vpc": vpc(dns_support=False)},
        "vpc-unusable",
        ERROR,
        "aws.network.vpc_id",
        "vpc-1 has DNS support switched off",
        "aws ec2 modify-vpc-attribute --vpc-id vpc-1 --enable-dns-support",
    ),
    (
        EXISTING,
        {"vpc": vpc(dns_hostnames=False, services=frozenset({"ssm"}))},
        "vpc-unusable",
        WARNING,
        "aws.network.vpc_id",
        "vpc-1 has DNS hostnames switched off, and its endpoints have no private names",
        "aws ec2 modify-vpc-attribute --vpc-id vpc-1 --enable-dns-hostnames",
    ),
    (
        EXISTING,
        {"subnet": None, "subnet_missing": True},
        "subnet-unusable",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 is not in us-west-2",
        "See 'aws ec2 describe-subnets'.",
    ),
    (
        EXISTING,
        {"subnet": subnet(vpc_id="vpc-2")},
        "subnet-unusable",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 is in vpc-2, not in vpc-1",
        "Set aws.network.vpc_id to vpc-2, or name a subnet of vpc-1.",
    ),
    (
        EXISTING,
        {"subnet": subnet(zone="us-west-2c")},
        "subnet-unusable",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 is in us-west-2c, not in us-west-2a",
        "Set aws.zone to us-west-2c, or name a subnet in us-west-2a.",
    ),
    (
        EXISTING,
        {"subnet": subnet(way_out="internet-gateway")},
        "subnet-unusable",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 is public: its way out is an Internet gateway, which the nodes cannot use, for "
        "they have no public addresses",
        "Name a private subnet, with a NAT gateway or with endpoints.",
    ),
    (
        EXISTING,
        {"subnet": subnet(free_addresses=1), "held_nodes": 1},
        "addresses-too-few",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 has 1 free addresses, and the cluster needs 2, one a node",
        "Name a larger subnet.",
    ),
    (
        EXISTING,
        {"security_group": None, "security_group_missing": True},
        "security-group-unusable",
        ERROR,
        "aws.network.security_group_id",
        "sg-1 is not in us-west-2",
        "See 'aws ec2 describe-security-groups'.",
    ),
    (
        EXISTING,
        {"security_group": group(vpc_id="vpc-2")},
        "security-group-unusable",
        ERROR,
        "aws.network.security_group_id",
        "sg-1 is in vpc-2, not in vpc-1",
        "Name a group of vpc-1, or leave it out.",
    ),
    (
        EXISTING,
        {"security_group": group(all_from_itself=False)},
        "security-group-unusable",
        ERROR,
        "aws.network.security_group_id",
        "sg-1 does not allow all traffic from itself, and EFA needs it; a rule for 0.0.0.0/0 is "
        "not enough",
        "aws ec2 authorize-security-group-ingress --group-id sg-1 --ip-permissions "
        "'IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-1}]'",
    ),
    (
        EXISTING,
        {"security_group": group(all_to_itself=False)},
        "security-group-unusable",
        ERROR,
        "aws.network.security_group_id",
        "sg-1 does not allow all traffic to itself, and EFA needs it; a rule for 0.0.0.0/0 is "
        "not enough",
        "aws ec2 authorize-security-group-egress --group-id sg-1 --ip-permissions "
        "'IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-1}]'",
    ),
    (
        EXISTING | S3 | WIDE,
        {"subnet": subnet(way_out="none"), "vpc": vpc(services=frozenset({"ssm"}))},
        "existing-network-closed",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 has no way out and vpc-1 no endpoint for ssmmessages: SSM could not reach the "
        "nodes",
        "Add a NAT gateway or the endpoints.",
    ),
    (
        EXISTING,
        {
            "subnet": subnet(way_out="none"),
            "vpc": vpc(services=frozenset({"ssm", "ssmmessages"})),
        },
        "existing-network-closed",
        ERROR,
        "aws.network.subnet_id",
        "subnet-1 has no way out, and meta-llama/Llama-3.3-70B-Instruct is fetched from a hub "
        "over the Internet",
        "Add a NAT gateway, or put the model into S3 and name it s3://BUCKET/KEY.",
    ),
    (
        SSH,
        {"key_pair_exists": False},
        "key-pair-missing",
        ERROR,
        "aws.access.key_name",
        "ops is no key pair in us-west-2",
        "See 'aws ec2 describe-key-pairs', or name a public key file in "
        "aws.access.public_key_file.",
    ),
    (
        {"state.bucket": "states"},
        {"state_bucket": StateBucket(exists=True, ours=False)},
        "state-bucket-unusable",
        ERROR,
        "state.bucket",
        "states is another account's, or this identity may not see it",
        "Choose another name: bucket names are shared by all accounts.",
    ),
    (
        {"state.bucket": "states"},
        {"state_bucket": StateBucket(exists=True, region="eu-west-1")},
        "state-bucket-unusable",
        ERROR,
        "state.bucket",
        "states is in eu-west-1, and the cluster in us-west-2",
        "Name one in the cluster's region; kvdeploy makes it.",
    ),
    (
        S3,
        {"model": ModelFiles(readable=False)},
        "model-not-readable",
        ERROR,
        "model.id",
        "s3://models/llama has no config.json that can be read",
        "See 'aws s3 ls s3://models/llama/'.",
    ),
    (
        S3 | WIDE,
        {"model": files(config=None)},
        "model-not-readable",
        ERROR,
        "model.id",
        "the config.json of s3://models/llama is no JSON object",
        "Copy it anew.",
    ),
    (
        S3 | WIDE,
        {"model": files(weights_bytes=0)},
        "model-not-readable",
        ERROR,
        "model.id",
        "s3://models/llama has no files of weights beside its config.json",
        "Copy them there, or set model.load_format to dummy for timing alone.",
    ),
    (
        S3 | WIDE,
        {"model": files(region="us-east-1")},
        "model-far-away",
        WARNING,
        "model.id",
        "the bucket is in us-east-1, and the cluster in us-west-2: fetching is slow, and AWS "
        "charges for traffic between regions",
        "Copy the model into a bucket in us-west-2.",
    ),
    (
        S3 | {"fleet.decode.tensor_parallel": 8, "fleet.prefill.tensor_parallel": 8},
        {"model": files(config=LLAMA_70B | {"num_attention_heads": 20})},
        "heads-not-divisible",
        ERROR,
        "fleet.prefill.tensor_parallel",
        "8 does not divide the model's 20 attention heads",
        "Use one of 1, 2, 4.",
    ),
    (
        S3 | {"fleet.decode.tensor_parallel": 8},
        {},
        "model-too-large",
        ERROR,
        "fleet.prefill.tensor_parallel",
        "the weights take 131 GiB, and one GPU has 141 GiB, of which vLLM uses 127",
        "Raise tensor_parallel, or choose a type with more memory.",
    ),
    (
        S3 | WIDE | {"fleet.decode.kv_cache_gib": 160},
        {},
        "model-too-large",
        ERROR,
        "fleet.decode.kv_cache_gib",
        "160 GiB do not fit beside 131 GiB of weights: 2 GPUs have 282 GiB",
        "Leave it out, and vLLM measures what fits beside the weights.",
    ),
    (
        S3
        | {"fleet.prefill.tensor_parallel": 4, "fleet.decode.tensor_parallel": 4}
        | {"fleet.decode.kv_cache_gib": 20, "model.max_length": 131072},
        {},
        "model-too-large",
        ERROR,
        "model.max_length",
        "one prompt of 131072 tokens takes 40.0 GiB of KV cache, and an engine of fleet.decode "
        "has at most 20.0",
        "Lower it, or raise tensor_parallel.",
    ),
    (
        {},
        {"model": None, "versions": Versions(vllm="0.23.1", nixl="1.5.1")},
        "versions-too-old",
        ERROR,
        "connector.mode",
        "push needs vLLM 0.24, and nodes would get 0.23.1",
        "Use a runtime with newer packages.",
    ),
    (
        {},
        {"model": None, "versions": Versions(vllm="0.30.0", nixl="1.5.1")},
        "versions-too-old",
        WARNING,
        "connector.mode",
        "vLLM 0.30.0 pushes wrong blocks when decode holds a part of the prompt; 0.32 does not",
        "Use a runtime with newer packages.",
    ),
    (
        {},
        {"model": None, "versions": Versions(vllm="0.33.0", nixl="1.3.1+cu13")},
        "versions-too-old",
        ERROR,
        "connector.backend",
        "NIXL 1.3.1+cu13 hangs on EFA; 1.3.2 does not",
        "Use a runtime with newer packages.",
    ),
]


def account(values: dict[str, Any], over: dict[str, Any]) -> AwsFacts:
    """Facts as they are gathered: of an existing network and a model only when they are named."""
    unasked: dict[str, Any] = {}
    if "aws.network.vpc_id" not in values:
        unasked |= {"vpc": None, "subnet": None, "security_group": None}
    if not str(values.get("model.id", "")).startswith("s3://"):
        unasked |= {"model": None}
    if values.get("aws.capacity.kind") == "capacity-block":
        unasked |= {"reservations": (block(),)}
    return facts(**(unasked | over))


@pytest.mark.parametrize(
    ("values", "over", "check", "severity", "path", "message", "hint"),
    CASES,
    ids=lambda v: str(v)[:30],
)
def test_a_check_of_the_account_says_what_was_found_and_what_to_do(
    values: dict[str, Any],
    over: dict[str, Any],
    check: str,
    severity: Severity,
    path: str,
    message: str,
    hint: str,
) -> None:
    found = check_aws(spec(values), account(values, over))
    mine = [f for f in found if f.path == path]
    assert [told(f) for f in mine] == [(check, path, message, hint)]
    assert mine[0].severity is severity
    assert {f.check for f in found} == {check}
    assert check_aws(spec(values), account(values, over), allow=frozenset({check})) == []


def test_every_check_of_the_account_has_a_case() -> None:
    assert {check_id(check) for check in AWS_CHECKS} == {case[2] for case in CASES}
    assert {check_id(check) for check in AWS_CHECKS} <= known_ids()


@pytest.mark.parametrize("check", [*AWS_CHECKS, *AWS_SPEC_CHECKS], ids=check_id)
def test_every_check_says_why_it_is_there(check: Any) -> None:
    assert (check.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize(
    "values",
    [
        {},
        SPOT | {"aws.capacity.spot_max_usd": 27},
        ODCR,
        ODCR | {"aws.capacity.placement_group": "none"},
        BLOCK,
        BY_TAGS,
        EXISTING,
        S3 | WIDE,
        S3 | WIDE | {"fleet.decode.data_parallel": 2, "fleet.decode.kv_cache_gib": 200},
        SSH,
        {"aws.capacity.placement_group": "ours"},
        {"aws.budget_usd": 10_000, "state.bucket": "states"},
        {"aws.network.cidr": "10.42.7.0/24"},
        {"fleet.prefill.engine_args": {"pipeline-parallel-size": "two"}},
        {"aws.tags": {f"k{i}": "v" * 256 for i in range(39)} | {"k" * 128: "a b_.:/=+-@1"}},
        {"aws.budget_usd": 1000, "aws.ttl_hours": 4},
    ],
    ids=str,
)
def test_an_account_in_which_everything_is_there_says_nothing(values: dict[str, Any]) -> None:
    assert check_aws(spec(values), account(values, {})) == []
    assert check_spec(spec(values)) == []


def test_reservations_and_blocks_need_no_quota_of_their_own() -> None:
    """A reservation is counted itself, used or not; a Capacity Block never is."""
    none = {"quotas": {"L-417A185B": quota("L-417A185B", 0)}}
    assert check_aws(spec(ODCR), account(ODCR, none)) == []
    assert check_aws(spec(BLOCK), account(BLOCK, none)) == []


def test_our_own_nodes_do_not_stand_in_our_way() -> None:
    """A running cluster is checked again by every `up`."""
    values = ODCR | EXISTING
    full = {
        "reservations": (reservation(available=0, held=2),),
        "subnet": subnet(free_addresses=0),
        "held_nodes": 3,
        "held_ids": frozenset({"beef"}),
        "same_name": (
            leftover("instance", "i-1", "beef"),
            leftover("key_pair", "kvdeploy-demo", "beef"),
        ),
    }
    assert check_aws(spec(values), account(values, full)) == []


def test_what_could_not_be_asked_is_not_judged() -> None:
    unknown = AwsFacts(now=NOW, identity=facts().identity)
    assert check_aws(spec(ODCR | EXISTING | SSH), unknown) == []


def test_another_target_has_nothing_to_do_with_aws() -> None:
    local = ClusterSpec.model_validate({"name": "demo"})
    assert check_aws(local, facts(zones={"p5en.48xlarge": frozenset()})) == []


def test_everything_that_is_wrong_is_said_at_once_worst_first() -> None:
    values = EXISTING | S3
    over = {
        "subnet": subnet(zone="us-west-2c", way_out="internet-gateway", free_addresses=0),
        "security_group": group(all_from_itself=False, all_to_itself=False),
        "model": ModelFiles(readable=False),
        "refused": (Refusal(action="ec2:DescribeVpcs", question="the VPC"),),
        "image": image(architecture="arm64", state="failed"),
    }
    found = check_aws(spec(values), account(values, over))
    assert len(found) == 9
    assert [f.severity for f in found] == [ERROR] * 8 + [WARNING]


def test_weights_are_counted_from_the_configuration_when_there_are_no_files() -> None:
    """Llama-3.3-70B has 70.55e9 parameters of 2 bytes."""
    values = S3 | {"model.load_format": "dummy", "fleet.decode.tensor_parallel": 8}
    (finding,) = check_aws(spec(values), account(values, {"model": files(weights_bytes=0)}))
    assert finding.message == (
        "the weights take 131 GiB, and one GPU has 141 GiB, of which vLLM uses 127"
    )
    quantized = files(weights_bytes=0, config=LLAMA_70B | {"quantization_config": {}})
    assert check_aws(spec(values), account(values, {"model": quantized})) == []


FULL = {
    "placement_groups": {
        f"g{i}": PlacementGroup(name=f"g{i}", strategy="cluster", state="available")
        for i in range(500)
    }
}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, True),
        (SPOT, True),
        ({"aws.capacity.placement_group": "create"}, True),
        ({"aws.capacity.placement_group": "none"}, False),
        ({"aws.capacity.placement_group": "g7"}, False),
        (ODCR, False),
        (BLOCK, False),
        ({"name": "demo-7"}, True),
    ],
    ids=str,
)
def test_only_a_group_that_would_be_made_needs_room(values: dict[str, Any], says: bool) -> None:  # noqa: FBT001
    found = check_aws(spec(values), account(values, FULL))
    assert bool(found) is says
    name = f"kvdeploy-{values.get('name', 'demo')}"
    own = {name: PlacementGroup(name=name, strategy="cluster", state="available")}
    ours = {"placement_groups": FULL["placement_groups"] | own}
    assert check_aws(spec(values), account(values, ours)) == []


def test_engine_args_that_change_memory_are_heeded() -> None:
    tight = S3 | {"fleet.prefill.tensor_parallel": 2, "fleet.decode.tensor_parallel": 2}
    more = {"fleet.prefill.engine_args": {"gpu_memory_utilization": 0.4, "max-num-seqs": 8}}
    (finding,) = check_aws(spec(tight | more), account(tight | more, {}))
    assert finding.message == (
        "the weights take 131 GiB, and 2 GPUs have 282 GiB, of which vLLM uses 113"
    )
    long = tight | {"model.max_length": 450_000}
    assert [f.path for f in check_aws(spec(long), account(long, {}))] == ["model.max_length"] * 2
    half = {"fleet.decode.engine_args": {"kv-cache-dtype": "fp8"}}
    half |= {"fleet.prefill.engine_args": {"--kv_cache_dtype": "fp8"}}
    assert check_aws(spec(long | half), account(long, {})) == []


def test_a_model_is_not_weighed_against_a_type_that_is_not_known() -> None:
    values = S3 | {"aws.instance_type": "p9.48xlarge"}
    zones = {"zones": None}
    assert check_aws(spec(values), account(values, zones)) == []


def test_the_oldest_good_versions_are_good() -> None:
    oldest = {"versions": Versions(vllm="0.32", nixl="1.3.2")}
    assert check_aws(spec(), account({}, oldest)) == []
    odd = {"versions": Versions(vllm="main", nixl="")}
    assert check_aws(spec(), account({}, odd)) == []
    pull = {"connector.mode": "pull"}
    old = {"versions": Versions(vllm="0.20.0", nixl="1.5.1")}
    assert check_aws(spec(pull), account(pull, old)) == []


def test_what_infra_makes_is_what_is_checked_and_counted() -> None:
    """Images that are looked for and volumes and endpoints that are paid for."""
    variables = (INFRA / "variables.tf").read_text(encoding="utf-8")
    for name, parameter in IMAGE_PARAMETERS.items():
        assert f"{name}_parameter " in variables
        assert f'"{parameter}"' in variables
    assert f"root_volume_gib = optional(number, {ROUTER_VOLUME_GIB})" in variables
    text = (INFRA / "modules/network/endpoints.tf").read_text(encoding="utf-8")
    (services,) = re.findall(r"toset\(\[(\"ssm\".*?)\]\)", text)
    assert len(services.split(",")) == ENDPOINTS


@pytest.mark.parametrize(
    ("name", "on_demand"),
    [
        ("p5en.48xlarge", "L-417A185B"),
        ("g6.8xlarge", "L-DB2E81BA"),
        ("gr6.4xlarge", "L-DB2E81BA"),
        ("c7i.2xlarge", "L-1216C47A"),
        ("im4gn.large", "L-1216C47A"),
        ("hpc7a.96xlarge", None),
    ],
)
def test_a_type_has_the_quota_of_its_family(name: str, on_demand: str | None) -> None:
    known = quota_class(name)
    assert (known.on_demand if known else None) == on_demand


# --- the file alone --------------------------------------------------------------------------
SPEC_CASES: list[tuple[dict[str, Any], str, Severity, str, str, str]] = [
    (
        {"aws.instance_type": "p5en.48large"},
        "instance-type-unknown",
        ERROR,
        "aws.instance_type",
        "p5en.48large has no profile in kvdeploy",
        "Known: g6.8xlarge, p5.48xlarge, p5.4xlarge, p5e.48xlarge, p5en.48xlarge. Did you mean "
        "p5en.48xlarge?",
    ),
    (
        {"fleet.decode.tensor_parallel": 6},
        "tensor-parallel-does-not-divide-node",
        ERROR,
        "fleet.decode.tensor_parallel",
        "6 does not divide the 8 GPUs of one p5en.48xlarge",
        "Use one of 1, 2, 4, 8.",
    ),
    (
        {"fleet.decode.tensor_parallel": 4, "fleet.decode.data_parallel": 4},
        "engine-larger-than-nodes",
        ERROR,
        "fleet.decode.data_parallel",
        "4 x tensor_parallel 4 needs 16 GPUs, and one p5en.48xlarge has 8",
        "Set it to at most 2, or raise nodes_per_instance.",
    ),
    (
        {
            "fleet.prefill.tensor_parallel": 8,
            "fleet.decode.tensor_parallel": 8,
            "fleet.prefill.engine_args": {"pipeline_parallel_size": 2},
        },
        "engine-larger-than-nodes",
        ERROR,
        "fleet.prefill.data_parallel",
        "1 x tensor_parallel 8 x pipeline-parallel-size 2 needs 16 GPUs, and one p5en.48xlarge "
        "has 8",
        "Split it into fewer parts, or raise nodes_per_instance.",
    ),
    (
        {"aws.zone": "us-east-2b"},
        "zone-outside-region",
        ERROR,
        "aws.zone",
        "us-east-2b is not in us-west-2",
        "Use a zone such as us-west-2b.",
    ),
    (
        {"connector.backend": "UCX"},
        "ucx-on-aws",
        WARNING,
        "connector.backend",
        "UCX does not use EFA: KV blocks would travel over TCP",
        "Use auto or LIBFABRIC.",
    ),
    (
        {"runtime.python": "/opt/vllm/bin/python"},
        "runtime-python-on-aws",
        ERROR,
        "runtime.python",
        "/opt/vllm/bin/python is an interpreter of this machine, and nodes build their own from "
        "kvdeploy's lock",
        "Leave it out.",
    ),
    (
        {"runtime.device": "cpu"},
        "cpu-on-aws",
        ERROR,
        "runtime.device",
        "cpu, and p5en.48xlarge is paid for its GPUs",
        "Set it to auto. Engines on CPUs are for rehearsals (aws.endpoint).",
    ),
    (
        {"aws.endpoint": "http://127.0.0.1:5000"},
        "ssm-in-a-rehearsal",
        ERROR,
        "aws.access.method",
        "ssm, and http://127.0.0.1:5000 is a double of AWS, which has no Session Manager: nobody "
        "would reach the nodes",
        "Set it to ssh, and ssh_cidrs to a range that holds this machine.",
    ),
    (
        {"router.port": 22},
        "router-on-ssh-port",
        ERROR,
        "router.port",
        "22 is where the SSH server of the router's node listens",
        "Use e.g. 8000.",
    ),
    (
        {"aws.capacity.kind": "odcr"},
        "reservation-missing",
        ERROR,
        "aws.capacity.reservation_id",
        "odcr needs the id of the reservation",
        "Set it to cr-..., as 'aws ec2 describe-capacity-reservations' shows it.",
    ),
    (
        ODCR | {"aws.capacity.reservation_tags": {"team": "kv"}},
        "reservation-named-twice",
        ERROR,
        "aws.capacity.reservation_tags",
        "both reservation_id and reservation_tags name a reservation",
        "Keep one of them.",
    ),
    (
        {"aws.capacity.kind": "spot", "aws.capacity.reservation_id": "cr-1"},
        "reservation-not-used",
        ERROR,
        "aws.capacity.reservation_id",
        "names a reservation, and kind spot does not use one",
        "Set aws.capacity.kind to odcr or capacity-block, or leave this out.",
    ),
    (
        {"aws.capacity.spot_max_usd": 30},
        "spot-price-without-spot",
        ERROR,
        "aws.capacity.spot_max_usd",
        "bounds the price of spot, and kind is on-demand",
        "Set aws.capacity.kind to spot, or leave this out.",
    ),
    (
        BLOCK | {"aws.capacity.placement_group": "create"},
        "placement-group-with-block",
        ERROR,
        "aws.capacity.placement_group",
        "create with a Capacity Block, whose instances are close together already",
        "Leave it out.",
    ),
    (
        {"aws.network.vpc_id": "vpc-1"},
        "network-half-given",
        ERROR,
        "aws.network.subnet_id",
        "is missing, and vpc_id is given",
        "Give both for an existing network, or neither for a new one.",
    ),
    (
        {"aws.network.subnet_id": "subnet-1"},
        "network-half-given",
        ERROR,
        "aws.network.vpc_id",
        "is missing, and subnet_id is given",
        "Give both for an existing network, or neither for a new one.",
    ),
    (
        {"aws.network.security_group_id": "sg-1"},
        "network-half-given",
        ERROR,
        "aws.network.security_group_id",
        "belongs to an existing VPC, and a new one would be made",
        "Give vpc_id and subnet_id too, or leave this out.",
    ),
    (
        {"aws.network.cidr": "fd00::/64"},
        "network-cidr-wrong",
        ERROR,
        "aws.network.cidr",
        "'fd00::/64' is not a range of IPv4 addresses",
        "Use e.g. 10.42.0.0/16.",
    ),
    (
        {"aws.network.cidr": "10.42.1.0/16"},
        "network-cidr-wrong",
        ERROR,
        "aws.network.cidr",
        "'10.42.1.0/16' is not the range's own name",
        "Write 10.42.0.0/16.",
    ),
    (
        {"aws.network.cidr": "10.0.0.0/8"},
        "network-cidr-wrong",
        ERROR,
        "aws.network.cidr",
        "10.0.0.0/8 must be from /16 to /24 large",
        "Use e.g. 10.42.0.0/16.",
    ),
    (
        {"aws.network.cidr": "8.8.0.0/16"},
        "network-cidr-wrong",
        ERROR,
        "aws.network.cidr",
        "8.8.0.0/16 is not a range of private addresses",
        "Use e.g. 10.42.0.0/16.",
    ),
    (
        S3 | {"aws.network.egress": "none", "aws.network.endpoints": False},
        "nodes-out-of-reach",
        ERROR,
        "aws.network.endpoints",
        "false, with egress none: SSM could not reach the nodes",
        "Set endpoints to true, or egress to nat.",
    ),
    (
        {"aws.network.egress": "none"},
        "hub-model-without-egress",
        ERROR,
        "aws.network.egress",
        "none, and meta-llama/Llama-3.3-70B-Instruct is fetched from a hub over the Internet",
        "Set it to nat, or put the model into S3 and name it s3://BUCKET/KEY.",
    ),
    (
        SSH | {"aws.access.public_key_file": "~/.ssh/id.pub"},
        "key-named-twice",
        ERROR,
        "aws.access.public_key_file",
        "both key_name and public_key_file name a key",
        "Keep one of them.",
    ),
    (
        SSH | {"aws.access.ssh_cidrs": []},
        "ssh-from-nowhere",
        ERROR,
        "aws.access.ssh_cidrs",
        "is empty, and nobody could reach port 22",
        "Name the range that you, or your bastion, come from.",
    ),
    (
        SSH | {"aws.access.bastion": None},
        "ssh-without-bastion",
        WARNING,
        "aws.access.bastion",
        "is not set, and the nodes have private addresses only: SSH works from inside their "
        "network alone",
        "Set it to user@host, or use method ssm.",
    ),
    (
        SSH | {"aws.access.ssh_cidrs": ["0.0.0.0/0"]},
        "ssh-open-to-everyone",
        ERROR,
        "aws.access.ssh_cidrs[0]",
        "0.0.0.0/0 lets the whole Internet reach port 22",
        "Name your own range, or use method ssm, which needs no open port.",
    ),
    (
        {"aws.access.bastion": "ops@192.0.2.7"},
        "ssh-settings-with-ssm",
        ERROR,
        "aws.access.bastion",
        "is for method ssh, and method is ssm",
        "Leave it out, or set aws.access.method to ssh.",
    ),
    (
        SSH | EXISTING,
        "ssh-rules-of-existing-group",
        ERROR,
        "aws.access.ssh_cidrs",
        "who may reach port 22 is for the rules of sg-1, which kvdeploy does not change",
        "Leave it out, and let the group's own rules allow it.",
    ),
    (
        {"aws.network.allowed_cidrs": ["10.0.0.0/8", "0.0.0.0/1"]},
        "open-to-everyone",
        ERROR,
        "aws.network.allowed_cidrs[1]",
        "0.0.0.0/1 lets the whole Internet reach the router",
        "Name a range, or set aws.network.open_to_internet to true.",
    ),
    (
        {"aws.network.allowed_cidrs": ["::/0"], "aws.network.open_to_internet": True},
        "open-to-everyone",
        WARNING,
        "aws.network.allowed_cidrs[0]",
        "::/0 lets the whole Internet reach the router",
        "Name a range.",
    ),
    (
        {"aws.tags": {f"k{i}": "v" for i in range(41)}},
        "tag-refused",
        ERROR,
        "aws.tags",
        "41 tags, and at most 40 can be put beside kvdeploy's own",
        "Leave some out.",
    ),
    (
        {"aws.tags": {"Kvdeploy:id": "1"}},
        "tag-refused",
        ERROR,
        "aws.tags.Kvdeploy:id",
        "keys that begin with kvdeploy: are taken",
        "Choose another key.",
    ),
    (
        {"aws.tags": {"note": "x" * 257}},
        "tag-refused",
        ERROR,
        "aws.tags.note",
        "its value has 257 letters, and AWS takes 256",
        "Shorten it.",
    ),
    (
        {"aws.tags": {"k" * 129: "v"}},
        "tag-refused",
        ERROR,
        f"aws.tags.{'k' * 128}",
        "its key has 129 letters, and AWS takes 128",
        "Shorten it.",
    ),
    (
        {"aws.tags": {"note": "50%"}},
        "tag-refused",
        ERROR,
        "aws.tags.note",
        "its value has letters that AWS does not take in a tag",
        "Use letters, digits, spaces and _ . : / = + - @.",
    ),
]


@pytest.mark.parametrize(
    ("values", "check", "severity", "path", "message", "hint"),
    SPEC_CASES,
    ids=lambda v: str(v)[:30],
)
def test_a_check_of_the_file_says_where_what_and_what_to_do(
    values: dict[str, Any], check: str, severity: Severity, path: str, message: str, hint: str
) -> None:
    (finding,) = check_spec(spec(values))
    assert told(finding) == (check, path, message, hint)
    assert finding.severity is severity
    assert check_spec(spec(values), allow=frozenset({check})) == []


def test_every_check_of_the_file_has_a_case() -> None:
    assert set(ACCESS_CHECKS) <= set(AWS_SPEC_CHECKS)
    assert {check_id(check) for check in AWS_SPEC_CHECKS} == {case[1] for case in SPEC_CASES}


def test_a_wrong_range_for_ssh_is_named() -> None:
    (finding,) = check_spec(spec(SSH | {"aws.access.ssh_cidrs": ["home"]}))
    assert told(finding) == (
        "cidr-wrong",
        "aws.access.ssh_cidrs[0]",
        "'home' is not a range of addresses",
        "Write e.g. 10.0.0.0/8.",
    )


def test_facts_of_a_field_are_independent() -> None:
    """Every fact that may be unknown has a value that says so."""
    unknown = replace(facts(), zones=None, placement_groups=None, reservations=None, quotas={})
    assert check_aws(spec(), replace(unknown, model=None, subnet=None, vpc=None)) == []
