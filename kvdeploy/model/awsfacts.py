"""What AWS was found to hold and allow. Gathered by adapters/aws, judged by planning/aws_checks.py.

A field that is None was not asked, for the spec does not need it, or could not be asked: then
`refused` says why. Times are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.infra import Leftover
    from kvdeploy.model.prices import Price

BLOCK_ENDS_EARLY: Final = timedelta(minutes=30)
"""EC2 starts to terminate the instances of a Capacity Block this long before its end."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who AWS says we are."""

    account: str
    arn: str
    user: str
    """Last part of the ARN: a user's name, or a role's session."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A question that this identity may not ask."""

    action: str
    """The IAM action, e.g. 'ec2:DescribeSubnets'."""
    question: str
    """What stays unknown, e.g. 'the subnet'."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """vCPUs that a class of instances may take in the region."""

    code: str
    name: str
    limit: float
    used: int
    """vCPUs of what runs or is reserved, but for the cluster's own nodes."""
    held: int = 0
    """vCPUs of the cluster's own nodes."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An AMI."""

    id: str
    name: str
    os: str
    """'Ubuntu 22.04', 'Amazon Linux 2023'...; '' when its name does not say."""
    architecture: str
    """'x86_64' or 'arm64'."""
    state: str
    root_device: str


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation: ODCR or Capacity Block."""

    id: str
    instance_type: str
    zone: str
    total: int
    available: int
    """Instances that it has room for now."""
    held: int
    """Instances in it that are this cluster's own."""
    state: str
    """EC2's: active, pending, scheduled, expired, cancelled, failed..."""
    kind: Literal["odcr", "capacity-block"]
    start: datetime | None = None
    end: datetime | None = None
    placement_group: str = ""
    """Name of the cluster placement group it was made in; '' for none."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Vpc:
    id: str
    dns_support: bool
    dns_hostnames: bool
    services: frozenset[str] = frozenset()
    """Endpoints in it, without com.amazonaws.REGION: 'ssm', 's3'."""


@dataclass(frozen=True, kw_only=True)
class Subnet:
    id: str
    vpc_id: str
    zone: str
    free_addresses: int
    way_out: Literal["nat", "internet-gateway", "other", "none"]
    """Where its default route leads."""


@dataclass(frozen=True, kw_only=True)
class SecurityGroup:
    id: str
    vpc_id: str
    all_from_itself: bool
    all_to_itself: bool
    """By a rule that names the group: one for 0.0.0.0/0 does not let EFA through."""


@dataclass(frozen=True, kw_only=True)
class PlacementGroup:
    name: str
    strategy: str
    state: str


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The model in S3 or in a local folder."""

    readable: bool
    """Whether config.json could be read."""
    region: str = ""
    """Of the bucket; '' for a folder or when AWS does not say."""
    config: Mapping[str, Any] | None = None
    """config.json, parsed; None when it is no JSON object."""
    weights_bytes: int = 0
    """Sum of the weights' files; 0 when there are none."""


@dataclass(frozen=True, kw_only=True)
class StateBucket:
    """The bucket of Terraform's state."""

    exists: bool
    ours: bool = True
    """Whether this account owns it."""
    region: str = ""
    versioned: bool = False
    blocks_public: bool = False


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Of the packages that the nodes get, in pip's words; '' when not known."""

    vllm: str = ""
    nixl: str = ""


@dataclass(frozen=True, kw_only=True)
class AwsFacts:
    now: datetime
    identity: Identity
    versions: Versions = field(default_factory=Versions)
    refused: tuple[Refusal, ...] = ()
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """What stays unknown -> what AWS said instead of an answer."""
    zones: Mapping[str, frozenset[str]] | None = None
    """Instance type -> zones of the region that offer it."""
    vcpus: Mapping[str, int] = field(default_factory=dict)
    """Instance type -> its vCPUs, for the types that the cluster wants."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By code."""
    image: Image | None = None
    """Of the GPU nodes."""
    image_missing: bool = False
    """Whether AWS says there is no such image; then `image` is None."""
    router_image: Image | None = None
    router_image_missing: bool = False
    reservations: tuple[Reservation, ...] | None = None
    """The one with the id whatever its state, or every active one with the tags."""
    vpc: Vpc | None = None
    vpc_missing: bool = False
    subnet: Subnet | None = None
    subnet_missing: bool = False
    security_group: SecurityGroup | None = None
    security_group_missing: bool = False
    placement_groups: Mapping[str, PlacementGroup] | None = None
    """Every one in the region, by name."""
    key_pair_exists: bool | None = None
    same_name: tuple[Leftover, ...] = ()
    """Resources with the cluster's name or fixed names, its own included."""
    held_nodes: int = 0
    """Nodes of this cluster that exist already."""
    held_ids: frozenset[str] = frozenset()
    """Values of kvdeploy:id that are this cluster's own."""
    model: ModelFiles | None = None
    state_bucket: StateBucket | None = None

    @property
    def reservation(self) -> Reservation | None:
        """The one that is meant; None when none is, or when it is not clear which."""
        found = self.reservations or ()
        return found[0] if len(found) == 1 else None

    prices: Mapping[str, Price] = field(default_factory=dict)
    """Of instance types, spot and the rest: keys as in model/prices.py."""


@dataclass(frozen=True, kw_only=True)
class StateLock:
    """Who holds Terraform's state in S3."""

    id: str
    who: str
    created: str
    """As Terraform wrote it: UTC, ISO 8601."""
