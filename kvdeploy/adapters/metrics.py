"""Read a vLLM server's /metrics. Owns the names that vLLM gives its metrics; judges nothing."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvdeploy.errors import FleetError
from kvdeploy.model.counters import EngineCounters

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

COUNTERS: Final = {
    "vllm:nixl_bytes_transferred_sum": "pushed_bytes",
    "vllm:nixl_bytes_transferred_count": "transfers",
    "vllm:nixl_num_descriptors_sum": "descriptors",
    "vllm:nixl_num_failed_transfers_total": "failed_transfers",
    "vllm:nixl_num_failed_notifications_total": "failed_notifications",
    "vllm:nixl_num_kv_expired_reqs_total": "kv_expired",
    "vllm:nixl_num_notifications_after_expiry_total": "late_notifications",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
"""Samples that are summed over ranks, and the fields they become.

Source: vllm/v1/metrics/loggers.py and
vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py, read in 0.32.
"""

TIMES: Final = {
    "vllm:nixl_xfer_time_seconds_sum": "transfer_s",
    "vllm:nixl_post_time_seconds_sum": "post_s",
}
"""The same, in seconds."""

BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
USAGE: Final = "vllm:kv_cache_usage_perc"

MAX_BYTES: Final = 16 * 1024 * 1024
"""A vLLM page is about 0.1 MiB; whatever is larger than this is not one."""


def fetch_counters(url: str, *, timeout_s: float) -> EngineCounters:
    """Ask the server at `url` (http://host:port) for its counters.

    Proxies named in the environment are not asked. Raises FleetError, naming the server, when
    it does not answer within `timeout_s` a network step, or answers something else.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=timeout_s
    )
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as e:
        msg = f"{url}/metrics: no answer: {str(e) or type(e).__name__}"
        raise FleetError(msg, hint="is the engine up? `kvdeploy status` says") from e
    finally:
        connection.close()
    if response.status != 200:
        msg = f"{url}/metrics: answered {response.status} {response.reason}"
        raise FleetError(msg, hint="the URL must be that of a vLLM server")
    try:
        return parse_counters(body.decode())
    except (ValueError, OverflowError) as e:  # the latter: a count of +Inf
        msg = f"{url}/metrics: not in Prometheus' text format: {e}"
        raise FleetError(msg, hint="the URL must be that of a vLLM server") from e


def parse_counters(text: str) -> EngineCounters:
    """Read Prometheus' text format. Raises ValueError when it is something else.

    Several ranks (the label `engine`) are added up, but of the cache usages the highest counts.
    """
    sums: dict[str, int] = {}
    times: dict[str, float] = {}
    sources: dict[str, int] = {}
    deferred: list[int] = []
    usages: list[float] = []
    for sample in _samples(text):
        if field := COUNTERS.get(sample.name):
            sums[field] = sums.get(field, 0) + int(sample.value)
        elif field := TIMES.get(sample.name):
            times[field] = times.get(field, 0.0) + sample.value
        elif sample.name == BY_SOURCE:
            source = sample.labels.get("source", "")
            sources[source] = sources.get(source, 0) + int(sample.value)
        elif sample.name == BY_REASON and sample.labels.get("reason") == "deferred":
            deferred.append(int(sample.value))
        elif sample.name == USAGE:
            usages.append(sample.value)
    seen = {"prompt_tokens_by_source": sources, "deferred": deferred, "kv_cache_usage": usages}
    return EngineCounters(
        **sums,
        transfer_s=times.get("transfer_s", 0.0),
        post_s=times.get("post_s", 0.0),
        prompt_tokens_by_source=sources,
        deferred=sum(deferred),
        kv_cache_usage=max(usages, default=0.0),
        present=frozenset(sums | times) | {name for name, values in seen.items() if values},
    )


def _samples(text: str) -> list[Sample]:
    return [s for family in text_string_to_metric_families(text) for s in family.samples]
