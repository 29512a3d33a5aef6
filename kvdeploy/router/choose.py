"""Choose prefill, decode and their ranks for a request.

Owns the joining of what the table knows with the rules of the policy. Costs the same for two
engines and for a hundred; never waits.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from kvdeploy.router import policy
from kvdeploy.router.prefix import Place, PrefixMemory
from kvdeploy.router.states import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.router.legs import Job
    from kvdeploy.router.metrics import Metrics
    from kvdeploy.router.states import EngineState
    from kvdeploy.router.table import Table

    Allows = Callable[[EngineState, EngineState], bool]

_HOLDERS = 2
"""Engines that are compared because they know the prompt's beginning."""


class Chooser:
    def __init__(self, table: Table, metrics: Metrics, rng: random.Random | None = None) -> None:
        self._table = table
        self._metrics = metrics
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._memory = {"prefill": PrefixMemory(), "decode": PrefixMemory()}
        self._turn = 0

    def choose(self, job: Job, allows: Allows) -> Route | None:
        """The best ready pair that is allowed, or None; for decode alone, any that is up."""
        turn, self._turn = self._turn, self._turn + 1
        if not job.needs_prefill:
            route = self._find_alone(job, turn, allows)
            if route is not None:
                self._note(job, route)
            return route
        prefills = self._table.open_prefills
        # Each round through the prefills begins with another decode: every pair has its turn.
        decode_turn = sum(divmod(turn, max(1, len(prefills))))
        few = self._look(prefills, "prefill", turn, job)
        route = self._find(job, few, decode_turn, allows)
        if route is None and len(few) < len(prefills):
            route = self._find(job, prefills, decode_turn, allows)
        if route is not None:
            self._note(job, route)
        return route

    def is_open(self, job: Job, allows: Allows) -> bool:
        """Whether what the job may be sent to is ready, however busy."""
        if not job.needs_prefill:
            return any(allows(self._partner(d), d) for d in self._table.open_decodes)
        return any(
            allows(prefill, decode)
            for prefill in self._table.open_prefills
            for decode in self._table.partners(prefill)
        )

    def _find(
        self, job: Job, prefills: Sequence[EngineState], turn: int, allows: Allows
    ) -> Route | None:
        for prefill in self._sort(prefills, job):
            partners = self._table.partners(prefill)
            decode = self._find_decode(job, partners, turn, partial(allows, prefill))
            if decode is not None:
                return Route(
                    prefill, decode, self._pick_rank(prefill, job), self._pick_rank(decode, job)
                )
        return None

    def _find_alone(self, job: Job, turn: int, allows: Allows) -> Route | None:
        decode = self._find_decode(
            job, self._table.open_decodes, turn, lambda d: allows(self._partner(d), d)
        )
        if decode is None:
            return None
        return Route(self._partner(decode), decode, None, self._pick_rank(decode, job))

    def _partner(self, decode: EngineState) -> EngineState:
        """The prefill that stands in a route beside a decode that serves alone, always the same."""
        return self._table.by_decode(decode)[0].prefill

    def _find_decode(
        self,
        job: Job,
        decodes: Sequence[EngineState],
        turn: int,
        allows: Callable[[EngineState], bool],
    ) -> EngineState | None:
        few = self._look(decodes, "decode", turn, job)
        for some in (few, decodes) if len(few) < len(decodes) else (few,):
            if allowed := [decode for decode in some if allows(decode)]:
                return self._sort(allowed, job)[0]
        return None

    def _look(
        self, engines: Sequence[EngineState], role: str, turn: int, job: Job
    ) -> list[EngineState]:
        few = policy.look_at(engines, turn, self._rng)
        if len(few) < len(engines):
            for place in self._memory[role].places(job.prefix, _HOLDERS):
                holder = self._table.engines.get(place.engine)
                if holder is not None and holder in engines and holder not in few:
                    few.append(holder)
        return few

    def _sort(self, engines: Sequence[EngineState], job: Job) -> list[EngineState]:
        if len(engines) == 1 or self._table.config.policy == "round-robin":
            return list(engines)
        return [engines[i] for i in policy.rank([self._cost(engine, job) for engine in engines])]

    def _cost(self, engine: EngineState, job: Job) -> float:
        cached = max((self._cached(engine, at, job) for at in engine.ranks), default=0)
        if engine.engine.role == "prefill":
            return policy.prefill_cost(
                outstanding=engine.prompt_tokens, prompt=job.prompt_tokens, cached=cached
            )
        kv = engine.kv
        free = None
        if kv is not None and kv.blocks:
            free = int((1 - kv.used_share) * kv.blocks) * self._table.config.block_size
        return policy.decode_cost(
            requests=engine.requests,
            prompt=job.prompt_tokens,
            cached=cached,
            used_share=kv.used_share if kv else None,
            free_tokens=free,
        )

    def _pick_rank(self, engine: EngineState, job: Job) -> int | None:
        if len(engine.ranks) == 1 or not job.prefix or self._table.config.policy == "round-robin":
            return engine.next_rank()
        cached, best = max(
            ((self._cached(engine, at, job), at or 0) for at in engine.ranks),
            key=lambda known: known[0],
        )
        return best if cached else engine.next_rank()

    def _cached(self, engine: EngineState, at: int | None, job: Job) -> int:
        if not job.prefix:
            return 0
        memory = self._memory[engine.engine.role]
        return memory.cached_tokens(job.prefix, Place(engine.name, at, engine.epoch))

    def _note(self, job: Job, route: Route) -> None:
        sent = [(route.decode, route.decode_rank)]
        if job.needs_prefill:
            sent.append((route.prefill, route.prefill_rank))
        for engine, at in sent:
            by = "prefix" if self._cached(engine, at, job) else "load"
            self._metrics.choices.labels(engine.name, by).inc()
            place = Place(engine.name, at, engine.epoch)
            self._memory[engine.engine.role].note(job.prefix, place)
