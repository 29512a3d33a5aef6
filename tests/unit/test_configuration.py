"""What playbooks are told, held to what their roles say they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvdeploy.model.catalog import CONNECTORS, EFA_INSTALLER, HUGE_PAGES, INSTANCES
from kvdeploy.model.inventory import Connection, Inventory
from kvdeploy.model.outputs import Device, ModelOutputs
from kvdeploy.model.package import RouterPackage
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.configuration import (
    ControlFiles,
    Site,
    build_inventory,
    model_path,
    secret_names,
)
from kvdeploy.planning.fleetplan import Machine, node_runtime, plan_fleet
from kvdeploy.planning.nodes import nodes_of

ROLES: Final = Path(__file__).parents[2] / "playbooks/roles"
ON: Final = {
    "base": ("prefill", "decode", "router"),
    "nvidia": ("prefill", "decode"),
    "efa": ("prefill", "decode"),
    "vllm": ("prefill", "decode"),
    "nixl": ("prefill", "decode"),
    "model": ("prefill", "decode"),
    "engine": ("prefill", "decode"),
    "router": ("router",),
    "monitoring": ("prefill", "decode", "router"),
    "collect": ("prefill", "decode", "router"),
}
"""Which nodes each role is for."""
ASKED: Final = {"collect_dest"}
"""Given by whoever runs the playbook."""
PACKAGE = RouterPackage(path="/control/kvdeploy-abc.zip", digest="abc")
FILES = ControlFiles(
    runtime_lock="/control/cuda.txt",
    runtime_probe="/control/runtime.py",
    s3_lock="/control/node.txt",
    router_lock="/control/router.txt",
    router_package=PACKAGE,
)
CONNECTION = Connection(user="ubuntu", known_hosts="/k")


def cluster(**changes: Any) -> ClusterSpec:
    aws = {"region": "us-west-2", "zone": "us-west-2a", **changes.pop("aws", {})}
    whole = {"name": "demo", "target": "aws", "aws": aws, "model": {"id": "org/m"}} | changes
    return ClusterSpec.model_validate(whole)


def inventory(spec: ClusterSpec, device: Device = "cuda", **site: Any) -> Inventory:
    machines = [
        Machine(
            name=n.name,
            role=n.role,
            address=f"10.0.0.{i}",
            instance_type=n.instance_type,
            instance_id=f"i-{i}",
            interface="eth0",
            cores=(0,),
        )
        for i, n in enumerate(nodes_of(spec), start=1)
    ]
    model = ModelOutputs(path=model_path(spec, None), served_name="m", config={})
    plan = plan_fleet(spec, machines, node_runtime(device, "", {}), model, PACKAGE)
    told = Site(device=device, files=FILES, **site)
    return build_inventory(spec, machines, plan, told, CONNECTION)


def variables(spec: ClusterSpec, name: str = "prefill-0", **site: Any) -> dict[str, Any]:
    """All that one host is told."""
    return of_host(inventory(spec, **site), name)


def of_host(found: Inventory, name: str) -> dict[str, Any]:
    host = next(h for h in found.hosts if h.name == name)
    gpu = found.group_vars["gpu"] if host.role != "router" else {}
    mine = found.group_vars.get(host.role, {})
    return {**found.group_vars["all"], **gpu, **mine, **host.vars}


def options(role: str) -> dict[str, Any]:
    text = (ROLES / role / "meta/argument_specs.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["argument_specs"]["main"]["options"]
    return found


# --- held to the roles -----------------------------------------------------------------------
CLUSTERS: Final = {
    "plain": cluster(),
    "watched, with keys, from S3": cluster(
        model={"id": "s3://bucket/m"},
        router={"api_key_file": "keys", "host": "0.0.0.0"},
        monitoring={"enabled": True},
        connector={"mode": "pull"},
    ),
    "a small type": cluster(aws={"instance_type": "p5.4xlarge"}),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_variable_is_an_option_of_a_role_that_the_node_has(name: str) -> None:
    found = inventory(CLUSTERS[name])
    for host in found.hosts:
        known = {o for role, nodes in ON.items() if host.role in nodes for o in options(role)}
        assert set(of_host(found, host.name)) - known == set(), host.name


@pytest.mark.parametrize("role", ON)
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_role_is_given_all_that_it_requires(name: str, role: str) -> None:
    spec = CLUSTERS[name]
    found = inventory(spec)
    given = [of_host(found, h.name) for h in found.hosts if h.role in ON[role]]
    required = {o for o, about in options(role).items() if about.get("required")}
    assert given
    for told in given:
        assert required - set(told) - set(secret_names(spec)) - ASKED == set()


KINDS: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "path": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_values_are_of_the_types_that_roles_declare(name: str) -> None:
    found = inventory(CLUSTERS[name])
    for host in found.hosts:
        told = of_host(found, host.name)
        for role in (r for r, nodes in ON.items() if host.role in nodes):
            for option, about in options(role).items():
                if option in told:
                    check_kind(option, told[option], about)


def check_kind(path: str, value: Any, about: dict[str, Any]) -> None:
    kinds = KINDS[about["type"]]
    assert isinstance(value, kinds), path
    assert isinstance(value, bool) == (kinds == (bool,)), path
    if "choices" in about:
        assert value in about["choices"], path
    inner = about.get("options")
    for i, element in enumerate(value if isinstance(value, list) else ()):
        if inner is None:
            continue
        unknown = set(element) - set(inner) if about.get("elements") == "dict" else set()
        assert unknown == set(), f"{path}.{i}"
        for key, more in inner.items():
            assert key in element or not more.get("required"), f"{path}.{i}.{key}"
            if key in element:
                check_kind(f"{path}.{i}.{key}", element[key], more)


def test_secrets_are_options_of_roles_and_no_log() -> None:
    router = {"api_key_file": "keys", "host": "0.0.0.0"}
    tls = {"tls_cert_file": "router.crt", "tls_key_file": "router.key"}
    spec = cluster(router=router | tls, monitoring={"enabled": True})
    names = secret_names(spec)
    assert names == (
        *("model_token", "router_api_keys", "router_tls_cert", "router_tls_key"),
        "monitoring_grafana_password",
    )
    assert secret_names(cluster(router=router)) == ("model_token", "router_api_keys")
    told = {o: about for role in ON for o, about in options(role).items()}
    assert {n for n in names if told[n].get("no_log")} == set(names)
    for host in inventory(spec).hosts:
        assert not set(names) & set(of_host(inventory(spec), host.name))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("model_token",)),
        ({"model": {"id": "s3://b/m"}}, ()),
        ({"model": {"id": "builtin:tiny"}}, ()),
        (
            {"model": {"id": "/fsx/m"}, "monitoring": {"enabled": True}},
            ("monitoring_grafana_password",),
        ),
    ],
)
def test_only_secrets_that_are_used_are_wanted(
    changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert secret_names(cluster(**changes)) == names


# --- what the values mean --------------------------------------------------------------------
@pytest.mark.parametrize("instance_type", INSTANCES)
def test_a_nodes_hardware_is_what_its_type_has(instance_type: str) -> None:
    profile = INSTANCES[instance_type]
    told = variables(cluster(aws={"instance_type": instance_type}))
    assert told["nvidia_gpus"] == told.get("monitoring_gpus") == profile.gpus
    assert told["efa_devices"] == profile.efa_devices
    assert told["base_huge_pages"] == (HUGE_PAGES if profile.efa_devices >= 16 else 0)
    assert told["nvidia_fabric"] is (profile.gpus == 8)


def test_the_routers_node_has_no_gpus_no_efa_and_no_instance_store() -> None:
    told = variables(cluster(), "router-0")
    assert not {"nvidia_gpus", "efa_devices", "vllm_lock", "base_nvme", "engine_specs"} & set(told)


def test_versions_come_from_the_catalog_dotted() -> None:
    told = variables(cluster())
    assert told["efa_version"] == told["nixl_efa_version"] == EFA_INSTALLER
    assert (told["efa_min_version"], told["nvidia_min_driver"]) == ("1.47.0", "580")
    assert (told["vllm_min_version"], told["vllm_nixl_min_version"]) == ("0.24", "1.3.2")


@pytest.mark.parametrize(
    ("backend", "device", "told"),
    [
        ("auto", "cuda", "LIBFABRIC"),
        ("auto", "cpu", "UCX"),
        ("UCX", "cuda", "UCX"),
        ("LIBFABRIC", "cpu", "LIBFABRIC"),
    ],
)
def test_nixl_is_checked_for_the_backend_that_engines_use(
    backend: str, device: Device, told: str
) -> None:
    spec = cluster(connector={"backend": backend})
    assert of_host(inventory(spec, device), "prefill-0")["nixl_backend"] == told


def test_the_runtime_must_know_the_connector_of_the_mode() -> None:
    assert variables(cluster())["vllm_connector"] == CONNECTORS["push"]
    assert variables(cluster(connector={"mode": "pull"}))["vllm_connector"] == CONNECTORS["pull"]


@pytest.mark.parametrize(
    ("model", "folder", "source", "model_id"),
    [
        ({"id": "org/m"}, None, "hub", "org/m"),
        ({"id": "s3://b/k"}, None, "s3", "s3://b/k"),
        ({"id": "/fsx/m"}, None, "shared", "/fsx/m"),
        ({"id": "builtin:tiny"}, "/cache/tiny-1", "copy", "/cache/tiny-1"),
        ({"id": "./m"}, "/home/ann/m", "copy", "/home/ann/m"),
    ],
)
def test_where_the_model_comes_from(
    model: dict[str, Any], folder: str | None, source: str, model_id: str
) -> None:
    told = variables(cluster(model=model), model_folder=folder)
    assert (told["model_source"], told["model_id"]) == (source, model_id)
    assert told["model_path"] == told["engine_model"]


def test_the_region_is_told_to_whoever_fetches_from_s3() -> None:
    assert variables(cluster(model={"id": "s3://b/k"}))["model_environment"] == {
        "AWS_REGION": "us-west-2"
    }
    assert variables(cluster())["model_environment"] == {}


def test_another_model_or_revision_lies_elsewhere_and_names_are_plain() -> None:
    paths = [
        model_path(cluster(model=model), folder)
        for model, folder in (
            ({"id": "org/My Model"}, None),
            ({"id": "other/My Model"}, None),
            ({"id": "org/My Model", "revision": "v2"}, None),
            ({"id": "s3://bucket/a/My Model/"}, None),
            ({"id": "builtin:tiny"}, "/cache/models/My Model"),
        )
    ]
    assert len(set(paths)) == len(paths)
    assert {p.rpartition("-")[0] for p in paths} == {"/opt/kvdeploy/data/models/My-Model"}


def test_weights_that_are_made_up_are_not_fetched() -> None:
    assert (
        variables(cluster(model={"id": "org/m", "load_format": "dummy"}))["model_weights"] is False
    )


def test_each_node_is_told_of_its_own_engines_alone() -> None:
    spec = cluster(fleet={"prefill": {"count": 2, "tensor_parallel": 8}, "decode": {}})
    found = inventory(spec)
    names = {
        h.name: [e["name"] for e in h.vars["engine_specs"]]
        for h in found.hosts
        if h.role != "router"
    }
    assert names == {
        "prefill-0": ["prefill-0"],
        "prefill-1": ["prefill-1"],
        "decode-0": ["decode-0"],
    }


def test_hosts_are_known_by_their_instances() -> None:
    found = inventory(cluster())
    assert [(h.name, h.instance_id, h.address) for h in found.hosts] == [
        ("prefill-0", "i-1", "10.0.0.1"),
        ("decode-0", "i-2", "10.0.0.2"),
        ("router-0", "i-3", "10.0.0.3"),
    ]
    assert found.connection == CONNECTION


def test_what_is_watched_and_when_it_ends() -> None:
    spec = cluster(monitoring={"enabled": True})
    told = variables(spec, "router-0", ends={"ttl": 1000.0})
    assert told["monitoring_server"] is True
    assert told["monitoring_ends"] == {"ttl": 1000.0}
    assert told["monitoring_engines"][1] == {
        "name": "decode-0",
        "role": "decode",
        "node": "decode-0",
        "address": "10.0.0.2:18100",
    }
    assert told["monitoring_router"] == "http://127.0.0.1:8000"
    assert "monitoring_server" not in variables(spec)
    assert variables(cluster())["monitoring_enabled"] is False
