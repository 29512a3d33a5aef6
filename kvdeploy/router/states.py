"""What the router knows of one engine and of one pair.

Owns their facts and the words for the state they are in. Never decides when a fact changes: the
table does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from kvdeploy.router.standing import Standing

if TYPE_CHECKING:
    from kvdeploy.model.routing import Engine
    from kvdeploy.router.gauges import KvGauges
    from kvdeploy.router.legs import Coordinates
    from kvdeploy.router.pacing import Pacer

PairState = Literal["ready", "warming", "down", "refused", "draining"]
Condition = Literal["up", "down", "refused", "draining"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)


@dataclass(eq=False)
class EngineState:
    """One engine. `epoch` counts its lives: what was learned in an earlier one is void."""

    engine: Engine
    up: bool = False
    refused: bool = False
    """It said to be an engine that the table does not have in this place."""
    draining: bool = False
    """It gets no new requests; those that it has go on."""
    held: bool = False
    """Drained by an operator."""
    reason: str = "not probed yet"
    epoch: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    kv: KvGauges | None = None
    """As last read from a decode engine; None when it is not known."""
    lost_blocks: int = 0
    """Blocks that a decode may hold for requests whose KV never came; an estimate."""
    listed_id: str = ""
    """Its own id, when it last listed it: another start has another."""
    idle_since: float | None = None
    """On the event loop's clock: since when a decode's metrics show it without requests."""
    overdrawn: bool = False
    """So many blocks are lost that it should be restarted."""
    identities: dict[int | None, Coordinates] = field(default_factory=dict)
    """By data parallel rank; None is the only rank of an engine without data parallelism."""
    standing: Standing = field(default_factory=Standing)
    pacer: Pacer | None = None
    """Of a prefill engine: it watches whatever the admission is, and rules when that is auto."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: int = 0
    _life: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def life(self) -> asyncio.Future[None]:
        """Done when the engine is found dead or frozen: who waits for it need not wait on."""
        if self._life is None:
            self._life = asyncio.get_running_loop().create_future()
        return self._life

    def end_life(self) -> None:
        if self._life is not None:
            self._life.set_result(None)
            self._life = None

    @property
    def condition(self) -> Condition:
        if not self.up:
            return "down"
        if self.refused:
            return "refused"
        return "draining" if self.draining or self.held else "up"

    def explain(self) -> str:
        """Why it is not used, or what else is wrong with it; nothing when all is well."""
        return self.reason or ("drained by an operator" if self.held else "")

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(range(self.engine.dp_size)) if self.engine.dp_size > 1 else (None,)

    @property
    def is_known(self) -> bool:
        """Whether a prefill has told how decodes reach each of its ranks."""
        return self.identities.keys() >= set(self.ranks)

    def next_rank(self) -> int | None:
        self._turn += 1
        return self.ranks[(self._turn - 1) % len(self.ranks)]


def pair_name(prefill: EngineState, decode: EngineState) -> str:
    """As clients, logs and metrics have it."""
    return f"{prefill.name}/{decode.name}"


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
        return pair_name(self.prefill, self.decode)

    def is_of(self, prefill: EngineState, decode: EngineState) -> bool:
        """Not only by name: another engine may have come in its place."""
        return self.prefill is prefill and self.decode is decode

    @property
    def epochs(self) -> tuple[int, int]:
        return self.prefill.epoch, self.decode.epoch

    @property
    def up(self) -> bool:
        """Whether a request may be sent over the pair, if only to warm it."""
        return self.prefill.condition == self.decode.condition == "up"

    @property
    def state(self) -> PairState:
        for condition in ("down", "refused", "draining"):
            if condition in {self.prefill.condition, self.decode.condition}:
                return condition
        if self.warmed == self.epochs:
            return "ready"
        return "down" if self.failures else "warming"

    def explain(self) -> str:
        """Why the pair is not ready, or nothing."""
        for engine in (self.prefill, self.decode):
            if engine.condition != "up":
                return f"{engine.name}: {engine.explain()}"
        return self.reason if self.state == "down" else ""


@dataclass(frozen=True, slots=True)
class Route:
    """A pair with one data parallel rank chosen on each side."""

    prefill: EngineState
    decode: EngineState
    prefill_rank: int | None
    decode_rank: int | None

    @property
    def name(self) -> str:
        return pair_name(self.prefill, self.decode)
