"""The engines and pairs as the router knows them now: health, identity, warmth and load.

Owns every mutable fact about engines, in one object that can be replaced whole. Never does I/O:
health and dispatch tell it what they saw.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvdeploy.router.policy import PairLoad, choose_pair, order_pairs
from kvdeploy.router.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.model.routing import Engine, RouterConfig
    from kvdeploy.router.errors import EngineFailureError
    from kvdeploy.router.legs import Coordinates
    from kvdeploy.router.metrics import Metrics

log = logging.getLogger(__name__)

PairState = Literal["ready", "warming", "down", "refused"]
EngineCondition = Literal["up", "down", "refused"]
CONDITIONS: tuple[EngineCondition, ...] = ("up", "down", "refused")


@dataclass(eq=False)
class EngineState:
    """One engine. `epoch` counts its lives: what was learned in an earlier one is void."""

    engine: Engine
    up: bool = False
    refused: bool = False
    """It said to be an engine that the table does not have in this place."""
    reason: str = "not probed yet"
    epoch: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    identities: dict[int | None, Coordinates] = field(default_factory=dict)
    """By data parallel rank; None is the only rank of an engine without data parallelism."""
    standing: Standing = field(default_factory=Standing)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: int = 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def condition(self) -> EngineCondition:
        if not self.up:
            return "down"
        return "refused" if self.refused else "up"

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(range(self.engine.dp_size)) if self.engine.dp_size > 1 else (None,)

    def next_rank(self) -> int | None:
        self._turn += 1
        return self.ranks[(self._turn - 1) % len(self.ranks)]


@dataclass(eq=False)
class Pair:
    """One prefill and decode engine that may serve a request together."""

    prefill: EngineState
    decode: EngineState
    warmed: tuple[int, int] | None = None
    """The epochs of both engines when a request last went through them."""
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.prefill.name}/{self.decode.name}"

    @property
    def epochs(self) -> tuple[int, int]:
        return self.prefill.epoch, self.decode.epoch

    @property
    def up(self) -> bool:
        """Whether a request may be sent over the pair, if only to warm it."""
        return self.prefill.condition == self.decode.condition == "up"

    @property
    def state(self) -> PairState:
        if not self.up:
            conditions = {self.prefill.condition, self.decode.condition}
            return "down" if "down" in conditions else "refused"
        if self.warmed == self.epochs:
            return "ready"
        return "down" if self.failures else "warming"

    def explain(self) -> str:
        """Why the pair is not ready, or nothing."""
        for engine in (self.prefill, self.decode):
            if engine.condition != "up":
                return f"{engine.name}: {engine.reason}"
        return self.reason if self.state == "down" else ""

    @property
    def load(self) -> PairLoad:
        return PairLoad(self.name, self.prefill.prompt_tokens, self.decode.requests)


@dataclass(frozen=True, slots=True)
class Route:
    """A pair with one data parallel rank chosen on each side."""

    prefill: EngineState
    decode: EngineState
    prefill_rank: int | None
    decode_rank: int | None

    @property
    def name(self) -> str:
        return f"{self.prefill.name}/{self.decode.name}"


class Table:
    """All engines of one configuration."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.config = config
        self._metrics = metrics
        self._turn = 0
        self.engines = {engine.name: EngineState(engine) for engine in config.engines}
        ordered = order_pairs(
            [e.name for e in config.by_role("prefill")],
            [e.name for e in config.by_role("decode")],
        )
        pairs = [Pair(self.engines[prefill], self.engines[decode]) for prefill, decode in ordered]
        self.pairs = {pair.name: pair for pair in pairs}
        metrics.declare(config.engines)
        self.refresh()

    def by_decode(self, decode: EngineState) -> list[Pair]:
        return [pair for pair in self.pairs.values() if pair.decode is decode]

    def loads(self, allows: Callable[[Pair], bool] = lambda _: True) -> list[PairLoad]:
        ready = [pair for pair in self.pairs.values() if pair.state == "ready"]
        return [pair.load for pair in ready if allows(pair)]

    def choose(self, allows: Callable[[Pair], bool]) -> Route | None:
        """The best ready pair of those that are allowed."""
        name = choose_pair(self.config.policy, self.loads(allows), self.next_turn())
        return None if name is None else self.build_route(self.pairs[name])

    def states(self) -> dict[str, str]:
        return {name: self.pairs[name].state for name in sorted(self.pairs)}

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn - 1

    def build_route(self, pair: Pair) -> Route:
        return Route(pair.prefill, pair.decode, pair.prefill.next_rank(), pair.decode.next_rank())

    def admit(self, engine: EngineState) -> None:
        """Healthy again; its pairs are used once they are warm."""
        if engine.up:
            return
        engine.up = True
        log.info("admitted engine=%s after: %s", engine.name, engine.reason)
        engine.reason = ""
        for pair in self.pairs.values():
            if engine in {pair.prefill, pair.decode}:
                pair.failures, pair.retry_at, pair.reason = 0, 0.0, ""
                pair.decode.wake.set()
        self.refresh()

    def eject(self, engine: EngineState, reason: str) -> None:
        """Out of use until it is healthy again and its pairs are warm again."""
        engine.reason = reason
        if engine.up:
            engine.up = engine.refused = False
            engine.epoch += 1
            engine.identities.clear()
            self._metrics.ejections.labels(engine.name).inc()
            log.warning("ejected engine=%s: %s", engine.name, reason)
        self.refresh()

    def blame(self, route: Route, error: EngineFailureError) -> None:
        """A request has failed on the route. Who fails again and again is ejected; where nobody
        can tell who it was, the pair must show by a real push that it still works.
        """
        if not error.engine and error.code == "first_token_deadline":
            self._cool(self.pairs[route.name], error.message)
        engine = self.engines.get(error.engine)
        if engine is None or error.lost or not engine.up:
            return
        limit, window_s = self.config.eject_after, self.config.eject_window_s
        now = asyncio.get_running_loop().time()
        if engine.standing.fail(now, limit=limit, window_s=window_s):
            self.eject(engine, f"{limit} failures within {window_s} s, the last: {error.message}")

    def praise(self, route: Route) -> None:
        """A request has had its first byte."""
        route.prefill.standing.succeed()
        route.decode.standing.succeed()

    def _cool(self, pair: Pair, reason: str) -> None:
        pair.warmed = None
        log.warning("cooled pair=%s: %s", pair.name, reason)
        pair.decode.wake.set()
        self.refresh()

    def refuse(self, engine: EngineState, reason: str) -> None:
        """A healthy engine that is not the one the table means: kept out until it is another."""
        engine.reason = reason
        if not engine.refused:
            engine.refused = True
            engine.epoch += 1
            engine.identities.clear()
            self._metrics.refusals.labels(engine.name).inc()
            log.error("refused engine=%s: %s", engine.name, reason)
        self.refresh()

    def pardon(self, engine: EngineState) -> None:
        """Let a refused engine say again who it is: another may have taken its place."""
        if engine.refused:
            engine.refused = False
            self._wake(engine)
            self.refresh()

    def identify(self, prefill: EngineState, rank: int | None, found: Coordinates) -> bool:
        """Adopt what P says it is; True when that ends an earlier identity of the same rank.

        The caller has made sure that the id is one of the table's (`Engine.id_prefix`).
        """
        known = prefill.identities.get(rank)
        if known == found:
            return False
        log.info(
            "identified engine=%s rank=%s as %s at %s:%s",
            prefill.name,
            rank,
            found.engine_id,
            found.host,
            found.port,
        )
        if known is None:
            prefill.identities[rank] = found
            return False
        # Whatever the other ranks were called belongs to the same earlier life.
        prefill.identities = {rank: found}
        self.renew(prefill, f"now has the engine id {found.engine_id}, was {known.engine_id}")
        return True

    def renew(self, engine: EngineState, reason: str) -> None:
        """The engine started anew unseen: its pairs must be warmed again before use."""
        engine.epoch += 1
        log.warning("restarted engine=%s: %s", engine.name, reason)
        self._wake(engine)
        self.refresh()

    def _wake(self, engine: EngineState) -> None:
        for pair in self.pairs.values():
            if engine in {pair.prefill, pair.decode}:
                pair.decode.wake.set()

    def refresh(self) -> None:
        for engine in self.engines.values():
            for condition in CONDITIONS:
                state = self._metrics.engine_state.labels(engine.name, condition)
                state.set(engine.condition == condition)
        for pair in self.pairs.values():
            gauge = self._metrics.pair_ready.labels(pair.prefill.name, pair.decode.name)
            gauge.set(pair.state == "ready")
