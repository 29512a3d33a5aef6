"""Nodes: which machines a cluster wants, and which AWS says there are."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final

from kvdeploy.model.base import Stored
from kvdeploy.model.launch import Role

TAG: Final = "kvdeploy:"
CLUSTER_TAG: Final = f"{TAG}cluster"
ID_TAG: Final = f"{TAG}id"
OWNER_TAG: Final = f"{TAG}owner"
EXPIRES_TAG: Final = f"{TAG}expires"
ROLE_TAG: Final = f"{TAG}role"
NODE_TAG: Final = f"{TAG}node"
GENERATION_TAG: Final = f"{TAG}generation"
"""On an instance: a digest of everything whose change replaces it."""
ADDRESS_TAG: Final = f"{TAG}address"
"""A resource's own Terraform address, a key or index after a slash: enough to adopt it by import
when the state that knew it is lost."""


S3: Final = "s3://"


def s3_place(uri: str) -> tuple[str, str]:
    """Bucket and prefix of s3://BUCKET/KEY; the prefix ends with a slash, or is ''."""
    bucket, _, key = uri.removeprefix(S3).partition("/")
    return bucket, f"{key.rstrip('/')}/" if key.rstrip("/") else ""


class Node(Stored):
    """One machine that the cluster wants."""

    name: str
    """e.g. 'decode-0'; also its key in Terraform."""
    role: Role
    instance_type: str


class NodeOutputs(Stored):
    """One machine as Terraform made it."""

    id: str
    role: Role
    private_ip: str
    instance_type: str
    zone: str
    generation: int = 1


class ProvisionOutputs(Stored):
    """What the inventory needs: Terraform's outputs."""

    cluster_id: str
    """Value of the tag kvdeploy:id of everything that was made."""
    nodes: dict[str, NodeOutputs]
    vpc_id: str
    subnet_id: str
    security_group_id: str
    images: dict[str, str]
    """AMI name by role group: node, router."""


class NodeSeen(Stored):
    """One instance as EC2 describes it now."""

    id: str
    node: str
    """Its kvdeploy:node tag; '' without one."""
    role: str
    state: str
    """EC2's: pending, running, shutting-down, terminated, stopping, stopped."""
    instance_type: str
    zone: str
    private_ip: str | None
    launched_at: datetime
    lifecycle: str = "on-demand"
    """on-demand, spot or capacity-block."""
    generation: int = 1
    """The number in its kvdeploy:generation tag."""


class Leftover(Stored):
    """Something in AWS that carries the cluster's tags or its fixed names."""

    kind: str
    """Terraform's type without aws_: instance, network_interface, eip, vpc, iam_role..."""
    id: str
    name: str = ""
    cluster_id: str = ""
    address: str = ""
    """Of the tag kvdeploy:address; '' without one."""
    state: str = ""
    bills: bool = False
    """Whether AWS charges for it by the hour as long as it exists."""


class Action(StrEnum):
    """What a plan does to one resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    DESTROY = "destroy"
    IMPORT = "adopt"


class ResourceChange(Stored):
    """One resource of a plan that will not stay as it is."""

    address: str
    """Terraform's, e.g. module.nodes.aws_instance.this["decode-0"]."""
    kind: str
    """Terraform's type, e.g. aws_instance."""
    action: Action

    @property
    def ends(self) -> bool:
        """Whether what is there now will be gone afterwards."""
        return self.action in {Action.REPLACE, Action.DESTROY}


class ResourceDone(Stored):
    """One resource that an apply finished with."""

    address: str
    action: str
    """Terraform's word: create, update, delete, import."""
    id: str = ""
    seconds: float = 0.0


class Drift(Stored):
    """One resource that is not as the last apply left it, e.g. a stopped instance."""

    address: str
    field: str
    was: str
    now: str


class ManagedResource(Stored):
    """One resource that Terraform's state knows."""

    address: str
    kind: str
    id: str
    tainted: bool = False
    """Whether Terraform was interrupted or failed while it made it, and would make it anew."""


class ClusterIdentity(Stored):
    """What stays the same for as long as the cluster lives: tags of everything that is made."""

    id: str
    """kvdeploy:id, 16 hexadecimal digits: tells apart two clusters of one name."""
    owner: str
    created_at: datetime
