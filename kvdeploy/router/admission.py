"""How many requests engines are given at once, and where the others wait.

Owns the queue. A request waits here before either of its legs is sent: prefill holds no blocks for
it yet, so that no lease can run out in this queue. What waits for prefill is told to the table's
backlog: it is what an automatic limit is found by.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from kvdeploy.router import errors, loads
from kvdeploy.router.pacing import weigh

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.router.choose import Chooser
    from kvdeploy.router.legs import Job
    from kvdeploy.router.metrics import Metrics
    from kvdeploy.router.states import EngineState, Route
    from kvdeploy.router.table import Table

    Allows = Callable[[EngineState, EngineState], bool]

_WOKEN = 8
"""Requests that look again when something changes: what the first may not use, the next may."""
_LOOK_S = 0.5
"""An automatic limit makes room by itself, in time, for an engine that ends nothing any more."""


class Admission:
    def __init__(self, table: Table, chooser: Chooser, metrics: Metrics) -> None:
        self._table = table
        self._chooser = chooser
        self._metrics = metrics
        self._waiting: dict[asyncio.Event, float] = {}
        self._work = 0.0
        self._look: asyncio.TimerHandle | None = None
        table.on_change = self._wake

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def enter(self, job: Job, allows: Allows, *, until: float) -> Route | None:
        """A route with room, first come first served; None when no allowed pair is ready at all.

        The caller sends the legs before it waits for anything: only then are they counted.

        Args:
            job: what is to be sent.
            allows: whether a pair may be used.
            until: on the event loop's clock, when the request's own total ends.

        Raises:
            ApiError: the queue is full, or the wait in it was too long.
        """
        if not self._waiting and (route := self._choose(job, allows)):
            return route
        if not self._chooser.is_open(job, allows):
            return None
        config = self._table.config
        if len(self._waiting) >= config.queue_size:
            raise errors.queue_full(config.queue_size)
        wait_s = min(config.queue_wait_s, until - asyncio.get_running_loop().time())
        started = time.perf_counter()
        woken = asyncio.Event()
        work = weigh(1, job.prompt_tokens) if job.needs_prefill else 0.0
        self._join(woken, work)
        try:
            async with asyncio.timeout(wait_s):
                return await self._wait(woken, job, allows)
        except TimeoutError:
            raise errors.queue_timeout(wait_s) from None
        finally:
            self._leave(woken)
            self._metrics.queue_seconds.observe(time.perf_counter() - started)
            # Whoever leaves may leave room, and is never the one that the next waits for.
            asyncio.get_running_loop().call_soon(self._wake)

    async def _wait(self, woken: asyncio.Event, job: Job, allows: Allows) -> Route | None:
        while True:
            await woken.wait()
            woken.clear()
            if route := self._choose(job, allows):
                return route
            if not self._chooser.is_open(job, allows):
                return None

    def _choose(self, job: Job, allows: Allows) -> Route | None:
        config = self._table.config

        def has_room(prefill: EngineState, decode: EngineState) -> bool:
            if job.needs_prefill and not loads.has_room(config, prefill):
                return False
            return loads.has_room(config, decode) and allows(prefill, decode)

        return self._chooser.choose(job, has_room)

    def _join(self, woken: asyncio.Event, work: float) -> None:
        self._waiting[woken] = work
        self._tell(work)
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _leave(self, woken: asyncio.Event) -> None:
        self._tell(-self._waiting.pop(woken))
        if not self._waiting and self._look is not None:
            self._look.cancel()
            self._look = None

    def _tell(self, work: float) -> None:
        self._work += work
        share = self._work / max(1, len(self._table.open_prefills))
        self._table.backlog.tell(time.perf_counter(), share)
        self._metrics.queued.set(len(self._waiting))

    def _look_again(self) -> None:
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(StopIteration):
            first = iter(self._waiting)
            for _ in range(_WOKEN):
                next(first).set()
