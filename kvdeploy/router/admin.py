"""What an operator may see and do, on a port of its own that only this machine reaches.

Owns /admin. Never listens on anything but loopback, and refuses what a web page may have sent.
"""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from kvdeploy.router.loads import find_limit

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from kvdeploy.model.routing import RouterConfig
    from kvdeploy.router.service import Service
    from kvdeploy.router.states import EngineState

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"


class Routes(Protocol):
    """Who answers: one router, or the parent of several."""

    async def state(self, request: web.Request, /) -> web.Response: ...

    async def drain(self, request: web.Request, /) -> web.Response: ...

    async def undrain(self, request: web.Request, /) -> web.Response: ...

    async def reload(self, request: web.Request, /) -> web.Response: ...


class AdminRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def state(self, _: web.Request) -> web.Response:
        table = self._service.table
        return web.json_response(
            {
                "engines": {e.name: tell(e, table.config) for e in table.engines.values()},
                "pairs": {
                    name: {"state": pair.state, "reason": pair.explain()}
                    for name, pair in table.pairs.items()
                },
                "queued": self._service.attempts.queued,
            }
        )

    async def drain(self, request: web.Request) -> web.Response:
        return self._hold(request, held=True)

    async def undrain(self, request: web.Request) -> web.Response:
        return self._hold(request, held=False)

    async def reload(self, _: web.Request) -> web.Response:
        problem = self._service.reread()
        return web.json_response({"reloaded": not problem, "reason": problem}, status=_of(problem))

    def _hold(self, request: web.Request, *, held: bool) -> web.Response:
        name = request.match_info["engine"]
        engine = self._service.table.engines.get(name)
        if engine is None:
            good = ", ".join(self._service.table.engines)
            raise web.HTTPNotFound(text=f"There is no engine {name!r}; there are {good}.\n")
        self._service.table.hold(engine, held=held)
        return web.json_response({name: tell(engine, self._service.config)})


def tell(engine: EngineState, config: RouterConfig) -> dict[str, Any]:
    """One engine, for people."""
    told: dict[str, Any] = {
        "state": engine.condition,
        "reason": engine.explain(),
        "drained": engine.held,
        "url": engine.engine.url,
        "requests": engine.requests,
        "epoch": engine.epoch,
    }
    if engine.engine.role == "prefill":
        told["prompt_tokens"] = engine.prompt_tokens
        told["limit"] = find_limit(config, engine)
        told["engine_ids"] = sorted(known.engine_id for known in engine.identities.values())
    else:
        told["lost_blocks"] = engine.lost_blocks
        told["kv_used_share"] = engine.kv.used_share if engine.kv else None
        told["kv_blocks"] = engine.kv.blocks if engine.kv else None
    return told


def _of(problem: str) -> int:
    return 409 if problem else 200


@web.middleware
async def only_from_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page in a browser on this machine reaches loopback as well: it names itself in Origin, or
    uses a name of its own for this address.
    """
    if "Origin" in request.headers or not _is_here(request):
        raise web.HTTPForbidden(text="/admin is for programs on this machine.\n")
    log.info("admin method=%s path=%s", request.method, request.rel_url.raw_path)
    return await handler(request)


def _is_here(request: web.Request) -> bool:
    try:
        host = request.url.host or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # neither an address nor, perhaps, a URL
        return False


def build_admin(routes: Routes) -> web.Application:
    app = web.Application(middlewares=[only_from_here])
    app.add_routes(
        [
            web.get("/admin/state", routes.state),
            web.post("/admin/engines/{engine}/drain", routes.drain),
            web.post("/admin/engines/{engine}/undrain", routes.undrain),
            web.post("/admin/reload", routes.reload),
        ]
    )
    return app
