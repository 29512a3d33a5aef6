"""Which machines a cluster on AWS wants. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.infra import Node

if TYPE_CHECKING:
    from kvdeploy.model.launch import Role
    from kvdeploy.model.spec import ClusterSpec, FleetSpec

ROUTER_NODE = "router-0"


def nodes_of(spec: ClusterSpec) -> tuple[Node, ...]:
    """Every node by name: prefill and decode never share one, the router has its own.

    Empty when the spec has no `aws` section. Engines of one role share a node as far as its
    GPUs go; an engine that spans nodes has them to itself.
    """
    if spec.aws is None:
        return ()
    roles: tuple[tuple[Role, FleetSpec], ...] = (
        ("prefill", spec.fleet.prefill),
        ("decode", spec.fleet.decode),
    )
    wanted = [
        Node(name=f"{role}-{i}", role=role, instance_type=spec.aws.instance_type)
        for role, fleet in roles
        for i in range(nodes_needed(fleet, gpus_a_node=gpus_of(spec.aws.instance_type)))
    ]
    router = Node(name=ROUTER_NODE, role="router", instance_type=spec.aws.router_instance_type)
    return (*wanted, router)


def nodes_needed(fleet: FleetSpec, *, gpus_a_node: int) -> int:
    """Nodes that the engines of one role fill."""
    if fleet.nodes_per_instance > 1:
        return fleet.count * fleet.nodes_per_instance
    return ceil(fleet.count / engines_a_node(fleet, gpus_a_node=gpus_a_node))


def engines_a_node(fleet: FleetSpec, *, gpus_a_node: int) -> int:
    """Engines of one role that share a node."""
    return max(1, gpus_a_node // (fleet.tensor_parallel * fleet.data_parallel))


def gpus_of(instance_type: str) -> int:
    """GPUs of a node; 1 for a type that is not known, which is a check of its own."""
    profile = INSTANCES.get(instance_type)
    return profile.gpus if profile else 1
