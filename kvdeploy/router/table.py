"""The engines and pairs as the router knows them now: health, identity, warmth and load.

Owns every mutable fact about engines, and what of it stays when the configuration changes. Never
does I/O: health and dispatch tell it what they saw. Legs of engines that are no longer in the table
go on and may still be told of: that changes nothing here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvdeploy.router import loads
from kvdeploy.router.errors import EngineBusyError, EngineFailureError
from kvdeploy.router.pacing import Backlog, Pacer
from kvdeploy.router.policy import order_pairs
from kvdeploy.router.states import CONDITIONS, EngineState, Pair, Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.model.routing import Engine, RouterConfig
    from kvdeploy.router.gauges import KvGauges
    from kvdeploy.router.legs import Coordinates
    from kvdeploy.router.metrics import Metrics

log = logging.getLogger(__name__)

SETTLED_S = 10.0
"""How long a decode without requests may still be written to."""


def _nothing() -> None:
    pass


class Table:
    """All engines of one configuration."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.config = config
        self.engines: dict[str, EngineState] = {}
        self.pairs: dict[str, Pair] = {}
        self.backlog = Backlog()
        self.on_change: Callable[[], None] = _nothing
        """Told when an engine may have got room, or a pair has become ready or not."""
        self._metrics = metrics
        self._of: dict[str, list[Pair]] = {}
        self._open: list[EngineState] = []
        self._open_decodes: list[EngineState] = []
        self._partners: dict[str, list[EngineState]] = {}
        self.reload(config)

    def reload(self, config: RouterConfig) -> None:
        """Engines that are described as before stay as they are, their pairs warm."""
        were_left_cold = not self.config.warm_pairs
        gone, self.config = self.engines, config
        self.engines = {
            engine.name: known
            if (known := gone.get(engine.name)) and known.engine == engine
            else EngineState(engine, pacer=self._build_pacer(engine))
            for engine in config.engines
        }
        old, self.pairs = self.pairs, {}
        self._of = {name: [] for name in self.engines}
        for names in order_pairs(
            [e.name for e in config.by_role("prefill")],
            [e.name for e in config.by_role("decode")],
        ):
            pair = Pair(self.engines[names[0]], self.engines[names[1]])
            known_pair = old.get(pair.name)
            if known_pair and known_pair.is_of(pair.prefill, pair.decode):
                pair = known_pair
            if were_left_cold and config.warm_pairs:
                pair.warmed = None
                pair.decode.wake.set()
            self.pairs[pair.name] = pair
            for name in names:
                self._of[name].append(pair)
        self._metrics.declare(config.engines)
        self._metrics.forget(gone.keys() - self.engines.keys(), old.keys() - self.pairs.keys())
        self._partners = {engine.name: [] for engine in config.by_role("prefill")}
        self._open = []
        self._metrics.complete.set(0)
        self.refresh()

    def _build_pacer(self, engine: Engine) -> Pacer | None:
        return Pacer(self.backlog, least=engine.dp_size) if engine.role == "prefill" else None

    def by_decode(self, decode: EngineState) -> list[Pair]:
        return self._of.get(decode.name, [])

    @property
    def open_prefills(self) -> list[EngineState]:
        """Prefills with a ready pair."""
        return self._open

    @property
    def open_decodes(self) -> list[EngineState]:
        """Decodes that are up, whether or not a prefill is warm for them."""
        return self._open_decodes

    def partners(self, prefill: EngineState) -> list[EngineState]:
        """Decodes that are ready for the prefill."""
        return self._partners.get(prefill.name, [])

    def states(self) -> dict[str, str]:
        return {name: self.pairs[name].state for name in sorted(self.pairs)}

    def build_route(self, pair: Pair) -> Route:
        return Route(pair.prefill, pair.decode, pair.prefill.next_rank(), pair.decode.next_rank())

    def admit(self, engine: EngineState) -> None:
        """Healthy again; its pairs are used once they are warm."""
        if engine.up:
            return
        engine.up = True
        log.info("admitted engine=%s after: %s", engine.name, engine.reason)
        engine.reason = ""
        for pair in self._of.get(engine.name, []):
            pair.failures, pair.retry_at, pair.reason = 0, 0.0, ""
            pair.decode.wake.set()
        self.refresh(engine)

    def eject(self, engine: EngineState, reason: str, *, is_dead: bool = True) -> None:
        """Out of use until it is healthy again and its pairs are warm again. What waits for an
        engine that is dead or frozen is told; one that only fails may yet answer the others.
        """
        engine.reason = reason
        if engine.up:
            engine.up = engine.refused = False
            engine.epoch += 1
            engine.identities.clear()
            self._metrics.ejections.labels(engine.name).inc()
            log.warning("ejected engine=%s: %s", engine.name, reason)
            if is_dead:
                engine.end_life()
        self.refresh(engine)

    def blame(self, route: Route, error: EngineFailureError) -> None:
        """A request has failed on the route. Who fails again and again is ejected; where nobody
        can tell who it was, the pair must show by a real push that it still works.
        """
        if not error.engine and error.code == "first_token_deadline":
            pair = self.pairs.get(route.name)
            if pair and pair.is_of(route.prefill, route.decode):
                self._cool(pair, error.message)
        by_name = {engine.name: engine for engine in (route.prefill, route.decode)}
        engine = by_name.get(error.engine)
        # Who lost the connection is out already, and who has no room is not sick.
        is_other = error.lost or isinstance(error, EngineBusyError)
        if engine is None or is_other or not engine.up:
            return
        limit, window_s = self.config.eject_after, self.config.eject_window_s
        now = asyncio.get_running_loop().time()
        if engine.standing.fail(now, limit=limit, window_s=window_s):
            reason = f"{limit} failures within {window_s} s, the last: {error.message}"
            self.eject(engine, reason, is_dead=False)

    def praise(self, route: Route) -> None:
        """A request has had its first byte."""
        route.prefill.standing.succeed()
        route.decode.standing.succeed()

    def _cool(self, pair: Pair, reason: str) -> None:
        pair.warmed = None
        log.warning("cooled pair=%s: %s", pair.name, reason)
        pair.decode.wake.set()
        self.show(pair)

    def refuse(self, engine: EngineState, reason: str) -> None:
        """A healthy engine that is not the one the table means: kept out until it is another."""
        engine.reason = reason
        if not engine.refused:
            engine.refused = True
            engine.epoch += 1
            engine.identities.clear()
            self._metrics.refusals.labels(engine.name).inc()
            log.error("refused engine=%s: %s", engine.name, reason)
        self.refresh(engine)

    def pardon(self, engine: EngineState) -> None:
        """Let a refused engine say again who it is: another may have taken its place."""
        if engine.refused:
            engine.refused = False
            self._wake(engine)
            self.refresh(engine)

    def hold(self, engine: EngineState, *, held: bool) -> None:
        """No new requests for the engine, or again; those that it has go on."""
        if engine.held != held:
            engine.held = held
            log.warning("%s engine=%s", "drained" if held else "undrained", engine.name)
            self._wake(engine)
            self.refresh(engine)

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
        self.refresh(engine)

    def _wake(self, engine: EngineState) -> None:
        for pair in self._of.get(engine.name, []):
            pair.decode.wake.set()

    def lose(self, decode: EngineState, tokens: int) -> None:
        """A WRITE will not come: D may hold the prompt's blocks until it restarts."""
        decode.lost_blocks += -(-tokens // self.config.block_size)
        self._weigh(decode)

    def recognise(self, engine: EngineState, listed_id: str) -> None:
        """By the id that it lists. What an earlier start of it held is free."""
        if engine.lost_blocks and engine.listed_id and listed_id not in ("", engine.listed_id):
            engine.lost_blocks = 0
            self._weigh(engine)
        engine.listed_id = listed_id or engine.listed_id

    def observe(self, decode: EngineState, kv: KvGauges | None) -> None:
        """What D's metrics say. What a D that nobody uses goes on holding is lost, no more and no
        less, whoever had sent it: a router that was killed has told nobody.
        """
        decode.kv = kv
        if kv is None or kv.busy or decode.requests:
            decode.idle_since = None
        else:
            now = asyncio.get_running_loop().time()
            decode.idle_since = now if decode.idle_since is None else decode.idle_since
            held = round(kv.used_share * kv.blocks)
            is_settled = now - decode.idle_since >= SETTLED_S
            decode.lost_blocks = held if is_settled else min(decode.lost_blocks, held)
        self._weigh(decode)

    def _weigh(self, decode: EngineState) -> None:
        """Drain D when too many of its blocks are lost, unless there is no other D to serve."""
        if self.engines.get(decode.name) is not decode:
            return
        self._metrics.lost_blocks.labels(decode.name).set(decode.lost_blocks)
        was, decode.overdrawn = decode.overdrawn, self._is_overdrawn(decode)
        if decode.overdrawn:
            blocks = decode.kv.blocks if decode.kv else 0
            decode.reason = (
                f"about {decode.lost_blocks} of {blocks} KV blocks are held for requests whose KV "
                "never came: restart it"
            )
            if not was:
                log.error("overdrawn engine=%s: %s", decode.name, decode.reason)
            if not decode.draining and self._has_other(decode):
                decode.draining = True
                self.refresh(decode)
        elif was:
            log.info("recovered engine=%s: its lost blocks are free again", decode.name)
            decode.draining = False
            decode.reason = ""
            self._wake(decode)
            self.refresh(decode)

    def _is_overdrawn(self, decode: EngineState) -> bool:
        """By its number of blocks as last known: an engine that is gone has not freed them."""
        blocks = decode.kv.blocks if decode.kv else 0
        if not blocks:
            return decode.overdrawn and decode.lost_blocks > 0
        return decode.lost_blocks >= self.config.drain_lost_share * blocks

    def _has_other(self, decode: EngineState) -> bool:
        return any(
            pair.state == "ready" for pair in self.pairs.values() if pair.decode is not decode
        )

    def refresh(self, engine: EngineState | None = None) -> None:
        """Show what has become of an engine and its pairs; of all without one."""
        if engine is not None and self.engines.get(engine.name) is not engine:
            return
        for one in self.engines.values() if engine is None else (engine,):
            if one.pacer is not None:
                loads.show_limit(self.config, self._metrics, one)
            for condition in CONDITIONS:
                state = self._metrics.engine_state.labels(one.name, condition)
                state.set(one.condition == condition)
        decodes = [e for e in self.engines.values() if e.engine.role == "decode"]
        opened, self._open_decodes = (
            self._open_decodes,
            [decode for decode in decodes if decode.condition == "up"],
        )
        if opened != self._open_decodes:
            self.on_change()
        for pair in self.pairs.values() if engine is None else self._of[engine.name]:
            self.show(pair)

    def show(self, pair: Pair) -> None:
        """What a choice looks at is kept ready for it, so that it need not look at every pair."""
        if self.pairs.get(pair.name) is not pair:
            return
        is_ready = pair.state == "ready"
        gauge = self._metrics.pair_ready.labels(pair.prefill.name, pair.decode.name)
        gauge.set(is_ready)
        partners = self._partners[pair.prefill.name]
        if is_ready == (pair.decode in partners):
            return
        # In the table's order, whatever the order in which pairs became ready.
        ready = {p.decode.name for p in self._of[pair.prefill.name] if p.state == "ready"}
        partners[:] = [engine for engine in self.engines.values() if engine.name in ready]
        self._open = [engine for engine in self.engines.values() if self._partners.get(engine.name)]
        self._metrics.complete.set(sum(map(len, self._partners.values())) == len(self.pairs))
        self.on_change()
