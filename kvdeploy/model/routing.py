"""What the router is told: who the engines are and how long anything may take."""

from __future__ import annotations

from ipaddress import ip_address
from math import ceil
from typing import Literal

from kvdeploy.model.base import Stored
from kvdeploy.model.launch import GENERATION


class Engine(Stored):
    """One vLLM server as the router sees it."""

    name: str
    role: Literal["prefill", "decode"]
    url: str
    """http://host:port, no path."""
    engine_id: str = ""
    """As planned, with a place for the generation that the engine itself tells at warm-up."""
    side_channel_host: str = ""
    side_channel_port: int = 0
    """Of data parallel rank 0; rank r listens on the port plus r."""
    tp_size: int = 1
    dp_size: int = 1

    @property
    def id_prefix(self) -> str:
        """What the id of every start of this engine begins with; empty expects nothing."""
        return self.engine_id.partition(GENERATION)[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


Mode = Literal["push", "push-sequential", "pull", "aggregated"]
"""How a request is served: both legs at once; decode after prefill, by push or by pull; decode
alone.
"""
Connector = Literal["push", "pull"]
MODES: dict[Connector, tuple[Mode, ...]] = {
    "push": ("push", "push-sequential", "aggregated"),
    "pull": ("pull", "aggregated"),
}
"""What engines with this connector can do: a leg of the other kind ends decode's process."""


WARMUP_FAILED = "warm-up failed"
"""How the reason begins why a pair is not ready that the router has tried in vain."""


class Deadlines(Stored):
    """Seconds."""

    body_s: float = 30.0
    """For a client's whole request to arrive."""
    connect_s: float = 5.0
    prefill_s: float = 120.0
    first_token_s: float = 120.0
    inter_token_s: float = 60.0
    total_s: float = 600.0


_FROM_START = ("host", "port", "admin_port", "workers", "max_body_bytes")


class RouterConfig(Stored):
    """The router's whole configuration, read from one JSON file."""

    host: str
    port: int
    admin_port: int | None = None
    """Of /admin, on 127.0.0.1; None is nowhere."""
    served_model: str
    mode: Connector = "push"
    """The engines' connector."""
    dispatch: Mode | None = None
    """How requests are served; None is as the connector's name says."""
    mode_header: bool = False
    """Whether a client may choose it."""
    aggregate_below_tokens: int = 0
    """Prompts shorter than this, by estimate, go to decode alone."""
    policy: Literal["least-loaded", "round-robin"] = "least-loaded"
    workers: int = 1
    """Processes that serve one port; each has its part of the limits below."""
    engines: tuple[Engine, ...]
    deadlines: Deadlines = Deadlines()
    tries: int = 3
    """How many pairs a request may be sent to before its first byte."""
    eject_after: int = 3
    """Failures in a row, within `eject_window_s` seconds, that take an engine out of use."""
    eject_window_s: float = 30.0
    block_size: int = 128
    """Tokens a KV block."""
    drain_lost_share: float = 0.25
    """A decode that may have lost so much of its KV to requests whose KV never came is drained."""
    prefill_at_once: int | Literal["auto"] | None = None
    """Requests that a prefill engine is given at once; None is any number, auto is found."""
    decode_at_once: int | None = None
    """Requests that a decode engine is given at once; None is any number."""
    queue_size: int = 1024
    """Requests that may wait for room."""
    queue_wait_s: float = 120.0
    """Longest wait for room."""
    max_body_bytes: int = 32 * 1024 * 1024
    api_key_file: str | None = None
    allow_anonymous: bool = False
    """Serve whoever reaches the port from another machine, without keys."""
    tls_cert_file: str | None = None
    """The certificate's chain and its key, as PEM; both or none."""
    tls_key_file: str | None = None
    pair_header: bool = True
    warm_pairs: bool = True
    """False leaves pairs cold whose prefill is known already: their first request warms them."""
    health_interval_s: float = 1.0
    """Between two looks at an engine."""
    metrics_interval_s: float = 1.0
    """Between two looks at decode's metrics."""
    warmup_tokens: int = 1
    """Length of the warm-up prompt; one token more than a KV block makes a pair move data."""

    def at_start(self) -> dict[str, object]:
        """What a router takes up when it starts; a hangup is enough for all the rest."""
        return {name: getattr(self, name) for name in _FROM_START} | {
            "deadlines.connect_s": self.deadlines.connect_s,
            "tls": self.tls_cert_file is not None,
        }

    def keep_from_start(self, started: RouterConfig) -> RouterConfig:
        """What of it a router that was started with another configuration takes up."""
        names = [*_FROM_START]
        if (self.tls_cert_file is None) != (started.tls_cert_file is None):
            names += ["tls_cert_file", "tls_key_file"]
        connect_s = started.deadlines.connect_s
        return self.model_copy(
            update={
                **{name: getattr(started, name) for name in names},
                "deadlines": self.deadlines.model_copy(update={"connect_s": connect_s}),
            }
        )

    def share(self, workers: int) -> RouterConfig:
        """What one of several workers is told: its part of what is meant for all together."""
        if workers == 1:
            return self
        limits = ("prefill_at_once", "decode_at_once", "queue_size")
        parts = {
            name: ceil(value / workers)
            for name in limits
            if isinstance(value := getattr(self, name), int)
        }
        return self.model_copy(
            update={**parts, "drain_lost_share": self.drain_lost_share / workers}
        )

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it, and no keys are asked for."""
        return self.api_key_file is None and not is_loopback(self.host)

    @property
    def usual_mode(self) -> Mode:
        return self.dispatch or self.mode

    def by_role(self, role: Literal["prefill", "decode"]) -> tuple[Engine, ...]:
        return tuple(e for e in self.engines if e.role == role)
