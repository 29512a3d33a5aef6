"""What engines hold, and whether they are given more.

Owns the counting of legs and the reading of `prefill_at_once` and `decode_at_once`. Never chooses.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kvdeploy.router.pacing import weigh

if TYPE_CHECKING:
    from kvdeploy.model.routing import RouterConfig
    from kvdeploy.router.metrics import Metrics
    from kvdeploy.router.states import EngineState


def count(
    config: RouterConfig, metrics: Metrics, engine: EngineState, *, tokens: int, requests: int
) -> None:
    """A leg was sent to the engine, or has ended there."""
    engine.prompt_tokens += tokens
    engine.requests += requests
    metrics.in_flight.labels(engine.name).set(engine.requests)
    if engine.pacer is not None:
        work = weigh(engine.requests, engine.prompt_tokens)
        engine.pacer.tell(time.perf_counter(), held=engine.requests, work=work)
        show_limit(config, metrics, engine)


def find_limit(config: RouterConfig, engine: EngineState) -> int | None:
    """Requests that the engine is given at once; None is any number."""
    if engine.engine.role == "decode":
        return config.decode_at_once
    if config.prefill_at_once == "auto":
        return engine.pacer.limit if engine.pacer else None
    return config.prefill_at_once


def has_room(config: RouterConfig, engine: EngineState) -> bool:
    if engine.pacer is not None and config.prefill_at_once == "auto":
        return engine.pacer.has_room(time.perf_counter())
    most = find_limit(config, engine)
    return most is None or engine.requests < most


def show_limit(config: RouterConfig, metrics: Metrics, engine: EngineState) -> None:
    limit = find_limit(config, engine)
    metrics.prefill_limit.labels(engine.name).set(math.inf if limit is None else limit)
