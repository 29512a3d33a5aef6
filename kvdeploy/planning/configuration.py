"""What playbooks are told: the variables of every role, from the cluster file and the fleet's plan.
Pure.

A function a role; each one's keys are options of that role's meta/argument_specs.yml, which a test
holds them to. Secrets are not here: `secret_names` says which are wanted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model import catalog, layout
from kvdeploy.model.infra import S3
from kvdeploy.model.inventory import Host, Inventory
from kvdeploy.planning.aws_spec_checks import is_hub_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.inventory import Connection
    from kvdeploy.model.outputs import Device
    from kvdeploy.model.package import RouterPackage
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.fleetplan import FleetPlan, Machine

Variables = dict[str, Any]

HUGE_PAGES_FROM: Final = 16
"""EFA devices of a node for which huge pages are reserved."""


@dataclass(frozen=True, kw_only=True)
class ControlFiles:
    """What roles take from the machine that playbooks run on, by path."""

    runtime_lock: str
    runtime_probe: str
    runtime_site_files: tuple[str, ...] = ()
    """Files that go beside the runtime's packages."""
    s3_lock: str
    router_lock: str
    router_package: RouterPackage


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is decided elsewhere, and the playbooks are told as well."""

    device: Device
    files: ControlFiles
    model_folder: str | None = None
    """Of a model that lies, or was made, on this machine: it is copied to every node."""
    data_gib: int = 0
    """Disk that weights and caches take; 0: not known."""
    ends: Mapping[str, float] = field(default_factory=dict)
    """When the cluster will be gone, in Unix seconds, by reason: ttl, capacity-block."""


def build_inventory(
    spec: ClusterSpec,
    machines: Sequence[Machine],
    plan: FleetPlan,
    site: Site,
    connection: Connection,
) -> Inventory:
    """Every node with all that any playbook wants to know of it."""
    profile = None if spec.aws is None else catalog.INSTANCES.get(spec.aws.instance_type)
    everywhere = monitoring_variables(spec, machines, plan, site)
    return Inventory(
        hosts=tuple(
            Host(
                name=m.name,
                role=m.role,
                address=m.address,
                instance_id=m.instance_id,
                vars=_host_variables(m, plan, profile),
            )
            for m in machines
        ),
        connection=connection,
        group_vars={
            "all": base_variables() | collect_variables() | everywhere,
            "gpu": {
                **node_variables(profile, data_gib=site.data_gib),
                **nvidia_variables(profile),
                **efa_variables(profile),
                **vllm_variables(spec, site),
                **nixl_variables(spec, site.device),
                **model_variables(spec, site),
                **engine_variables(spec, site),
            },
            "router": router_variables(plan, site.files) | {"monitoring_server": True},
        },
    )


def secret_names(spec: ClusterSpec) -> tuple[str, ...]:
    """Variables that are secrets, and that this cluster's roles take."""
    wanted = {
        "model_token": is_hub_model(spec),
        "router_api_keys": spec.router.api_key_file is not None,
        "router_tls_cert": spec.router.tls_files is not None,
        "router_tls_key": spec.router.tls_files is not None,
        "monitoring_grafana_password": spec.monitoring.enabled,
    }
    return tuple(name for name, needed in wanted.items() if needed)


# --- a function a role -----------------------------------------------------------------------
def base_variables() -> Variables:
    return {
        "base_user": layout.USER,
        "base_root": layout.ROOT,
        "base_data": layout.DATA,
        "base_supported_systems": list(catalog.SUPPORTED_OS),
    }


def node_variables(profile: InstanceProfile | None, *, data_gib: int) -> Variables:
    """Of role base, on GPU nodes alone."""
    devices = profile.efa_devices if profile else 0
    return {
        "base_nvme": profile is not None and profile.nvme,
        "base_data_gib": data_gib,
        "base_huge_pages": catalog.HUGE_PAGES if devices >= HUGE_PAGES_FROM else 0,
    }


def nvidia_variables(profile: InstanceProfile | None) -> Variables:
    return {
        "nvidia_gpus": profile.gpus if profile else 0,
        "nvidia_fabric": profile is not None and profile.nvswitch,
        "nvidia_branch": catalog.NVIDIA_BRANCH,
        "nvidia_min_driver": dotted(catalog.NVIDIA_DRIVER_MIN),
    }


def efa_variables(profile: InstanceProfile | None) -> Variables:
    return {
        "efa_devices": profile.efa_devices if profile else 0,
        "efa_version": catalog.EFA_INSTALLER,
        "efa_min_version": dotted(catalog.EFA_INSTALLER_MIN),
        "efa_key_fingerprint": catalog.EFA_KEY_FINGERPRINT,
    }


def vllm_variables(spec: ClusterSpec, site: Site) -> Variables:
    return {
        "vllm_device": site.device,
        "vllm_lock": site.files.runtime_lock,
        "vllm_probe": site.files.runtime_probe,
        "vllm_min_version": dotted(catalog.VLLM_MIN),
        "vllm_nixl_min_version": dotted(catalog.NIXL_MIN),
        "vllm_connector": catalog.CONNECTORS[spec.connector.mode],
        "vllm_root": layout.ROOT,
        "vllm_user": layout.USER,
        "vllm_site_files": list(site.files.runtime_site_files),
        "vllm_disk_gib": int(catalog.RUNTIME_DISK_GIB[site.device]),
    }


def nixl_variables(spec: ClusterSpec, device: Device) -> Variables:
    auto = "LIBFABRIC" if device == "cuda" else "UCX"
    return {
        "nixl_backend": auto if spec.connector.backend == "auto" else spec.connector.backend,
        "nixl_libfabric": layout.LIBFABRIC,
        "nixl_python": layout.RUNTIME_PYTHON,
        "nixl_user": layout.USER,
        "nixl_efa_version": catalog.EFA_INSTALLER,
    }


def model_variables(spec: ClusterSpec, site: Site) -> Variables:
    model = spec.model
    region = {"AWS_REGION": spec.aws.region} if spec.aws and model.id.startswith(S3) else {}
    return {
        "model_source": _model_source(spec, site.model_folder),
        "model_id": site.model_folder or model.id,
        "model_revision": model.revision or "",
        "model_weights": model.load_format != "dummy",
        "model_path": model_path(spec, site.model_folder),
        "model_python": layout.RUNTIME_PYTHON,
        "model_root": layout.ROOT,
        "model_user": layout.USER,
        "model_lock": site.files.s3_lock,
        "model_environment": region,
    }


def model_path(spec: ClusterSpec, folder: str | None) -> str:
    """Where the model lies on every node: another id, revision or content is another place."""
    what = PurePosixPath(folder).name if folder else spec.model.id
    tail = re.sub(r"[^A-Za-z0-9._-]+", "-", what.rstrip("/").rpartition("/")[2])
    whole = f"{folder or spec.model.id}@{spec.model.revision or ''}"
    return f"{layout.MODELS}/{tail}-{sha256(whole.encode()).hexdigest()[:8]}"


def engine_variables(spec: ClusterSpec, site: Site) -> Variables:
    return {
        "engine_user": layout.USER,
        "engine_root": layout.ROOT,
        "engine_data": layout.DATA,
        "engine_etc": layout.ETC,
        "engine_model": model_path(spec, site.model_folder),
    }


def router_variables(plan: FleetPlan, files: ControlFiles) -> Variables:
    return {
        "router_user": layout.USER,
        "router_root": layout.ROOT,
        "router_etc": layout.ETC,
        "router_lock": files.router_lock,
        "router_package": files.router_package.path,
        "router_config": plan.router_config.model_dump(mode="json"),
        "router_spec": plan.router.model_dump(mode="json"),
    }


def monitoring_variables(
    spec: ClusterSpec, machines: Sequence[Machine], plan: FleetPlan, site: Site
) -> Variables:
    """The same on every node: what there is to watch."""
    if not spec.monitoring.enabled:
        return {"monitoring_enabled": False}
    return {
        "monitoring_enabled": True,
        "monitoring_cluster": spec.name,
        "monitoring_engines": [
            {
                "name": engine.name,
                "role": engine.role,
                "node": node,
                "address": f"{engine.host}:{engine.ports[0]}",
            }
            for node, engines in plan.engines.items()
            for engine in engines
        ],
        "monitoring_nodes": [
            {"name": m.name, "role": m.role, "address": m.address} for m in machines
        ],
        "monitoring_router": plan.url,
        "monitoring_ends": dict(site.ends),
        "monitoring_grafana_source": catalog.GRAFANA_SOURCE,
    }


def collect_variables() -> Variables:
    """All but collect_dest, which whoever asks for a bundle chooses."""
    return {"collect_root": layout.ROOT, "collect_etc": layout.ETC}


# --- small things ----------------------------------------------------------------------------
def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _model_source(spec: ClusterSpec, folder: str | None) -> str:
    if folder:
        return "copy"
    if spec.model.id.startswith(S3):
        return "s3"
    return "hub" if is_hub_model(spec) else "shared"


def _host_variables(
    machine: Machine, plan: FleetPlan, profile: InstanceProfile | None
) -> Variables:
    own: Variables = {"monitoring_address": machine.address}
    if machine.role == "router":
        return own
    return own | {
        "engine_specs": [e.model_dump(mode="json") for e in plan.engines.get(machine.name, ())],
        "monitoring_gpus": profile.gpus if profile else 0,
        "monitoring_efa_devices": profile.efa_devices if profile else 0,
    }
