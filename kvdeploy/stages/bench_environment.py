"""What a bench was measured on: versions, processors, topology, flags; nobody's environment."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from kvdeploy import __version__
from kvdeploy.adapters.local import machine
from kvdeploy.planning.launch import SERVER

if TYPE_CHECKING:
    from kvdeploy.model.infra import ProvisionOutputs
    from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def describe(
    spec: ClusterSpec,
    runtime: RuntimeOutputs,
    model: ModelOutputs,
    fleet: FleetOutputs,
    hardware: dict[str, Any],
) -> dict[str, Any]:
    """`hardware` is what engines run on: `machine` or `nodes`."""
    return {
        "kvdeploy": __version__,
        "versions": runtime.versions,
        "device": runtime.device,
        **hardware,
        "model": {
            "id": spec.model.id,
            "dtype": model.dtype,
            "max_length": spec.model.max_length,
            "load_format": spec.model.load_format,
        },
        "topology": {
            role: {
                "count": fleet_spec.count,
                "tensor_parallel": fleet_spec.tensor_parallel,
                "data_parallel": fleet_spec.data_parallel,
            }
            for role, fleet_spec in (("prefill", spec.fleet.prefill), ("decode", spec.fleet.decode))
        },
        "connector": spec.connector.model_dump(),
        "router": spec.router.model_dump(
            include={"policy", "prefill_at_once", "decode_at_once", "workers"}
        ),
        "flags": {e.name: list(e.argv[1 + len(SERVER) :]) for e in fleet.engines},
    }


def describe_machine(fleet: FleetOutputs, runner: Runner) -> dict[str, Any]:
    """Where the engines run. `shared_gpus` are those that more than one engine is on."""
    names = machine.gpu_names(runner)
    users: dict[str, list[str]] = {}
    for engine in fleet.engines:
        for gpu in filter(None, engine.env.get("CUDA_VISIBLE_DEVICES", "").split(",")):
            users.setdefault(gpu.strip(), []).append(engine.name)
    return {
        "machine": {
            "system": platform.platform(),
            "cpu": machine.cpu_name(),
            "cores": len(machine.cores()),
            "gpus": list(names),
            "shared_gpus": {gpu: engines for gpu, engines in users.items() if len(engines) > 1},
        }
    }


def describe_nodes(made: ProvisionOutputs) -> dict[str, Any]:
    """Nodes, without their names in anybody's account."""
    return {
        "nodes": {
            name: {"role": node.role, "instance_type": node.instance_type}
            for name, node in sorted(made.nodes.items())
        },
        "asked_from": platform.platform(),
    }
