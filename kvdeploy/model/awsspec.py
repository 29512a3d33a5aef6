"""Section `aws` of the cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from kvdeploy.model.base import Change, EngineArg, Frozen, knob

RoleVariable = Annotated[
    str,
    StringConstraints(
        pattern=r"^(base|nvidia|efa|nixl|vllm|model|engine|router|monitoring)_[a-z0-9_]+$"
    ),
]
"""A variable of one of the roles in playbooks/."""


class CapacitySpec(Frozen):
    """Where the GPU instances come from."""

    kind: Literal["on-demand", "odcr", "capacity-block", "spot"] = knob(
        "on-demand", doc="on-demand, odcr, capacity-block, spot", change=Change.REPLACE
    )
    reservation_id: str | None = knob(
        None,
        doc="cr-...: the reservation of odcr or capacity-block",
        change=Change.REPLACE,
        pattern=r"^cr-[0-9a-f]+$",
        examples=["cr-0123456789abcdef0"],
    )
    reservation_tags: dict[str, str] = knob(
        {},
        doc="instead of reservation_id: tags that one active reservation has",
        change=Change.REPLACE,
    )
    placement_group: str | None = knob(
        None,
        doc="create, none or an existing group; default: create for on-demand and spot",
        change=Change.REPLACE,
        min_length=1,
    )
    spot_max_usd: float | None = knob(
        None,
        doc="most to pay for an hour of spot; default: the on-demand price",
        change=Change.REPLACE,
        gt=0,
    )


class NetworkSpec(Frozen):
    """An existing network, or none: then a new one is made."""

    vpc_id: str | None = knob(
        None,
        doc="vpc-... of an existing VPC; default: a new one",
        change=Change.REFUSE,
        pattern=r"^vpc-[0-9a-f]+$",
    )
    subnet_id: str | None = knob(
        None,
        doc="subnet-... of an existing private subnet in zone; default: a new one",
        change=Change.REFUSE,
        pattern=r"^subnet-[0-9a-f]+$",
    )
    security_group_id: str | None = knob(
        None,
        doc="sg-... of an existing EFA security group; default: a new one",
        change=Change.REPLACE,
        pattern=r"^sg-[0-9a-f]+$",
    )
    cidr: str = knob("10.42.0.0/16", doc="addresses of a new VPC, /16 to /24", change=Change.REFUSE)
    allowed_cidrs: tuple[str, ...] = knob((), doc="who may reach the router", change=Change.RELOAD)
    open_to_internet: bool = knob(
        default=False, doc="let allowed_cidrs hold 0.0.0.0/0", change=Change.RELOAD
    )
    egress: Literal["nat", "none"] = knob("nat", doc="nat or none", change=Change.RELOAD)
    endpoints: bool = knob(
        default=True, doc="SSM interface endpoints in a new VPC", change=Change.RELOAD
    )


class AccessSpec(Frozen):
    """How nodes are reached."""

    method: Literal["ssm", "ssh"] = knob("ssm", doc="ssm or ssh", change=Change.RELOAD)
    key_name: str | None = knob(
        None,
        doc="existing EC2 key pair; default: the cluster has a key of its own",
        change=Change.REPLACE,
    )
    public_key_file: str | None = knob(
        None,
        doc="instead of key_name: a public key file to make a key pair of",
        change=Change.REPLACE,
    )
    private_key_file: str | None = knob(
        None,
        doc="the key to log in with; default: public_key_file without .pub, else ssh's own choice",
        change=Change.RELOAD,
    )
    ssh_cidrs: tuple[str, ...] = knob(
        (), doc="who may reach port 22, for ssh", change=Change.RELOAD
    )
    bastion: str | None = knob(None, doc="user@host to go through, for ssh", change=Change.RELOAD)


class AwsSpec(Frozen):
    """What `target: aws` needs."""

    region: str = knob(
        doc="an AWS region",
        change=Change.REFUSE,
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d$",
        examples=["us-west-2"],
    )
    zone: str = knob(
        doc="one availability zone: EFA does not cross zones",
        change=Change.REFUSE,
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$",
        examples=["us-west-2a"],
    )
    instance_type: str = knob("p5en.48xlarge", doc="a type with EFA", change=Change.REPLACE)
    router_instance_type: str = knob(
        "c7i.2xlarge", doc="of the router's own node", change=Change.REPLACE
    )
    capacity: CapacitySpec = knob(
        CapacitySpec(), doc="where the GPU instances come from", change=Change.REPLACE
    )
    network: NetworkSpec = knob(
        NetworkSpec(), doc="an existing network; default: a new one", change=Change.REFUSE
    )
    access: AccessSpec = knob(AccessSpec(), doc="how nodes are reached", change=Change.RELOAD)
    ami: str | None = knob(
        None,
        doc="ami-... of the GPU nodes; default: the newest Deep Learning Base AMI, then kept",
        change=Change.REPLACE,
        pattern=r"^ami-[0-9a-f]+$",
    )
    router_ami: str | None = knob(
        None,
        doc="ami-... of the router's node; default: the newest Ubuntu 24.04, then kept",
        change=Change.REPLACE,
        pattern=r"^ami-[0-9a-f]+$",
    )
    root_volume_gib: int = knob(
        200,
        doc="root volume of a GPU node; weights go to its NVMe",
        change=Change.REPLACE,
        ge=100,
        le=16384,
    )
    tags: dict[str, str] = knob({}, doc="put on everything that is made", change=Change.RELOAD)
    ttl_hours: float | None = knob(
        None, doc="hours after which the cluster is due to end", change=Change.RELOAD, gt=0
    )
    budget_usd: float | None = knob(
        None, doc="dollars this cluster may cost", change=Change.RELOAD, gt=0
    )
    node_variables: dict[RoleVariable, EngineArg] = knob(
        {},
        doc="more variables of the roles in playbooks/, e.g. {efa_url: a mirror of ours}",
        change=Change.RELOAD,
    )
    endpoint: str | None = knob(
        None,
        doc="http://127.0.0.1:PORT of a double of AWS: the cluster is a rehearsal",
        change=Change.REFUSE,
        pattern=r"^http://127\.0\.0\.1:\d+$",
        examples=["http://127.0.0.1:5000"],
    )
