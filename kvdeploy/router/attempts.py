"""Take a request from pair to pair until one has answered its first byte.

Owns how often a request is tried, what it must not meet again, and what a failure costs the
engine's standing. Never tries again after the first byte, nor what a client has done wrong.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvdeploy.router import errors
from kvdeploy.router.admission import Admission
from kvdeploy.router.choose import Chooser
from kvdeploy.router.errors import EngineFailureError
from kvdeploy.router.states import pair_name

if TYPE_CHECKING:
    from kvdeploy.router.dispatch import Answer, Dispatcher
    from kvdeploy.router.legs import Job
    from kvdeploy.router.metrics import Metrics
    from kvdeploy.router.states import EngineState, Route
    from kvdeploy.router.table import Table

log = logging.getLogger(__name__)

FINAL = frozenset({"total_deadline"})
"""Failures after which there is no time for another pair."""


@dataclass
class Shunned:
    """What a request has failed on."""

    engines: set[str] = field(default_factory=set)
    pairs: set[str] = field(default_factory=set)

    def allows(self, prefill: EngineState, decode: EngineState) -> bool:
        if not self.engines and not self.pairs:
            return True
        if self.engines & {prefill.name, decode.name}:
            return False
        return pair_name(prefill, decode) not in self.pairs

    def add(self, route: Route, error: EngineFailureError) -> None:
        """Nobody can tell which of the two was at fault when D waited in vain: then it is both
        of them together.
        """
        if error.engine:
            self.engines.add(error.engine)
        else:
            self.pairs.add(route.name)


@dataclass
class Trail:
    """Where a request has been."""

    pairs: list[str] = field(default_factory=list)
    mode: str = ""

    @property
    def pair(self) -> str:
        """The last one, which answered or failed."""
        return self.pairs[-1] if self.pairs else ""


class Attempts:
    def __init__(self, table: Table, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._table = table
        self._admission = Admission(table, Chooser(table, metrics), metrics)
        self._dispatcher = dispatcher
        self._metrics = metrics

    @property
    def queued(self) -> int:
        """Requests that wait for room."""
        return self._admission.queued

    async def open(self, job: Job, *, pinned: str | None, trail: Trail) -> Answer:
        """Decode's first byte. A pinned pair is the only one that is tried. Raises ApiError."""
        started = asyncio.get_running_loop().time()
        shunned = Shunned()
        failure: EngineFailureError | None = None
        while True:
            if pinned is None:
                until = started + job.total_s
                route = await self._admission.enter(job, shunned.allows, until=until)
            else:
                route = self._find(pinned, job)
            if route is None:
                self._count(trail, served=False)
                raise failure or errors.no_pair(self._table.states())
            if failure is not None:
                self._metrics.retries.labels(failure.code).inc()
            trail.pairs.append(route.name)
            self._metrics.sent.labels(job.mode).inc()
            try:
                answer = await self._dispatcher.open(_name(job, trail), route, started=started)
            except EngineFailureError as e:
                self._table.blame(route, e)
                shunned.add(route, e)
                failure = e
                log.warning(
                    "failed request_id=%s try=%s pair=%s code=%s %s",
                    job.request_id, len(trail.pairs), route.name, e.code, e.message,
                )  # fmt: skip
                if pinned or e.code in FINAL or len(trail.pairs) >= self._table.config.tries:
                    self._count(trail, served=False)
                    raise
            else:
                self._table.praise(route)
                self._count(trail, served=True)
                return answer

    def _find(self, pinned: str, job: Job) -> Route:
        """Whatever its load: who names a pair wants that one. Raises ApiError."""
        pair = self._table.pairs[pinned]
        if pair.state != "ready" and (job.needs_prefill or pair.decode.condition != "up"):
            raise errors.pair_not_ready(pinned, pair.state, pair.explain())
        return self._table.build_route(pair)

    def _count(self, trail: Trail, *, served: bool) -> None:
        if len(trail.pairs) > 1:
            self._metrics.retried.labels("served" if served else "failed").inc()


def _name(job: Job, trail: Trail) -> Job:
    """Engines must never meet one id twice: the leg of an earlier try may still be on its way."""
    tries = len(trail.pairs)
    return job if tries == 1 else replace(job, request_id=f"{job.request_id}.{tries}")
