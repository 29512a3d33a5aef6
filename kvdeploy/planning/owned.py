"""Flags and variables of the engines that kvdeploy sets itself, and the key of the cluster file
that does it. ROLE stands for fleet.prefill or fleet.decode.
"""

from __future__ import annotations

from typing import Final

_PARALLEL = "Use ROLE.data_parallel."
_SPAN = "Use ROLE.nodes_per_instance."
_PORTS = "Leave it out: kvdeploy gives every engine its own, and clients use router."

ARGS: Final = {
    "model": "Use model.id.",
    "model-tag": "Use model.id.",
    "revision": "Use model.revision.",
    "served-model-name": "Use model.served_name.",
    "dtype": "Use model.dtype.",
    "max-model-len": "Use model.max_length.",
    "load-format": "Use model.load_format.",
    "seed": "Use model.seed.",
    "tensor-parallel-size": "Use ROLE.tensor_parallel.",
    "tp": "Use ROLE.tensor_parallel.",
    "data-parallel-size": _PARALLEL,
    "dp": _PARALLEL,
    "data-parallel-size-local": _PARALLEL,
    "data-parallel-rank": _PARALLEL,
    "data-parallel-start-rank": _PARALLEL,
    "data-parallel-address": _PARALLEL,
    "data-parallel-rpc-port": _PARALLEL,
    "nnodes": _SPAN,
    "node-rank": _SPAN,
    "master-addr": _SPAN,
    "master-port": _SPAN,
    "headless": _SPAN,
    "block-size": "Use connector.block_size.",
    "kv-transfer-config": "Use connector.",
    "kv-cache-memory-bytes": "Use ROLE.kv_cache_gib.",
    "host": _PORTS,
    "port": _PORTS,
    "uds": _PORTS,
    "api-key": "Use router.api_key_file: only the router is reached by clients.",
    "config": "Write its flags under ROLE.engine_args.",
}

ENV: Final = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": _PORTS,
    "VLLM_NIXL_SIDE_CHANNEL_PORT": _PORTS,
    "VLLM_CPU_KVCACHE_SPACE": "Use ROLE.kv_cache_gib.",
    "VLLM_CPU_OMP_THREADS_BIND": "Leave it out: kvdeploy gives every engine its own cores.",
    "CUDA_VISIBLE_DEVICES": "Leave it out: kvdeploy gives every engine its own GPUs.",
    "VLLM_ENGINE_READY_TIMEOUT_S": "Use runtime.start_timeout_s.",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "Leave it out: the router foretells request ids.",
    "VLLM_API_KEY": "Use router.api_key_file: only the router is reached by clients.",
}

DECODE_SPLITS: Final = frozenset(
    {"pipeline-parallel-size", "pp", "decode-context-parallel-size", "dcp"}
)
"""Flags that split a decode engine in ways that push refuses."""


def arg_name(arg: str) -> str:
    """A flag's own name: dashes within, none before, nothing after a dot."""
    return arg.strip().lstrip("-").replace("_", "-").lower().partition(".")[0]
