"""The router's own Prometheus metrics, in a registry of their own.

Owns names, labels and buckets. Never labels by anything a client chooses.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvdeploy.model.routing import Mode
from kvdeploy.router.errors import CODES, RETRIED
from kvdeploy.router.legs import Endpoint
from kvdeploy.router.shared import COMPLETE, Shared
from kvdeploy.router.states import CONDITIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdeploy.model.routing import Engine

ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
STATUSES = (200, 400, 401, 404, 408, 413, 415, 429, 499, 500, 502, 503, 504)
"""What the two endpoints answer of their own; an engine's refusal can have another."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self, folder: str | None = None) -> None:
        """`folder` has what the workers of this router count together; None is a router alone."""
        self.shared = Shared(folder) if folder else None
        self.registry = CollectorRegistry()
        at = self.registry
        self.requests = Counter(
            "kvdeploy_router_requests_total",
            "Requests answered; 499 is a client that left",
            ("endpoint", "status"),
            registry=at,
        )
        self.errors = Counter(
            "kvdeploy_router_errors_total",
            "Errors told to clients by code, those inside a stream included",
            ("code",),
            registry=at,
        )
        self.request_seconds = Histogram(
            "kvdeploy_router_request_seconds",
            "From the request's headers to its last byte",
            ("endpoint",),
            buckets=_SECONDS,
            registry=at,
        )
        self.ttft_seconds = Histogram(
            "kvdeploy_router_ttft_seconds",
            "From the request's headers to decode's first byte; streams only",
            ("endpoint",),
            buckets=_SECONDS,
            registry=at,
        )
        self.leg_seconds = Histogram(
            "kvdeploy_router_leg_seconds",
            "One leg, sent to ended",
            ("engine", "role"),
            buckets=_SECONDS,
            registry=at,
        )
        self.in_flight = Gauge(
            "kvdeploy_router_in_flight",
            "Legs that an engine holds",
            ("engine",),
            registry=at,
            multiprocess_mode="livesum",
        )
        self.lost_writes = Counter(
            "kvdeploy_router_lost_writes_total",
            "Requests whose KV never reached decode: its blocks may be lost until it restarts",
            ("decode",),
            registry=at,
        )
        self.reloads = Counter(
            "kvdeploy_router_reloads_total",
            "Configurations read again, by whether they were taken up",
            ("outcome",),
            registry=at,
        )
        self.sent = Counter(
            "kvdeploy_router_sent_total", "Tries sent to engines, by mode", ("mode",), registry=at
        )
        self.queued = Gauge(
            "kvdeploy_router_queued",
            "Requests that wait for an engine to have room",
            registry=at,
            multiprocess_mode="livesum",
        )
        self.queue_seconds = Histogram(
            "kvdeploy_router_queue_seconds",
            "Time in the queue, of requests that had to wait",
            buckets=_SECONDS,
            registry=at,
        )
        self.prefill_limit = Gauge(
            "kvdeploy_router_prefill_limit",
            "Requests that a prefill engine is given at once; +Inf is any number",
            ("engine",),
            registry=at,
        )
        self.choices = Counter(
            "kvdeploy_router_choices_total",
            "Requests given to an engine, and whether it had been sent the prompt's beginning",
            ("engine", "by"),
            registry=at,
        )
        self.lost_blocks = Gauge(
            "kvdeploy_router_lost_blocks",
            "KV blocks that decode may hold for requests whose KV never came; an estimate",
            ("decode",),
            registry=at,
            multiprocess_mode="livesum",
        )
        self.ejections = Counter(
            "kvdeploy_router_ejections_total", "Engines taken out of use", ("engine",), registry=at
        )
        self.retries = Counter(
            "kvdeploy_router_retries_total",
            "Tries on another pair, by the code of the failure before",
            ("reason",),
            registry=at,
        )
        self.retried = Counter(
            "kvdeploy_router_retried_requests_total",
            "Requests that were tried more than once, by how they ended",
            ("outcome",),
            registry=at,
        )
        self.refusals = Counter(
            "kvdeploy_router_refusals_total",
            "Engines that said to be another than the table has in their place",
            ("engine",),
            registry=at,
        )
        self.engine_state = Gauge(
            "kvdeploy_router_engine_state",
            "1 for the state that an engine is in, for any worker",
            ("engine", "state"),
            registry=at,
            multiprocess_mode="livemax",
        )
        self.pair_ready = Gauge(
            "kvdeploy_router_pair_ready",
            "1 when a pair is warm and both engines are healthy, for every worker",
            ("prefill", "decode"),
            registry=at,
            multiprocess_mode="livemin",
        )
        self.background_legs = Gauge(
            "kvdeploy_router_background_legs",
            "Prefill legs whose client has been answered or has left",
            registry=at,
            multiprocess_mode="livesum",
        )
        self.workers = Gauge(
            "kvdeploy_router_workers",
            "Processes that serve",
            registry=at,
            multiprocess_mode="livesum",
        )
        self.complete = Gauge(
            COMPLETE,
            "Workers for which every pair is ready",
            registry=at,
            multiprocess_mode="livesum",
        )
        self.workers.set(1)
        # Looked up for every request; what they name is never removed.
        for often in (self.requests, self.request_seconds, self.ttft_seconds, self.leg_seconds,
                      self.in_flight, self.sent, self.choices):  # fmt: skip
            often.labels = cache(often.labels)  # type: ignore[method-assign, assignment]

    def declare(self, engines: Iterable[Engine]) -> None:
        """Every counter of these engines is there before it first counts, so that a first step
        is a step and not a beginning.
        """
        engines = tuple(engines)
        if self.shared is not None:
            self.shared.engines = frozenset(engine.name for engine in engines)
        for endpoint in ENDPOINTS:
            self.request_seconds.labels(endpoint)
            self.ttft_seconds.labels(endpoint)
            for status in STATUSES:
                self.requests.labels(endpoint, str(status))
        for code in CODES:
            self.errors.labels(code)
        for code in RETRIED:
            self.retries.labels(code)
        for outcome in ("done", "refused"):
            self.reloads.labels(outcome)
        for mode in get_args(Mode):
            self.sent.labels(mode)
        for outcome in ("served", "failed"):
            self.retried.labels(outcome)
        for engine in engines:
            self.leg_seconds.labels(engine.name, engine.role)
            self.in_flight.labels(engine.name)
            for by in ("load", "prefix"):
                self.choices.labels(engine.name, by)
            self.ejections.labels(engine.name)
            self.refusals.labels(engine.name)
            if engine.role == "decode":
                self.lost_writes.labels(engine.name)
                self.lost_blocks.labels(engine.name)

    def forget(self, engines: Iterable[str], pairs: Iterable[str]) -> None:
        """Gauges of what is no longer in the table; what was counted stays."""
        if self.shared is not None:
            return  # there they are left out of what is shown
        for name in engines:
            for state in CONDITIONS:
                self.engine_state.remove(name, state)
            with contextlib.suppress(KeyError):
                self.lost_blocks.remove(name)
            with contextlib.suppress(KeyError):
                self.prefill_limit.remove(name)
        for pair in pairs:
            self.pair_ready.remove(*pair.split("/"))

    def render(self) -> bytes:
        """Of all workers together, whichever is asked."""
        return generate_latest(self.shared or self.registry)
