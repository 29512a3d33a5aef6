"""The environment of one engine: what vLLM, NIXL and the network libraries are told. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.model.layout import LIBFABRIC

if TYPE_CHECKING:
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.launch import EnginePlace

EFA: Final = {
    # The provider named, libfabric fails where EFA does not work; left to choose, it takes TCP.
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    # Peers are on other nodes; memory shared within one would need a wider ptrace scope.
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
    # NIXL's plugin must meet the installer's libfabric: a distribution's lacks its symbols.
    "LD_LIBRARY_PATH": LIBFABRIC,
}

CPU_THREADS: Final = "VLLM_CPU_OMP_THREADS_BIND"


def build_environment(
    spec: ClusterSpec, place: EnginePlace, *, cpu: bool, backend: str | None
) -> dict[str, str]:
    """Variables of one engine, before those of the runtime and of the cluster file."""
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_channel_port),
        # The router foretells prefill's request id, so that decode's heartbeats renew its lease.
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(spec.runtime.start_timeout_s)),
        # The router closes idle connections, never the engine: an engine that stood still for
        # over 5 s would else throw away a request that waits on a connection it then closes.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if cpu:
        return env | {
            CPU_THREADS: ",".join(map(str, place.cpus)),
            "OMP_NUM_THREADS": str(len(place.cpus)),
            # Without it the first request compiles for 5-20 s, --enforce-eager or not.
            "TORCHDYNAMO_DISABLE": "1",
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": place.interface,
        }
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
    return env | (EFA if place.efa and backend == "LIBFABRIC" else {})


def computes_on_cpus(engine: LaunchSpec) -> bool:
    """Whether an engine was planned for CPUs."""
    return CPU_THREADS in engine.env
