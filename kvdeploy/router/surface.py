"""What every request goes through: its id, its API key, its access line, its error's shape.

Owns the translation of anything raised into an answer. The one place of the router that catches
broadly.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from kvdeploy.router import errors
from kvdeploy.router.attempts import Trail
from kvdeploy.router.legs import parse_client_id

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

    from kvdeploy.router.errors import ApiError
    from kvdeploy.router.service import Service

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
CLIENT_LEFT = 499


@dataclass(eq=False)
class Ticket:
    """What is known of a request while it is served."""

    started: float
    client_id: str | None
    request_id: str
    """As the client is told; engines see one that starts with it."""
    trail: Trail = field(default_factory=Trail)
    error: ApiError | None = None


TICKET: web.RequestKey[Ticket] = web.RequestKey("ticket", Ticket)


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Names on the answer, before its headers leave."""
    ticket = request.get(TICKET)
    if ticket is None:
        return
    response.headers["X-Request-Id"] = ticket.request_id
    if ticket.trail.pair:
        response.headers["X-Kvdeploy-Pair"] = ticket.trail.pair


def guard(service: Service) -> Middleware:
    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        client_id = parse_client_id(request.headers.get("X-Request-Id"))
        ticket = Ticket(time.perf_counter(), client_id, client_id or uuid.uuid4().hex)
        request[TICKET] = ticket
        status = CLIENT_LEFT
        try:
            _check_key(service, request)
            response = await handler(request)
            status = response.status
        except errors.ApiError as e:
            ticket.error = e
            response = render(e)
            status = e.status
        except web.HTTPException as e:
            ticket.error = _translate(request, e)
            response = render(ticket.error)
            status = ticket.error.status
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("bug request_id=%s", ticket.request_id)
            message = "The router failed; its log says why under this request's id."
            ticket.error = errors.ApiError(500, "router_bug", message, kind="internal_error")
            response = render(ticket.error)
            status = 500
        finally:
            _record(service, request, ticket, status)
        return response

    return serve


def _check_key(service: Service, request: web.Request) -> None:
    if request.path in OPEN_PATHS:
        return
    if not service.keys.accepts(request.headers.get("Authorization")):
        raise errors.unauthorised()


def _translate(request: web.Request, e: web.HTTPException) -> ApiError:
    """Refusals of aiohttp itself, among them unknown routes and methods."""
    allowed = {"Allow": e.headers["Allow"]} if "Allow" in e.headers else None
    message = f"{request.method} {request.rel_url.raw_path}: {e.reason}"
    return errors.ApiError(e.status, "no_such_route", message, headers=allowed)


def render(e: ApiError) -> web.Response:
    """As a client gets it."""
    headers = {"Content-Type": e.content_type, **e.headers}
    return web.Response(status=e.status, body=e.render_body(), headers=headers)


def _record(service: Service, request: web.Request, ticket: Ticket, status: int) -> None:
    seconds = time.perf_counter() - ticket.started
    endpoint = _name_endpoint(request)
    metrics = service.metrics
    metrics.requests.labels(endpoint, str(status)).inc()
    metrics.request_seconds.labels(endpoint).observe(seconds)
    if ticket.error is not None:
        metrics.errors.labels(ticket.error.code).inc()
        level = logging.WARNING if ticket.error.status >= 500 else logging.INFO
        log.log(
            level,
            "error request_id=%s code=%s %s",
            ticket.request_id,
            ticket.error.code,
            ticket.error.message,
        )
    log.log(
        logging.DEBUG if endpoint in OPEN_PATHS else logging.INFO,
        "access method=%s path=%s status=%s mode=%s pair=%s tries=%s seconds=%.4f request_id=%s",
        request.method,
        request.rel_url.raw_path,
        status,
        ticket.trail.mode or "-",
        ticket.trail.pair or "-",
        len(ticket.trail.pairs),
        seconds,
        ticket.request_id,
    )


def _name_endpoint(request: web.Request) -> str:
    """The route's own path: a client's words never become a metric's label."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"
