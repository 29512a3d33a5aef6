from __future__ import annotations

import json
from typing import Any

import pytest

from kvdeploy.adapters.local.supervisor import digest_of
from kvdeploy.model.base import Change
from kvdeploy.model.catalog import CPU_KV_CACHE_GIB
from kvdeploy.model.launch import GENERATION, LaunchSpec, Readiness
from kvdeploy.model.outputs import Device, ModelOutputs, RuntimeOutputs
from kvdeploy.model.routing import Deadlines, Engine, RouterConfig
from kvdeploy.model.schema import all_keys
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.launch import (
    EnginePlace,
    build_engine,
    build_router,
    build_router_config,
    caveats,
    cpu_kv_cache_gib,
    divide_cores,
    divide_gpus,
    engine_slots,
    render_args,
    router_url,
)

MODEL = ModelOutputs(path="/models/tiny", served_name="tiny", config={})
PLACE = EnginePlace(port=18100, side_channel_port=18600, cpus=(0, 1), gpus=(4, 5))


def cluster(**top: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "demo", **top})


def fleets(prefill: int, decode: int, **of_each: Any) -> dict[str, Any]:
    return {"prefill": {"count": prefill, **of_each}, "decode": {"count": decode, **of_each}}


def runtime(device: Device = "cpu", **env: str) -> RuntimeOutputs:
    return RuntimeOutputs(
        python="/rt/bin/python",
        device=device,
        built=True,
        versions={"vllm": "0.32.0"},
        env=dict(env),
    )


def engine(
    spec: ClusterSpec,
    name: str = "prefill-0",
    *,
    device: Device = "cpu",
    place: EnginePlace = PLACE,
    env: dict[str, str] | None = None,
    model: ModelOutputs = MODEL,
) -> LaunchSpec:
    slot = next(s for s in engine_slots(spec) if s.name == name)
    return build_engine(spec, slot, place, runtime(device, **(env or {})), model)


def flags(launch: LaunchSpec) -> dict[str, str | None]:
    """--flag value pairs of argv; None for a bare flag."""
    words = launch.argv[3:]
    found: dict[str, str | None] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            after = words[i + 1] if i + 1 < len(words) else "--"
            found[word] = None if after.startswith("--") else after
    return found


def connector(launch: LaunchSpec) -> dict[str, Any]:
    text = flags(launch)["--kv-transfer-config"]
    assert text is not None
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


# --- who gets what of the machine ------------------------------------------------------------
@pytest.mark.parametrize(
    ("prefill", "decode", "names"),
    [
        (1, 1, ["prefill-0", "decode-0"]),
        (2, 2, ["prefill-0", "decode-0", "prefill-1", "decode-1"]),
        (1, 3, ["prefill-0", "decode-0", "decode-1", "decode-2"]),
        (3, 1, ["prefill-0", "decode-0", "prefill-1", "prefill-2"]),
    ],
)
def test_the_two_ends_of_a_pair_are_dealt_one_after_the_other(
    prefill: int, decode: int, names: list[str]
) -> None:
    slots = engine_slots(cluster(fleet=fleets(prefill, decode)))
    assert [s.name for s in slots] == names
    assert [s.role for s in slots] == [name.partition("-")[0] for name in names]


@pytest.mark.parametrize(
    ("engines", "cores", "dealt"),
    [
        (2, (0,), [(0,), (0,)]),
        (2, (0, 1), [(0,), (1,)]),
        (2, tuple(range(8)), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, (0,), [(0,), (0,), (0,), (0,)]),
        (4, (0, 1), [(0,), (1,), (0,), (1,)]),
        (4, tuple(range(8)), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (3, tuple(range(8)), [(0, 1), (2, 3), (4, 5)]),
        (2, (3, 9, 11), [(3,), (9,)]),
    ],
)
def test_cores_are_dealt_in_equal_shares_or_shared_in_turn(
    engines: int, cores: tuple[int, ...], dealt: list[tuple[int, ...]]
) -> None:
    assert divide_cores(engines, cores) == dealt


@pytest.mark.parametrize(
    ("fleet", "dealt"),
    [
        (fleets(1, 1), {"prefill-0": (0,), "decode-0": (1,)}),
        (
            fleets(2, 2),
            {"prefill-0": (0,), "prefill-1": (1,), "decode-0": (2,), "decode-1": (3,)},
        ),
        (
            fleets(1, 3),
            {"prefill-0": (0,), "decode-0": (1,), "decode-1": (2,), "decode-2": (3,)},
        ),
        (
            {"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 2, "count": 2}},
            {"prefill-0": (0, 1), "decode-0": (2, 3), "decode-1": (4, 5)},
        ),
        (
            {"prefill": {"count": 2}, "decode": {"tensor_parallel": 2, "data_parallel": 2}},
            {"prefill-0": (0,), "prefill-1": (1,), "decode-0": (2, 3, 4, 5)},
        ),
    ],
)
def test_an_engines_gpus_lie_together_and_prefills_come_first(
    fleet: dict[str, Any], dealt: dict[str, tuple[int, ...]]
) -> None:
    slots = engine_slots(cluster(fleet=fleet))
    assert dict(zip((s.name for s in slots), divide_gpus(slots), strict=True)) == dealt


# --- a CPU engine ----------------------------------------------------------------------------
def test_a_cpu_engines_command_line_whole() -> None:
    built = engine(cluster(fleet={"prefill": {"kv_cache_gib": 0.5}}), "prefill-0")
    assert built.argv == (
        *("/rt/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/models/tiny"),
        *("--served-model-name", "tiny", "demo.prefill-0.@generation@"),
        *("--host", "127.0.0.1"),
        *("--port", "18100"),
        *("--dtype", "auto"),
        *("--seed", "0"),
        *("--max-model-len", "2048"),
        *("--block-size", "128"),
        *("--tensor-parallel-size", "1"),
        *("--data-parallel-size", "1"),
        "--disable-uvicorn-access-log",
        "--kv-transfer-config",
        '{"kv_connector":"NixlPushConnector","kv_role":"kv_producer","kv_buffer_device":"cpu",'
        '"engine_id":"demo.prefill-0.@generation@","kv_load_failure_policy":"fail",'
        '"kv_connector_extra_config":{"kv_lease_duration":120.0}}',
        "--enforce-eager",
        *("--kv-cache-memory-bytes", "536870912"),
    )


def test_a_cpu_engines_environment_whole() -> None:
    assert engine(cluster(), "decode-0").env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "18600",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "600",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0,1",
        "OMP_NUM_THREADS": "2",
        "TORCHDYNAMO_DISABLE": "1",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
    }


@pytest.mark.parametrize(("asked", "size"), [(None, CPU_KV_CACHE_GIB), (2.1, 2.1)])
def test_a_cpu_engine_always_has_a_cache_of_known_size(asked: float | None, size: float) -> None:
    spec = cluster(fleet={"decode": {"kv_cache_gib": asked}})
    assert cpu_kv_cache_gib(spec.fleet.decode) == size
    given = flags(engine(spec, "decode-0"))
    assert given["--kv-cache-memory-bytes"] == str(int(size * 2**30))


def test_what_is_watched_of_an_engine() -> None:
    built = engine(cluster(runtime={"start_timeout_s": 90}), "decode-0")
    assert (built.name, built.role, built.host) == ("decode-0", "decode", "127.0.0.1")
    assert built.ready == Readiness(url="http://127.0.0.1:18100/health", timeout_s=90)
    assert built.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "90"
    assert built.ports == (18100, 18600)
    assert built.cpus == (0, 1)


# --- a CUDA engine ---------------------------------------------------------------------------
def test_a_cuda_engine_differs_in_device_and_nothing_of_the_cpu_is_left() -> None:
    spec = cluster(fleet=fleets(1, 1, tensor_parallel=2, kv_cache_gib=1.5))
    built = engine(spec, device="cuda")
    assert built.env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "18600",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "600",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    given = flags(built)
    assert given["--kv-cache-memory-bytes"] == "1610612736"
    assert given["--tensor-parallel-size"] == "2"
    assert "--enforce-eager" not in given
    assert connector(built)["kv_buffer_device"] == "cuda"
    assert built.cpus == ()


def test_without_a_size_the_cache_on_gpus_is_vllms_to_measure() -> None:
    assert "--kv-cache-memory-bytes" not in flags(engine(cluster(), device="cuda"))


def test_every_data_parallel_rank_has_a_side_channel_of_its_own() -> None:
    spec = cluster(fleet={"decode": {"data_parallel": 3}})
    built = engine(spec, "decode-0", device="cuda")
    assert built.ports == (18100, 18600, 18601, 18602)
    assert flags(built)["--data-parallel-size"] == "3"


# --- the connector ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "name", "kind", "role"),
    [
        ("push", "prefill-0", "NixlPushConnector", "kv_producer"),
        ("push", "decode-0", "NixlPushConnector", "kv_consumer"),
        ("pull", "prefill-0", "NixlConnector", "kv_producer"),
        ("pull", "decode-0", "NixlConnector", "kv_consumer"),
    ],
)
def test_mode_and_role_choose_the_connector(mode: str, name: str, kind: str, role: str) -> None:
    found = connector(engine(cluster(connector={"mode": mode}), name))
    assert (found["kv_connector"], found["kv_role"]) == (kind, role)


def test_lease_backend_and_threads_go_to_the_connector() -> None:
    spec = cluster(connector={"lease_s": 30, "backend": "UCX", "threads": 8})
    assert connector(engine(spec))["kv_connector_extra_config"] == {
        "kv_lease_duration": 30.0,
        "backends": ["UCX"],
        "num_threads": 8,
    }


def test_decode_fails_rather_than_computing_what_was_not_pushed() -> None:
    for name in ("prefill-0", "decode-0"):
        assert connector(engine(cluster(), name))["kv_load_failure_policy"] == "fail"


def test_a_restarted_engine_has_another_id() -> None:
    built = engine(cluster(), "decode-0")
    first, second = built.resolved("19f3a"), built.resolved("19f3b")
    assert connector(built)["engine_id"] == f"demo.decode-0.{GENERATION}"
    assert connector(first)["engine_id"] == "demo.decode-0.19f3a"
    assert connector(second)["engine_id"] == "demo.decode-0.19f3b"


def test_a_generation_is_put_into_arguments_and_environment_and_nowhere_else() -> None:
    built = LaunchSpec(
        name="x",
        role="decode",
        argv=("run", "--id", f"a.{GENERATION}.b"),
        env={"ID": GENERATION, "OTHER": "1"},
        ready=Readiness(url="http://127.0.0.1:1/health", timeout_s=1),
    )
    resolved = built.resolved("g1")
    assert resolved.argv == ("run", "--id", "a.g1.b")
    assert resolved.env == {"ID": "g1", "OTHER": "1"}
    assert resolved.model_copy(update={"argv": built.argv, "env": built.env}) == built


# --- what the user adds ----------------------------------------------------------------------
def test_engine_args_are_added_and_win_over_ours() -> None:
    args = {"max_num_seqs": 64, "disable-uvicorn-access-log": False, "enforce-eager": False}
    given = flags(engine(cluster(fleet={"prefill": {"engine_args": args}})))
    assert given["--max-num-seqs"] == "64"
    assert "--disable-uvicorn-access-log" not in given
    assert "--enforce-eager" not in given


def test_engine_args_of_one_role_are_not_the_others() -> None:
    spec = cluster(fleet={"prefill": {"engine_args": {"max-num-seqs": 64}}})
    assert "--max-num-seqs" not in flags(engine(spec, "decode-0"))


@pytest.mark.parametrize(
    ("written", "flag"),
    [
        ("--max_num_seqs", "--max-num-seqs"),
        ("--max-num-seqs", "--max-num-seqs"),
        ("compilation_config.cudagraph_mode", "--compilation-config.cudagraph_mode"),
    ],
)
def test_a_flag_may_be_written_as_vllm_shows_it(written: str, flag: str) -> None:
    """After a dot comes a key of a JSON map, whose underscores are its own."""
    given = flags(engine(cluster(fleet={"prefill": {"engine_args": {written: "v"}}})))
    assert given[flag] == "v"


def test_each_kind_of_value_has_its_form_on_the_command_line() -> None:
    assert render_args(
        {
            "on": True,
            "off": False,
            "count": 3,
            "share": 0.9,
            "word": "a b",
            "words": ["x", "y"],
            "map": {"a": {"b": [1, True]}},
        }
    ) == (
        "--on",
        *("--count", "3"),
        *("--share", "0.9"),
        *("--word", "a b"),
        *("--words", "x", "y"),
        *("--map", '{"a":{"b":[1,true]}}'),
    )


def test_dummy_weights_are_asked_for() -> None:
    built = engine(
        cluster(model={"load_format": "dummy", "seed": 7}),
        model=MODEL.model_copy(update={"dtype": "bfloat16"}),
    )
    given = flags(built)
    assert (given["--load-format"], given["--seed"], given["--dtype"]) == ("dummy", "7", "bfloat16")


def test_the_users_environment_wins_and_the_fleets_over_the_runtimes() -> None:
    spec = cluster(fleet={"prefill": {"env": {"UCX_TLS": "all", "BOTH": "fleet"}}})
    env = engine(spec, env={"PYTHONPATH": "/opt/site", "BOTH": "runtime"}).env
    assert (env["UCX_TLS"], env["BOTH"], env["PYTHONPATH"]) == ("all", "fleet", "/opt/site")


# --- the router ------------------------------------------------------------------------------
def router_config(spec: ClusterSpec, *, api_key_file: str | None = None) -> RouterConfig:
    engines = [
        engine(
            spec,
            slot.name,
            place=EnginePlace(port=18100 + 2 * i, side_channel_port=18600 + 10 * i, gpus=(i,)),
            device="cuda",
        )
        for i, slot in enumerate(engine_slots(spec))
    ]
    return build_router_config(spec, engines, MODEL, api_key_file=api_key_file)


def test_the_router_is_told_of_every_engine_prefills_first() -> None:
    spec = cluster(
        fleet={
            "prefill": {"count": 2},
            "decode": {"count": 1, "tensor_parallel": 2, "data_parallel": 3},
        }
    )
    assert router_config(spec).engines == (
        Engine(
            name="prefill-0",
            role="prefill",
            url="http://127.0.0.1:18100",
            engine_id="demo.prefill-0.@generation@",
            side_channel_host="127.0.0.1",
            side_channel_port=18600,
        ),
        Engine(
            name="prefill-1",
            role="prefill",
            url="http://127.0.0.1:18104",
            engine_id="demo.prefill-1.@generation@",
            side_channel_host="127.0.0.1",
            side_channel_port=18620,
        ),
        Engine(
            name="decode-0",
            role="decode",
            url="http://127.0.0.1:18102",
            engine_id="demo.decode-0.@generation@",
            side_channel_host="127.0.0.1",
            side_channel_port=18610,
            tp_size=2,
            dp_size=3,
        ),
    )


def test_the_routers_own_settings_come_from_the_file() -> None:
    spec = cluster(
        connector={"mode": "pull", "block_size": 32},
        router={
            "host": "0.0.0.0",
            "port": 9000,
            "policy": "round-robin",
            "admin_port": 9001,
            "mode": "aggregated",
            "mode_header": True,
            "aggregate_below_tokens": 64,
            "tries": 2,
            "prefill_at_once": 4,
            "decode_at_once": 64,
            "queue_size": 9,
            "queue_wait_s": 7,
            "drain_lost_share": 0.5,
            "eject_after": 5,
            "eject_window_s": 12,
            "max_body_mib": 0.5,
            "pair_header": False,
            "warm_pairs": False,
            "deadlines": {"connect_s": 1, "total_s": 33},
        },
    )
    config = router_config(spec, api_key_file="/keys")
    assert config.model_copy(update={"engines": ()}) == RouterConfig(
        host="0.0.0.0",
        port=9000,
        served_model="tiny",
        mode="pull",
        policy="round-robin",
        engines=(),
        deadlines=Deadlines(connect_s=1, total_s=33),
        admin_port=9001,
        dispatch="aggregated",
        mode_header=True,
        aggregate_below_tokens=64,
        tries=2,
        prefill_at_once=4,
        decode_at_once=64,
        queue_size=9,
        queue_wait_s=7,
        block_size=32,
        drain_lost_share=0.5,
        eject_after=5,
        eject_window_s=12,
        max_body_bytes=524288,
        api_key_file="/keys",
        pair_header=False,
        warm_pairs=False,
        warmup_tokens=33,
    )


def test_a_warm_up_fits_into_a_short_model() -> None:
    spec = cluster(model={"max_length": 64}, connector={"block_size": 128})
    assert router_config(spec).warmup_tokens == 62


def test_the_routers_process() -> None:
    config = router_config(cluster(router={"port": 9000}))
    built = build_router(
        config, python="/tool/python", config_path="/c/router.json", version="v1", env={"A": "b"}
    )
    digest = built.env["KVDEPLOY_CONFIG"]
    assert built == LaunchSpec(
        name="router",
        role="router",
        argv=("/tool/python", "-m", "kvdeploy.router", "--config", "/c/router.json"),
        env={"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "KVDEPLOY_CONFIG": digest, "A": "b"},
        ports=(9000,),
        host="127.0.0.1",
        ready=Readiness(url="http://127.0.0.1:9000/health", timeout_s=60.0),
        stop_grace_s=15.0,
    )


def test_another_version_is_another_process_of_the_router() -> None:
    config = router_config(cluster())
    one, same, other = (
        digest_of(build_router(config, python="p", config_path="/c", version=version, env={}))
        for version in ("v1", "v1", "v2")
    )
    assert one == same
    assert one != other


OTHER_VALUES: dict[str, Any] = {
    "prefill_at_once": 2,
    "host": "127.0.0.2",
    "policy": "round-robin",
    "mode": "aggregated",
    "api_key_file": "keys",
    "tls_cert_file": "router.crt",
    "tls_key_file": "router.key",
}
ROUTER_KEYS = [
    key.path[1:] for key in all_keys() if key.section is None and key.path[0] == "router"
]


@pytest.mark.parametrize("path", ROUTER_KEYS, ids=".".join)
def test_a_field_of_the_router_does_what_it_says_when_it_is_changed(path: tuple[str, ...]) -> None:
    """Reload: the same process reads it again. Restart: it is another process."""
    key = next(key for key in all_keys() if key.path == ("router", *path))
    before: Any = cluster().router
    for part in path:
        before = getattr(before, part)
    value = OTHER_VALUES.get(path[-1], not before if isinstance(before, bool) else None)
    if value is None:
        value = 2 if before is None else before / 2 if isinstance(before, float) else before + 1
    changes: dict[str, Any] = {path[-1]: value}
    if path[-1].startswith("tls_"):
        changes = {"tls_cert_file": "router.crt", "tls_key_file": "router.key"}
    elif len(path) > 1:
        changes = {path[0]: changes}
    was, now = (process_of_router(cluster(router=router)) for router in ({}, changes))
    assert was[1] != now[1], "the router is not told of it"
    assert (was[0] != now[0]) == (key.change is Change.ROUTER)
    assert key.change in {Change.ROUTER, Change.RELOAD}


def process_of_router(spec: ClusterSpec) -> tuple[str, RouterConfig]:
    """Its process, and what it is told."""
    keys = spec.router.api_key_file
    config = build_router_config(
        spec, [engine(spec)], MODEL, api_key_file=keys, tls=spec.router.tls_files
    )
    process = build_router(config, python="p", config_path="/c", version="v", env={})
    return digest_of(process), config


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"max_length": 1024}},
        {"model": {"seed": 1}},
        {"connector": {"block_size": 64}},
        {"connector": {"lease_s": 60}},
        {"fleet": {"prefill": {"env": {"A": "1"}}}},
        {"fleet": {"prefill": {"engine_args": {"max-num-seqs": 4}}}},
        {"fleet": {"prefill": {"kv_cache_gib": 4}}},
    ],
    ids=str,
)
def test_a_change_of_the_file_makes_another_process_of_an_engine(change: dict[str, Any]) -> None:
    assert digest_of(engine(cluster())) == digest_of(engine(cluster()))
    assert digest_of(engine(cluster(**change))) != digest_of(engine(cluster()))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_where_clients_on_this_machine_reach_the_router(host: str, url: str) -> None:
    assert router_url(router_config(cluster(router={"host": host}))) == url


def old_runtime() -> RuntimeOutputs:
    return runtime("cuda").model_copy(update={"versions": {"vllm": "0.26.0"}})


@pytest.mark.parametrize(
    ("role", "mode", "versions", "args", "without"),
    [
        ("decode", "push", {"vllm": "0.26.0"}, {}, True),
        ("decode", "push", {"vllm": "0.31.9"}, {}, True),
        ("decode", "push", {}, {}, True),
        ("decode", "push", {"vllm": "0.32.1+cu130"}, {}, False),
        ("decode", "pull", {"vllm": "0.26.0"}, {}, False),
        ("prefill", "push", {"vllm": "0.26.0"}, {}, False),
        ("decode", "push", {"vllm": "0.26.0"}, {"enable_prefix_caching": True}, False),
    ],
)
def test_decode_runs_without_prefix_cache_where_a_partial_hit_makes_wrong_answers(
    role: str, mode: str, versions: dict[str, str], args: dict[str, Any], *, without: bool
) -> None:
    spec = cluster(connector={"mode": mode}, fleet={"decode": {"engine_args": args}})
    slot = next(s for s in engine_slots(spec) if s.role == role)
    old = runtime("cuda").model_copy(update={"versions": versions})
    place = EnginePlace(port=1, side_channel_port=2, gpus=(0,))
    launch = build_engine(spec, slot, place, old, MODEL)
    assert ("--no-enable-prefix-caching" in launch.argv) is without


def test_the_user_is_told_of_the_missing_prefix_cache() -> None:
    assert caveats(cluster(), old_runtime()) == (
        "vllm 0.26.0 gives wrong answers when decode holds a part of a pushed prompt already, so "
        "decode runs without prefix caching; 0.32 or newer needs no such care",
    )
    assert caveats(cluster(connector={"mode": "pull"}), old_runtime()) == ()
    assert caveats(cluster(), runtime()) == ()
