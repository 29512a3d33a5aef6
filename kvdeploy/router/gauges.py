"""How full an engine's KV cache is, read from its own metrics. Pure.

Owns the names that vLLM (0.32) gives these metrics. An engine that does not have them is not wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_USED = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)
_DEFERRED = re.compile(
    r'^vllm:num_requests_waiting_by_reason\{[^\n]*?reason="deferred"[^\n]*\} (\S+)$', re.MULTILINE
)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{[^\n]*?num_gpu_blocks="(\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KvGauges:
    """Of all data parallel ranks of an engine together."""

    used_share: float
    """Blocks in use, 0 to 1; cached blocks that nobody uses are free."""
    blocks: int
    """All there are; 0 when the engine does not say."""
    busy: int
    """Requests that run or wait in the engine, whoever sent them."""
    deferred: int = 0
    """Those of them that wait for their KV."""


def parse_kv(text: str) -> KvGauges | None:
    """None when the text does not tell how much of the cache is in use."""
    try:
        used = [float(value) for value in _USED.findall(text)]
        busy = sum(float(value) for value in _BUSY.findall(text))
        deferred = sum(float(value) for value in _DEFERRED.findall(text))
        blocks = sum(int(value) for value in _BLOCKS.findall(text))
        if not used or not all(0 <= share <= 1 for share in used):
            return None
        return KvGauges(sum(used) / len(used), blocks, int(busy), int(deferred))
    except (ValueError, OverflowError):
        return None
