"""Legs that live longer than the request that sent them.

Owns every prefill leg's task: nothing but the end of the process may cancel one, because its
WRITE is what frees decode's blocks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvdeploy.router.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")


class Background:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, leg: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(leg)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def detach(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for the leg any more; it goes on."""
        if task.done():
            return
        gauge = self._metrics.background_legs
        gauge.inc()
        task.add_done_callback(lambda _: gauge.dec())

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is left, then give it up."""
        if not self._tasks:
            return
        log.info("waiting up to %s s for %s legs", timeout_s, len(self._tasks))
        _, left = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in left:
            task.cancel()
        if left:
            log.warning("gave up %s legs: decode may hold their blocks", len(left))
            await asyncio.wait(left, timeout=1)
