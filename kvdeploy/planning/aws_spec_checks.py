"""Checks of a cluster file for target aws that need nothing of AWS. Pure.

How engines fit on nodes, where capacity comes from, the network. Who gets in, and tags, are in
aws_access_checks.py.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import INSTANCES, InstanceProfile
from kvdeploy.model.wording import did_you_mean
from kvdeploy.planning.aws_access_checks import ACCESS_CHECKS, aws_of
from kvdeploy.planning.findings import error, fleets, warning
from kvdeploy.planning.owned import arg_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec, FleetSpec

RESERVED: Final = ("odcr", "capacity-block")
"""Kinds of capacity that are a reservation."""
SSH_PORT: Final = 22
PLAIN_MODELS: Final = ("s3://", "builtin:", "/", "./", "../", "~")
"""Beginnings of model ids that are no hub ids."""


# --- engines and nodes -----------------------------------------------------------------------
def instance_type_unknown(spec: ClusterSpec) -> Iterator[Finding]:
    """Network cards and GPUs of a type must be known before anything is made."""
    if spec.target == "aws" and spec.aws and spec.aws.instance_type not in INSTANCES:
        known = f"Known: {', '.join(sorted(INSTANCES))}."
        yield error(
            "aws.instance_type",
            f"{spec.aws.instance_type} has no profile in kvdeploy",
            f"{known}{did_you_mean(spec.aws.instance_type, INSTANCES)}",
        )


def tensor_parallel_does_not_divide_node(spec: ClusterSpec) -> Iterator[Finding]:
    """An engine takes whole nodes or an even share of one."""
    profile = _profile(spec)
    if profile is None:
        return
    for path, fleet in fleets(spec):
        gpus = profile.gpus * fleet.nodes_per_instance
        if gpus % fleet.tensor_parallel:
            good = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
            yield error(
                f"{path}.tensor_parallel",
                f"{fleet.tensor_parallel} does not divide the {gpus} GPUs of "
                f"{_nodes(fleet.nodes_per_instance)} {profile.name}",
                f"Use one of {good}.",
            )


def engine_larger_than_nodes(spec: ClusterSpec) -> Iterator[Finding]:
    """All ranks of an engine must find a GPU on its nodes."""
    profile = _profile(spec)
    if profile is None:
        return
    for path, fleet in fleets(spec):
        stages = pipeline_stages(fleet)
        needed = fleet.tensor_parallel * fleet.data_parallel * stages
        found = profile.gpus * fleet.nodes_per_instance
        if needed > found and found % fleet.tensor_parallel == 0:
            split = f" x pipeline-parallel-size {stages}" if stages > 1 else ""
            good = found // (fleet.tensor_parallel * stages)
            yield error(
                f"{path}.data_parallel",
                f"{fleet.data_parallel} x tensor_parallel {fleet.tensor_parallel}{split} needs "
                f"{needed} GPUs, and {_nodes(fleet.nodes_per_instance)} {profile.name} has {found}",
                f"Set it to at most {good}, or raise nodes_per_instance."
                if good
                else "Split it into fewer parts, or raise nodes_per_instance.",
            )


def zone_outside_region(spec: ClusterSpec) -> Iterator[Finding]:
    """A zone's name is its region's and a letter."""
    if spec.target == "aws" and spec.aws and spec.aws.zone[:-1] != spec.aws.region:
        yield error(
            "aws.zone",
            f"{spec.aws.zone} is not in {spec.aws.region}",
            f"Use a zone such as {spec.aws.region}{spec.aws.zone[-1]}.",
        )


def ucx_on_aws(spec: ClusterSpec) -> Iterator[Finding]:
    """UCX does not drive EFA: KV would travel over TCP at a fraction of the speed."""
    if spec.target == "aws" and spec.connector.backend == "UCX":
        yield warning(
            "connector.backend",
            "UCX does not use EFA: KV blocks would travel over TCP",
            "Use auto or LIBFABRIC.",
        )


def runtime_python_on_aws(spec: ClusterSpec) -> Iterator[Finding]:
    """Nodes are new machines: an interpreter of this one is not on them."""
    if spec.target == "aws" and spec.runtime.python is not None:
        yield error(
            "runtime.python",
            f"{spec.runtime.python} is an interpreter of this machine, and nodes build their own "
            "from kvdeploy's lock",
            "Leave it out.",
        )


def cpu_on_aws(spec: ClusterSpec) -> Iterator[Finding]:
    """GPU nodes would be paid for, and their processors used."""
    if spec.target == "aws" and spec.aws and not spec.aws.endpoint and spec.runtime.device == "cpu":
        yield error(
            "runtime.device",
            f"cpu, and {spec.aws.instance_type} is paid for its GPUs",
            "Set it to auto. Engines on CPUs are for rehearsals (aws.endpoint).",
        )


def router_on_ssh_port(spec: ClusterSpec) -> Iterator[Finding]:
    """Every node has an SSH server there already."""
    if spec.target == "aws" and spec.router.port == SSH_PORT:
        yield error(
            "router.port",
            "22 is where the SSH server of the router's node listens",
            "Use e.g. 8000.",
        )


# --- capacity --------------------------------------------------------------------------------
def reservation_missing(spec: ClusterSpec) -> Iterator[Finding]:
    """Reserved capacity is used by whoever names the reservation, and by nobody else."""
    aws = aws_of(spec)
    if aws is None or aws.capacity.kind not in RESERVED:
        return
    if aws.capacity.reservation_id is None and not aws.capacity.reservation_tags:
        yield error(
            "aws.capacity.reservation_id",
            f"{aws.capacity.kind} needs the id of the reservation",
            "Set it to cr-..., as 'aws ec2 describe-capacity-reservations' shows it.",
        )


def reservation_named_twice(spec: ClusterSpec) -> Iterator[Finding]:
    """The id and the tags could mean two reservations."""
    aws = aws_of(spec)
    if aws and aws.capacity.reservation_id and aws.capacity.reservation_tags:
        yield error(
            "aws.capacity.reservation_tags",
            "both reservation_id and reservation_tags name a reservation",
            "Keep one of them.",
        )


def reservation_not_used(spec: ClusterSpec) -> Iterator[Finding]:
    """A reservation that is paid for and not used, or capacity other than what was meant."""
    aws = aws_of(spec)
    if aws is None or aws.capacity.kind in RESERVED:
        return
    for key in ("reservation_id", "reservation_tags"):
        if getattr(aws.capacity, key):
            yield error(
                f"aws.capacity.{key}",
                f"names a reservation, and kind {aws.capacity.kind} does not use one",
                "Set aws.capacity.kind to odcr or capacity-block, or leave this out.",
            )


def spot_price_without_spot(spec: ClusterSpec) -> Iterator[Finding]:
    """Nothing but spot has a price that can be bounded."""
    aws = aws_of(spec)
    if aws and aws.capacity.spot_max_usd is not None and aws.capacity.kind != "spot":
        yield error(
            "aws.capacity.spot_max_usd",
            f"bounds the price of spot, and kind is {aws.capacity.kind}",
            "Set aws.capacity.kind to spot, or leave this out.",
        )


def placement_group_with_block(spec: ClusterSpec) -> Iterator[Finding]:
    """EC2 places a Capacity Block itself, close together, and takes no group with it."""
    aws = aws_of(spec)
    if aws and aws.capacity.kind == "capacity-block":
        group = aws.capacity.placement_group
        if group not in {None, "none"}:
            yield error(
                "aws.capacity.placement_group",
                f"{group} with a Capacity Block, whose instances are close together already",
                "Leave it out.",
            )


# --- network ---------------------------------------------------------------------------------
def network_half_given(spec: ClusterSpec) -> Iterator[Finding]:
    """An existing network is a VPC and a subnet of it; a group is of one VPC."""
    aws = aws_of(spec)
    if aws is None:
        return
    net = aws.network
    if (net.vpc_id is None) != (net.subnet_id is None):
        there, absent = ("vpc_id", "subnet_id") if net.vpc_id else ("subnet_id", "vpc_id")
        yield error(
            f"aws.network.{absent}",
            f"is missing, and {there} is given",
            "Give both for an existing network, or neither for a new one.",
        )
    if net.security_group_id and net.vpc_id is None:
        yield error(
            "aws.network.security_group_id",
            "belongs to an existing VPC, and a new one would be made",
            "Give vpc_id and subnet_id too, or leave this out.",
        )


def network_cidr_wrong(spec: ClusterSpec) -> Iterator[Finding]:
    """Subnets are cut out of it, and other networks are met with it."""
    aws = aws_of(spec)
    if aws is None:
        return
    path, text, use = "aws.network.cidr", aws.network.cidr, "Use e.g. 10.42.0.0/16."
    try:
        network = ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        yield error(path, f"{text!r} is not a range of IPv4 addresses", use)
        return
    if str(network) != text:
        yield error(path, f"{text!r} is not the range's own name", f"Write {network}.")
    elif not 16 <= network.prefixlen <= 24:
        yield error(path, f"{text} must be from /16 to /24 large", use)
    elif not any(network.subnet_of(private) for private in _PRIVATE):
        yield error(path, f"{text} is not a range of private addresses", use)


def nodes_out_of_reach(spec: ClusterSpec) -> Iterator[Finding]:
    """SSM is reached over the Internet or through endpoints; a new network would have neither."""
    aws = aws_of(spec)
    if aws is None or aws.network.vpc_id or aws.access.method != "ssm":
        return
    if aws.network.egress == "none" and not aws.network.endpoints:
        yield error(
            "aws.network.endpoints",
            "false, with egress none: SSM could not reach the nodes",
            "Set endpoints to true, or egress to nat.",
        )


def hub_model_without_egress(spec: ClusterSpec) -> Iterator[Finding]:
    """Weights of a hub come over the Internet."""
    aws = aws_of(spec)
    if aws and not aws.network.vpc_id and aws.network.egress == "none" and is_hub_model(spec):
        yield error(
            "aws.network.egress",
            f"none, and {spec.model.id} is fetched from a hub over the Internet",
            "Set it to nat, or put the model into S3 and name it s3://BUCKET/KEY.",
        )


_PRIVATE: Final = tuple(
    ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
)


def is_hub_model(spec: ClusterSpec) -> bool:
    """Whether the weights come from a hub, and not from S3, a disk or kvdeploy itself."""
    return not spec.model.id.startswith(PLAIN_MODELS)


def pipeline_stages(fleet: FleetSpec) -> int:
    """Parts by layers that engine_args asks for; 1 for none."""
    for arg, value in fleet.engine_args.items():
        if arg_name(arg) == "pipeline-parallel-size" and str(value).isdigit():
            return max(1, int(str(value)))
    return 1


def _profile(spec: ClusterSpec) -> InstanceProfile | None:
    """What the nodes are; None when that is not known, which is a check of its own."""
    return INSTANCES.get(spec.aws.instance_type) if spec.target == "aws" and spec.aws else None


def _nodes(count: int) -> str:
    return "one" if count == 1 else str(count)


AWS_SPEC_CHECKS: Final[tuple[Callable[[ClusterSpec], Iterator[Finding]], ...]] = (
    instance_type_unknown,
    tensor_parallel_does_not_divide_node,
    engine_larger_than_nodes,
    zone_outside_region,
    ucx_on_aws,
    runtime_python_on_aws,
    cpu_on_aws,
    router_on_ssh_port,
    reservation_missing,
    reservation_named_twice,
    reservation_not_used,
    spot_price_without_spot,
    placement_group_with_block,
    network_half_given,
    network_cidr_wrong,
    nodes_out_of_reach,
    hub_model_without_egress,
    *ACCESS_CHECKS,
)
