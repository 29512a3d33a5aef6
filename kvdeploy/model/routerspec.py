"""Section `router` of the cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvdeploy.model.base import Change, Frozen, knob


class DeadlinesSpec(Frozen):
    """Bounds on every leg of a request, in seconds."""

    body_s: float = knob(
        30.0, doc="for a client's whole request to arrive", change=Change.RELOAD, gt=0, le=86400
    )
    connect_s: float = knob(5.0, doc="to connect to an engine", change=Change.ROUTER, gt=0, le=600)
    prefill_s: float = knob(
        120.0, doc="for the prefill leg to answer", change=Change.RELOAD, gt=0, le=86400
    )
    first_token_s: float = knob(
        120.0, doc="for decode's first byte of a stream", change=Change.RELOAD, gt=0, le=86400
    )
    inter_token_s: float = knob(
        60.0, doc="between two bytes of a stream", change=Change.RELOAD, gt=0, le=86400
    )
    total_s: float = knob(600.0, doc="for the whole request", change=Change.RELOAD, gt=0, le=86400)


class RouterSpec(Frozen):
    """The one address that clients use."""

    host: str = knob("127.0.0.1", doc="address to listen on", change=Change.ROUTER, min_length=1)
    port: int = knob(8000, doc="port to listen on", change=Change.ROUTER, ge=1, le=65535)
    admin_port: int | None = knob(
        None,
        doc="port of /admin, on 127.0.0.1 only; default: none",
        change=Change.ROUTER,
        ge=1,
        le=65535,
    )
    workers: int = knob(
        1,
        doc="processes that serve the port; each has its part of caps and queue",
        change=Change.ROUTER,
        ge=1,
        le=64,
    )
    policy: Literal["least-loaded", "round-robin"] = knob(
        "least-loaded", doc="how pairs are chosen: least-loaded, round-robin", change=Change.RELOAD
    )
    deadlines: DeadlinesSpec = knob(
        DeadlinesSpec(), doc="bounds on every leg, in seconds", change=Change.RELOAD
    )
    mode: Literal["auto", "push", "push-sequential", "pull", "aggregated"] = knob(
        "auto",
        doc="auto (as connector.mode), push, push-sequential, pull, aggregated (for comparison)",
        change=Change.RELOAD,
    )
    mode_header: bool = knob(
        default=False,
        doc="let X-Kvdeploy-Mode choose the mode of a request",
        change=Change.RELOAD,
    )
    aggregate_below_tokens: int = knob(
        0,
        doc="prompts shorter than this go to decode alone; 0: none",
        change=Change.RELOAD,
        ge=0,
        le=10_000_000,
    )
    tries: int = knob(
        3,
        doc="pairs a request may be sent to before its first byte",
        change=Change.RELOAD,
        ge=1,
        le=10,
    )
    eject_after: int = knob(
        3,
        doc="failures in a row, within eject_window_s, that take an engine out of use",
        change=Change.RELOAD,
        ge=1,
        le=1000,
    )
    eject_window_s: float = knob(
        30.0, doc="seconds that a failure counts", change=Change.RELOAD, gt=0, le=3600
    )
    drain_lost_share: float = knob(
        0.25,
        doc="drain a decode that may have lost so much of its KV to requests whose KV never came",
        change=Change.RELOAD,
        gt=0,
        le=1,
    )
    prefill_at_once: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] | None = knob(
        "auto",  # by docs/benchmarks/2026-12-01-h200x1.json
        doc="prompts a prefill engine is given at once: auto (what keeps it busy), N, null: any",
        change=Change.RELOAD,
    )
    decode_at_once: int | None = knob(
        None,
        doc="requests a decode engine is given at once, by all workers; default: any number",
        change=Change.RELOAD,
        ge=1,
        le=100_000,
    )
    queue_size: int = knob(
        1024,
        doc="requests that may wait for an engine to have room, at all workers",
        change=Change.RELOAD,
        ge=0,
        le=1_000_000,
    )
    queue_wait_s: float = knob(
        120.0, doc="longest wait for room, in seconds", change=Change.RELOAD, gt=0, le=86400
    )
    max_body_mib: float = knob(
        32.0, doc="largest request body", change=Change.ROUTER, gt=0, le=1024
    )
    api_key_file: str | None = knob(
        None,
        doc="file with API keys or sha256:HASH, one a line; needed when host is not loopback",
        change=Change.RELOAD,
    )
    allow_anonymous: bool = knob(
        default=False,
        doc="serve without API keys although host is not loopback",
        change=Change.RELOAD,
    )
    tls_cert_file: str | None = knob(
        None,
        doc="serve https with this certificate chain (PEM); default: http",
        change=Change.ROUTER,
    )
    tls_key_file: str | None = knob(
        None, doc="its key (PEM, without a passphrase)", change=Change.ROUTER
    )
    pair_header: bool = knob(
        default=True,
        doc="let X-Kvdeploy-Pair: PREFILL/DECODE choose the pair; smoke needs it",
        change=Change.RELOAD,
    )
    warm_pairs: bool = knob(
        default=True,
        doc="false: a pair's first request is a client's; only to measure what warming saves",
        change=Change.RELOAD,
    )

    @property
    def tls_files(self) -> tuple[str, str] | None:
        """Certificate and key; None when either is not given."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return self.tls_cert_file, self.tls_key_file

    @property
    def ports(self) -> set[int]:
        """What it listens on."""
        return {port for port in (self.port, self.admin_port) if port is not None}
