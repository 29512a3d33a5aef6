"""What is not HTTP, answered in OpenAI's shape all the same.

Owns the one refusal that no route and no middleware sees, because no request came of it.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvdeploy.router.errors import malformed
from kvdeploy.router.surface import render

if TYPE_CHECKING:
    import asyncio

    from kvdeploy.router.metrics import Metrics

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""For the rest of a body that was refused, before its connection is closed."""


class Protocol(web.RequestHandler):
    """A connection of aiohttp's."""

    __slots__ = ("_metrics",)

    def __init__(
        self, server: web.Server, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        silent: Any = None  # our own lines say more
        super().__init__(server, loop=loop, access_log=silent, lingering_time=LINGER_S)
        self._metrics = metrics

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        error = malformed(message or "")
        self._metrics.requests.labels("other", "400").inc()
        self._metrics.errors.labels(error.code).inc()
        log.info("error code=%s %s", error.code, error.message)
        response = render(error)
        response.headers["X-Request-Id"] = uuid.uuid4().hex
        response.force_close()
        return response
