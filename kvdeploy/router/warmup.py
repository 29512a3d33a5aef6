"""Take every pair through one real request before a client's request may use it.

Owns the warm-up request, the order (one pair after another for each decode: an engine has one
handshake thread, but none waits long for one that hangs) and the pause after a failure. Judges by
the answer, not by its status alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from typing import TYPE_CHECKING, Any

from kvdeploy.model.routing import WARMUP_FAILED
from kvdeploy.router.errors import ApiError, EngineFailureError
from kvdeploy.router.legs import Job
from kvdeploy.router.states import EngineState, Pair, Route

if TYPE_CHECKING:
    from kvdeploy.model.routing import RouterConfig
    from kvdeploy.router.dispatch import Dispatcher
    from kvdeploy.router.table import Table

log = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0
LIMIT_S = 60.0
"""For one warm-up request: a handshake between busy engines was seen to take 34 s."""
PATIENCE_S = 2.0
"""After which a warm-up goes on beside the next."""
_VARIED = 4
"""Leading tokens that differ each time, so that no prefix cache answers in the pair's place."""

_random = random.Random()  # noqa: S311 - tells prompts apart, guards nothing


def build_warmup(config: RouterConfig) -> Job:
    count = max(1, config.warmup_tokens)
    varied = [_random.randint(10, 249) for _ in range(min(_VARIED, count))]
    body: dict[str, Any] = {
        "model": config.served_model,
        "prompt": varied + [7] * (count - len(varied)),
        "max_tokens": 1,
    }
    deadlines = config.deadlines
    return Job(
        endpoint="/v1/completions",
        raw=json.dumps(body).encode(),
        body=body,
        request_id=f"warmup.{uuid.uuid4().hex}",
        prompt_tokens=count,
        total_s=min(LIMIT_S, deadlines.prefill_s + deadlines.first_token_s),
    )


class Warmer:
    def __init__(self, table: Table, dispatcher: Dispatcher) -> None:
        self._table = table
        self._dispatcher = dispatcher

    async def keep_warm(self, decode: EngineState) -> None:
        """For ever: warm what is up and cold, then sleep until something changes."""
        interval_s = self._table.config.health_interval_s
        under_way: dict[Pair, asyncio.Task[None]] = {}
        try:
            while True:
                decode.wake.clear()
                for pair in [pair for pair, task in under_way.items() if task.done()]:
                    under_way.pop(pair).result()
                # Who has failed comes last: it may well hang again.
                for pair in sorted(self._table.by_decode(decode), key=lambda p: p.failures):
                    is_due = pair.up and pair.state != "ready" and pair.retry_at <= _now()
                    if is_due and pair not in under_way:
                        under_way[pair] = asyncio.create_task(self.warm(pair))
                        await asyncio.wait({under_way[pair]}, timeout=PATIENCE_S)
                try:
                    async with asyncio.timeout(interval_s):
                        await decode.wake.wait()
                except TimeoutError:
                    continue
        finally:
            for task in under_way.values():
                task.cancel()

    async def warm(self, pair: Pair) -> None:
        epochs = pair.epochs
        if not self._table.config.warm_pairs and pair.prefill.is_known:
            pair.warmed, pair.failures, pair.reason = epochs, 0, ""
            log.info("left cold pair=%s", pair.name)
            self._table.show(pair)
            return
        try:
            for prefill_rank in pair.prefill.ranks:
                for decode_rank in pair.decode.ranks:
                    await self._send(Route(pair.prefill, pair.decode, prefill_rank, decode_rank))
        except ApiError as e:
            pair.failures += 1
            pause_s = min(MAX_PAUSE_S, self._table.config.health_interval_s * 2**pair.failures)
            pair.retry_at = _now() + pause_s
            pair.reason = f"{WARMUP_FAILED}: {e.message}"
            log.warning("cold pair=%s %s; again in %s s", pair.name, pair.reason, pause_s)
        else:
            pair.warmed, pair.failures, pair.reason = epochs, 0, ""
            log.info("warmed pair=%s state=%s", pair.name, pair.state)
        self._table.show(pair)

    async def _send(self, route: Route) -> None:
        job = build_warmup(self._table.config)
        answer = await self._dispatcher.send_in_turn(job, route, started=_now())
        answer.close()
        finish = _parse_finish(answer.first)
        if finish not in {"length", "stop"}:
            message = f"{route.decode.name} ended the warm-up with {finish!r}"
            raise EngineFailureError(502, "warmup_failed", message)


def _parse_finish(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["choices"][0]["finish_reason"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
