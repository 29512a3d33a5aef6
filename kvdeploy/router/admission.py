"""How many requests engines are given at once, and where the others wait.

Owns the queue. A request waits here before either of its legs is sent: prefill holds no blocks for
it yet, so that no lease can run out in this queue. Both caps are fixed numbers: the best number of
prefills at once depends on the load, and adapting to it has not been measured here yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from kvdeploy.router import errors

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


class Admission:
    def __init__(self, table: Table, chooser: Chooser, metrics: Metrics) -> None:
        self._table = table
        self._chooser = chooser
        self._metrics = metrics
        self._waiting: dict[asyncio.Event, None] = {}
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
        self._waiting[woken] = None
        self._metrics.queued.set(len(self._waiting))
        try:
            async with asyncio.timeout(wait_s):
                return await self._wait(woken, job, allows)
        except TimeoutError:
            raise errors.queue_timeout(wait_s) from None
        finally:
            del self._waiting[woken]
            self._metrics.queued.set(len(self._waiting))
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
        most_prefill = config.prefill_at_once if job.needs_prefill else None
        most_decode = config.decode_at_once

        def has_room(prefill: EngineState, decode: EngineState) -> bool:
            if most_prefill is not None and prefill.requests >= most_prefill:
                return False
            if most_decode is not None and decode.requests >= most_decode:
                return False
            return allows(prefill, decode)

        return self._chooser.choose(job, has_room)

    def _wake(self) -> None:
        with contextlib.suppress(StopIteration):
            first = iter(self._waiting)
            for _ in range(_WOKEN):
                next(first).set()
