"""Look at every engine, and take it in or out of use.

Owns the looks and what they count for. One engine's look never waits for another's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kvdeploy.router.gauges import parse_kv
from kvdeploy.router.identity import find_own_id, find_stranger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvdeploy.router.client import EngineClient, Look
    from kvdeploy.router.states import EngineState
    from kvdeploy.router.table import Table
    from kvdeploy.router.warmup import Warmer

    Work = Callable[[EngineState], Awaitable[Any]]

log = logging.getLogger(__name__)

PARDON_S = 30.0
"""After which a refused engine is asked again who it is."""
PROBE_TIMEOUT_S = 5.0
PATIENCE: dict[Look, int] = {"refused": 1, "sick": 2, "slow": 3}
"""Bad looks of one kind in a row that take an engine out: a busy engine is slow, not dead."""


class Strikes:
    """Bad looks in a row. Pure."""

    def __init__(self) -> None:
        self._counts: dict[Look, int] = {}

    def count(self, look: Look) -> bool:
        """True when this look takes the engine out of use."""
        if look == "ok":
            self._counts.clear()
            return False
        self._counts[look] = self._counts.get(look, 0) + 1
        return self._counts[look] >= PATIENCE[look]


class Supervisor:
    """The tasks that keep one table true: a look at each engine, a warmer for each decode."""

    def __init__(self, client: EngineClient, table: Table, warmer: Warmer) -> None:
        self._client = client
        self._table = table
        self._warmer = warmer
        self._tasks: dict[EngineState, list[asyncio.Task[None]]] = {}

    def sync(self) -> None:
        """Look after the engines that are in the table now, and after no others."""
        wanted = list(self._table.engines.values())
        for engine in [e for e in self._tasks if e not in wanted]:
            for task in self._tasks.pop(engine):
                task.cancel()
        for engine in wanted:
            if engine not in self._tasks:
                self._tasks[engine] = [
                    asyncio.create_task(_keep(work, engine)) for work in self._works(engine)
                ]

    async def stop(self) -> None:
        tasks = [task for of_one in self._tasks.values() for task in of_one]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _works(self, engine: EngineState) -> list[Work]:
        if engine.engine.role == "prefill":
            return [self._watch]
        return [self._watch, self._warmer.keep_warm, self._read_metrics]

    async def _watch(self, engine: EngineState) -> None:
        strikes = Strikes()
        refused_at = 0.0
        while True:
            look, why = await self._client.probe(engine, PROBE_TIMEOUT_S)
            if strikes.count(look):
                self._table.eject(engine, why)
            elif look == "ok" and not engine.up:
                await self._meet(engine)
            if not engine.refused:
                refused_at = _now()
            elif _now() - refused_at >= PARDON_S:
                await self._meet(engine)
                refused_at = _now()
            await asyncio.sleep(self._table.config.health_interval_s)

    async def _meet(self, engine: EngineState) -> None:
        """Let it in, if it is who it should be."""
        page = await self._client.fetch(engine, "/v1/models", PROBE_TIMEOUT_S)
        self._table.admit(engine)
        self._table.pardon(engine)
        self._table.recognise(engine, find_own_id(engine.engine, page))
        why = find_stranger(engine.engine, self._table.config.served_model, page)
        if why:
            self._table.refuse(engine, why)

    async def _read_metrics(self, decode: EngineState) -> None:
        """For ever, beside the requests and never in their way."""
        while True:
            if decode.up:
                text = await self._client.fetch(decode, "/metrics", PROBE_TIMEOUT_S)
                self._table.observe(decode, parse_kv(text) if text is not None else None)
            await asyncio.sleep(self._table.config.metrics_interval_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _keep(work: Work, engine: EngineState) -> None:
    """A bug in one look must not end all looks."""
    while True:
        try:
            await work(engine)
        except Exception:
            log.exception("supervision of engine=%s failed; it goes on", engine.name)
            await asyncio.sleep(1)
