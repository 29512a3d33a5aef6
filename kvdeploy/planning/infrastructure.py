"""The variables of infra/, from the cluster file. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.infra import S3, s3_place
from kvdeploy.planning.nodes import nodes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import ClusterIdentity
    from kvdeploy.model.spec import ClusterSpec

BEFORE_NODES: Final = (
    "module.network",
    "module.access",
    "module.nodes.aws_placement_group.this",
    "module.nodes.aws_launch_template.this",
)
"""What is applied, and saved, before any node: a run that is killed while instances start then
loses nothing but instances, and those are found again by their tags."""


def build_variables(
    spec: ClusterSpec,
    identity: ClusterIdentity,
    *,
    generations: Mapping[str, int],
    reservation_id: str | None = None,
    public_key: str | None = None,
) -> dict[str, Any]:
    """Everything that infra/ is told.

    Args:
        spec: must have an aws section.
        identity: the cluster's tags.
        generations: of nodes that were replaced on purpose; 1 for the others.
        reservation_id: the one that aws.capacity.reservation_tags means.
        public_key: text of aws.access.public_key_file.
    """
    aws = spec.aws
    if aws is None:
        msg = "no aws section"
        raise ValueError(msg)
    nodes = nodes_of(spec)
    return {
        "name": spec.name,
        "cluster_id": identity.id,
        "owner": identity.owner,
        "created_at": _rfc3339(identity.created_at),
        "expires_at": _rfc3339(expires_at(aws, identity)),
        "region": aws.region,
        "zone": aws.zone,
        "tags": dict(aws.tags),
        "network": {
            "vpc_id": aws.network.vpc_id,
            "subnet_id": aws.network.subnet_id,
            "security_group_id": aws.network.security_group_id,
            "cidr": aws.network.cidr,
            "egress": aws.network.egress,
            "endpoints": aws.network.endpoints,
        },
        "router_allowed_cidrs": list(aws.network.allowed_cidrs),
        "open_to_internet": aws.network.open_to_internet,
        "router_port": spec.router.port,
        "access": {
            "method": aws.access.method,
            "key_name": aws.access.key_name,
            "public_key": public_key,
            "ssh_allowed_cidrs": list(aws.access.ssh_cidrs),
        },
        "model_bucket": model_bucket(spec.model.id),
        "capacity": {
            "kind": aws.capacity.kind,
            "reservation_id": aws.capacity.reservation_id or reservation_id,
            "spot_max_price": _price(aws.capacity.spot_max_usd),
            "placement_group": aws.capacity.placement_group,
        },
        "roles": {node.role: _role(node.role, node.instance_type, aws) for node in nodes},
        "nodes": {
            node.name: {"role": node.role, "generation": generations.get(node.name, 1)}
            for node in nodes
        },
        "images": {"node_ami": aws.ami, "router_ami": aws.router_ami},
    }


def expires_at(aws: AwsSpec, identity: ClusterIdentity) -> datetime | None:
    """When the cluster is due to end; None without a ttl."""
    if aws.ttl_hours is None:
        return None
    return identity.created_at + timedelta(hours=aws.ttl_hours)


def model_bucket(model_id: str) -> dict[str, str] | None:
    """Bucket and prefix of a model in S3; None for any other model."""
    if not model_id.startswith(S3):
        return None
    bucket, prefix = s3_place(model_id)
    return {"bucket": bucket, "prefix": prefix}


def _role(role: str, instance_type: str, aws: AwsSpec) -> dict[str, Any]:
    if role == "router":
        return {"instance_type": instance_type}
    return {"instance_type": instance_type, "root_volume_gib": aws.root_volume_gib}


def _price(usd: float | None) -> str | None:
    return None if usd is None else f"{usd:.4f}"


def _rfc3339(when: datetime | None) -> str | None:
    return None if when is None else when.strftime("%Y-%m-%dT%H:%M:%SZ")
