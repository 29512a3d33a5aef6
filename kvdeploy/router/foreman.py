"""/admin of a router with several workers: their parent asks all of them.

Owns which engines an operator holds back, so that a worker that takes another's place does so too.
Each worker answers on a socket in the crew's folder, which only the router's user can enter.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
from aiohttp import web

from kvdeploy.router.admin import HOST, build_admin
from kvdeploy.router.shared import admin_socket, read_held, write_held

PATIENCE: Final = aiohttp.ClientTimeout(total=5)
OK: Final = 200
GONE: Final = 503


class Foreman:
    """Make one inside a running event loop."""

    def __init__(self, folder: str, workers: int) -> None:
        self._folder, self._workers = folder, workers
        self._runner = web.AppRunner(build_admin(self), access_log=None, shutdown_timeout=0.1)

    async def start(self, port: int) -> int:
        """The port. Raises OSError."""
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def state(self, request: web.Request) -> web.Response:
        return _sum(await self._ask_all(request))

    async def reload(self, request: web.Request) -> web.Response:
        return _sum(await self._ask_all(request))

    async def drain(self, request: web.Request) -> web.Response:
        return await self._hold(request, held=True)

    async def undrain(self, request: web.Request) -> web.Response:
        return await self._hold(request, held=False)

    async def _hold(self, request: web.Request, *, held: bool) -> web.Response:
        """Written down first: a worker that cannot be asked yet reads it when it can."""
        was, name = read_held(self._folder), request.match_info["engine"]
        write_held(self._folder, was | {name} if held else was - {name})
        answers = await self._ask_all(request)
        if not any(status == OK for status, _ in answers.values()):
            write_held(self._folder, was)
        return _sum(answers)

    async def _ask_all(self, request: web.Request) -> dict[int, tuple[int, Any]]:
        slots = range(self._workers)
        answers = await asyncio.gather(*(self._ask(slot, request) for slot in slots))
        return dict(zip(slots, answers, strict=True))

    async def _ask(self, slot: int, request: web.Request) -> tuple[int, Any]:
        """Status and what came with it; or why nothing did."""
        connector = aiohttp.UnixConnector(admin_socket(self._folder, slot))
        url = f"http://localhost{request.rel_url.raw_path}"
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=PATIENCE) as session,
                session.request(request.method, url) as answer,
            ):
                is_json = answer.content_type == "application/json"
                return answer.status, await answer.json() if is_json else await answer.text()
        except (OSError, aiohttp.ClientError) as e:
            return GONE, {"error": f"this worker does not answer: {str(e) or type(e).__name__}"}


def _sum(answers: dict[int, tuple[int, Any]]) -> web.Response:
    """What each says, by its number. One that is gone is no failure while others are there; where
    one refuses, its words are the answer.
    """
    refusals = [(code, told) for code, told in answers.values() if code not in {OK, GONE}]
    for code, told in refusals:
        if isinstance(told, str):
            return web.Response(status=code, text=told)
    worst = refusals[0][0] if refusals else min(code for code, _ in answers.values())
    workers = {str(slot): told for slot, (_, told) in answers.items()}
    return web.json_response({"workers": workers}, status=worst)
