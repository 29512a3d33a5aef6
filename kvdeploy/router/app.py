"""The HTTP surface: OpenAI's routes, health, readiness and metrics.

Owns what each route answers. Never talks to an engine itself and never decides which one serves.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from kvdeploy.router import errors, intake
from kvdeploy.router.relay import relay_stream
from kvdeploy.router.surface import TICKET, guard, stamp

if TYPE_CHECKING:
    from kvdeploy.router.legs import Endpoint
    from kvdeploy.router.service import Service
    from kvdeploy.router.states import EngineState

PAIR_HEADER = "X-Kvdeploy-Pair"
TIMEOUT_HEADER = "X-Kvdeploy-Timeout-S"


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "/v1/completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "/v1/chat/completions")

    async def models(self, _: web.Request) -> web.StreamResponse:
        model = {
            "id": self._service.config.served_model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvdeploy",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.StreamResponse:
        """200 while the process lives; the engines are told for people, not judged."""
        told = {e.name: _tell(e) for e in self._service.table.engines.values()}
        service = self._service
        return web.json_response(
            {
                "status": "alive",
                "worker": service.worker,
                "configuration": service.digest,
                "engines": told,
            }
        )

    async def ready(self, request: web.Request) -> web.StreamResponse:
        pairs = self._service.table.states()
        ours = bool(pairs) and set(pairs.values()) == {"ready"}
        complete = ours and self._service.is_complete()
        is_alone = self._service.config.usual_mode == "aggregated"
        served = self._service.table.open_decodes if is_alone else "ready" in pairs.values()
        usable = bool(served) and not self._service.draining
        wanted = usable and complete if request.query.get("complete") == "1" else usable
        explained = {name: pair.explain() for name, pair in self._service.table.pairs.items()}
        reasons = {name: why for name, why in explained.items() if why}
        if ours and not complete:
            count = self._service.config.workers
            reasons["workers"] = f"not every pair is warm in each of the {count} workers"
        answer = {
            "ready": usable,
            "complete": complete,
            "pairs": pairs,
            "reasons": reasons,
        }
        return web.json_response(answer, status=200 if wanted else 503)

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        body = self._service.metrics.render()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        service, ticket = self._service, request[TICKET]
        config = service.config
        total_s = intake.parse_total_s(
            request.headers.get(TIMEOUT_HEADER), config.deadlines.total_s
        )
        job = intake.parse_job(
            endpoint,
            await _read_body(request, config.max_body_bytes, timeout_s=config.deadlines.body_s),
            client_id=ticket.client_id,
            served_model=config.served_model,
            total_s=total_s,
            block_size=config.block_size,
            mode=intake.parse_mode(request.headers.get(intake.MODE_HEADER), config),
            aggregate_below=config.aggregate_below_tokens,
        )
        ticket.trail.mode = job.mode
        ticket.request_id = ticket.client_id or job.request_id
        pinned = self._check_pair(request.headers.get(PAIR_HEADER))
        answer = await service.attempts.open(job, pinned=pinned, trail=ticket.trail)
        try:
            if not job.stream:
                headers = {"Content-Type": answer.content_type}
                return web.Response(body=answer.first, headers=headers)
            ttft_s = time.perf_counter() - ticket.started
            service.metrics.ttft_seconds.labels(endpoint).observe(ttft_s)
            response, ticket.error = await relay_stream(request, answer, total_s=total_s)
            return response
        finally:
            answer.close()

    def _check_pair(self, wanted: str | None) -> str | None:
        """Raises ApiError."""
        table, config = self._service.table, self._service.config
        if wanted is None:
            return None
        if not config.pair_header:
            raise errors.pair_header_off(PAIR_HEADER)
        if wanted not in table.pairs:
            raise errors.unknown_pair(wanted, sorted(table.pairs))
        return wanted


def _tell(engine: EngineState) -> dict[str, object]:
    lost = {"lost_blocks": engine.lost_blocks} if engine.engine.role == "decode" else {}
    return {"state": engine.condition, "reason": engine.explain(), **lost}


async def _read_body(request: web.Request, limit: int, *, timeout_s: float) -> bytes:
    """Raises ApiError."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise errors.body_encoded()
    if (request.content_length or 0) > limit:
        raise errors.body_too_large(limit)
    try:
        if request.content.is_eof():
            return await request.read()  # all of it came with the headers: no wait to be bounded
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise errors.body_too_slow(timeout_s) from None
    except web.HTTPRequestEntityTooLarge:
        raise errors.body_too_large(limit) from None


def build_app(service: Service) -> web.Application:
    routes = Routes(service)
    limit = service.config.max_body_bytes
    app = web.Application(middlewares=[guard(service)], client_max_size=limit)
    app.on_response_prepare.append(stamp)
    app.add_routes(
        [
            web.post("/v1/completions", routes.completions),
            web.post("/v1/chat/completions", routes.chat),
            web.get("/v1/models", routes.models),
            web.get("/health", routes.health),
            web.get("/ready", routes.ready),
            web.get("/metrics", routes.metrics),
        ]
    )
    return app
