"""Wait for decode only as long as it can still answer.

Owns what the death of an engine means for who waits for it. A stream tells by its first token that
its KV has come; of a whole answer nobody can tell, but decode shows whether any request there
waits for KV.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdeploy.router.errors import EngineFailureError

if TYPE_CHECKING:
    from kvdeploy.router.flight import DecodeLeg
    from kvdeploy.router.states import Route

SETTLE_S = 2.0
"""For the last WRITE of a prefill that has died to land."""
KV_S = 5.0
"""So long decode must show without a pause that requests wait there for KV, to be given up."""


class Lives(NamedTuple):
    """Of the engines of a route, as they are when its legs are sent."""

    prefill: asyncio.Future[None] | None
    """None where nothing depends on it."""
    decode: asyncio.Future[None]

    @property
    def watched(self) -> set[asyncio.Future[Any]]:
        return {life for life in self if life is not None}

    def find_ended(self, route: Route) -> EngineFailureError | None:
        """Which of the two was found dead or frozen while its answer was waited for."""
        for engine, life in ((route.decode, self.decode), (route.prefill, self.prefill)):
            if life is not None and life.done():
                message = f"{engine.name} was taken out of use: {engine.reason}"
                code = f"{engine.engine.role}_ejected"
                return EngineFailureError(502, code, message, engine=engine.name)
        return None

    async def wait(self, decode: DecodeLeg, limit_s: float) -> Lives:
        """Until D answers or is found dead, or P is and D does not answer a little later. The lives
        that still matter then: with a whole answer under way, not P's.
        """
        ends_at = _now() + limit_s
        await _first({decode.task, *self.watched}, limit_s)
        if self.prefill is None or not self.prefill.done():
            return self
        own: set[asyncio.Future[Any]] = {decode.task, self.decode}
        await _first(own, min(SETTLE_S, limit_s))
        if decode.job.stream or await self._lacks_kv(decode, own, ends_at):
            return self
        await _first(own, ends_at - _now())
        return self._replace(prefill=None)

    async def _lacks_kv(
        self, decode: DecodeLeg, own: set[asyncio.Future[Any]], ends_at: float
    ) -> bool:
        """Whether D, looked at again and again, always has requests that wait for KV. They may be
        others' as well: then work is done twice, and nobody waits for ever.
        """
        until = min(_now() + KV_S, ends_at)
        while _now() < until:
            kv = decode.to.kv
            if kv is None or not kv.deferred:
                return False
            if await _first(own, min(KV_S / 10, until - _now())):
                return False
        return True


async def _first(futures: set[asyncio.Future[Any]], timeout_s: float) -> bool:
    """Whether any is done in time."""
    done, _ = await asyncio.wait(
        futures, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED
    )
    return bool(done)


def _now() -> float:
    return asyncio.get_running_loop().time()
