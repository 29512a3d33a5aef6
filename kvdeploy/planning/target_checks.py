"""Checks of the cluster file that mean something on one target alone. Pure, like checks.py.

Those of aws are in aws_spec_checks.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.planning.aws_spec_checks import AWS_SPEC_CHECKS
from kvdeploy.planning.findings import error, fleets
from kvdeploy.planning.machine_checks import blocks_unfit_for_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec


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


def engine_on_many_nodes(spec: ClusterSpec) -> Iterator[Finding]:
    """An engine on several nodes is more than one process, and those are not placed yet."""
    for path, fleet in fleets(spec):
        if spec.target != "local" and fleet.nodes_per_instance > 1:
            yield error(
                f"{path}.nodes_per_instance",
                f"{fleet.nodes_per_instance} nodes an engine, and kvdeploy cannot start an engine "
                "on more than one node yet",
                "Set it to 1 and lower tensor_parallel until an engine fits on one node, or raise "
                "count.",
            )


def block_size_on_cpu_nodes(spec: ClusterSpec) -> Iterator[Finding]:
    """Engines of a rehearsal end at their start, a minute later, as on a machine without GPUs."""
    if spec.target != "local" and spec.runtime.device == "cpu":
        yield from blocks_unfit_for_cpu(spec)


TARGET_CHECKS: Final[tuple[Callable[[ClusterSpec], Iterator[Finding]], ...]] = (
    *AWS_SPEC_CHECKS,
    libfabric_on_local,
    nodes_on_local,
    engine_on_many_nodes,
    block_size_on_cpu_nodes,
)
