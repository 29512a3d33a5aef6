"""Checks of the cluster file that mean something on one target alone. Pure, like checks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import INSTANCES, InstanceProfile
from kvdeploy.model.wording import did_you_mean
from kvdeploy.planning.findings import error, fleets, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec


# --- aws -------------------------------------------------------------------------------------
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
        needed = fleet.tensor_parallel * fleet.data_parallel
        found = profile.gpus * fleet.nodes_per_instance
        if needed > found and found % fleet.tensor_parallel == 0:
            yield error(
                f"{path}.data_parallel",
                f"{fleet.data_parallel} x tensor_parallel {fleet.tensor_parallel} needs {needed} "
                f"GPUs, and {_nodes(fleet.nodes_per_instance)} {profile.name} has {found}",
                f"Set it to at most {found // fleet.tensor_parallel}, or raise nodes_per_instance.",
            )


def zone_outside_region(spec: ClusterSpec) -> Iterator[Finding]:
    """A zone's name is its region's and a letter."""
    if spec.target == "aws" and spec.aws and spec.aws.zone[:-1] != spec.aws.region:
        yield error(
            "aws.zone",
            f"{spec.aws.zone} is not in {spec.aws.region}",
            f"Use a zone such as {spec.aws.region}{spec.aws.zone[-1]}.",
        )


def reservation_missing(spec: ClusterSpec) -> Iterator[Finding]:
    """Reserved capacity is found by its id alone."""
    if spec.target != "aws" or spec.aws is None:
        return
    capacity = spec.aws.capacity
    if capacity.kind in {"odcr", "capacity-block"} and capacity.reservation_id is None:
        yield error(
            "aws.capacity.reservation_id",
            f"{capacity.kind} needs the id of the reservation",
            "Set it to cr-..., as 'aws ec2 describe-capacity-reservations' shows it.",
        )


def ucx_on_aws(spec: ClusterSpec) -> Iterator[Finding]:
    """UCX does not drive EFA: KV would travel over TCP at a fraction of the speed."""
    if spec.target == "aws" and spec.connector.backend == "UCX":
        yield warning(
            "connector.backend",
            "UCX does not use EFA: KV blocks would travel over TCP",
            "Use auto or LIBFABRIC.",
        )


# --- local -----------------------------------------------------------------------------------
def libfabric_on_local(spec: ClusterSpec) -> Iterator[Finding]:
    """LIBFABRIC cannot reach an engine on the same host."""
    if spec.target == "local" and spec.connector.backend == "LIBFABRIC":
        yield error(
            "connector.backend",
            "LIBFABRIC cannot use loopback, the only way between engines on one machine",
            "Use auto or UCX.",
        )


def nodes_on_local(spec: ClusterSpec) -> Iterator[Finding]:
    """A local cluster is one machine."""
    for path, fleet in fleets(spec):
        if spec.target == "local" and fleet.nodes_per_instance > 1:
            yield error(
                f"{path}.nodes_per_instance",
                f"{fleet.nodes_per_instance} nodes an engine, and target local is one machine",
                "Set it to 1, or use target aws.",
            )


def _profile(spec: ClusterSpec) -> InstanceProfile | None:
    """What the nodes are; None when that is not known, which is a check of its own."""
    return INSTANCES.get(spec.aws.instance_type) if spec.target == "aws" and spec.aws else None


def _nodes(count: int) -> str:
    return "one" if count == 1 else str(count)


TARGET_CHECKS: Final[tuple[Callable[[ClusterSpec], Iterator[Finding]], ...]] = (
    instance_type_unknown,
    tensor_parallel_does_not_divide_node,
    engine_larger_than_nodes,
    zone_outside_region,
    reservation_missing,
    ucx_on_aws,
    libfabric_on_local,
    nodes_on_local,
)
