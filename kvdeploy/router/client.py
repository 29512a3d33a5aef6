"""HTTP to the engines, with foreign exceptions translated at this border.

Owns the words for the failures of connections. Legs go over wires of our own, looks at engines
over aiohttp's client, which costs more and does more. Never retries: a leg that was sent may have
been taken up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import aiohttp

from kvdeploy.router.errors import EngineFailureError
from kvdeploy.router.wire import KEEP_ALIVE_S, Pool, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.router.states import EngineState
    from kvdeploy.router.wire import Reply

Look = Literal["ok", "refused", "sick", "slow"]
"""What one look at /health says."""


class EngineClient:
    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            headers={"Accept-Encoding": "identity", "User-Agent": "kvdeploy-router"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._pools: dict[str, Pool] = {}

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        await self._session.close()

    async def post(
        self, to: EngineState, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        """The answer, from its status on. Raises EngineFailureError."""
        url = to.engine.url
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, connect_s=self._connect_s)
        try:
            return await pool.post(path, body, headers)
        except (WireError, OSError) as e:
            raise self.translate(to, e) from e

    async def read(self, to: EngineState, reply: Reply) -> bytes:
        """The whole body. Raises EngineFailureError."""
        try:
            return await reply.read()
        except WireError as e:
            raise self.translate(to, e) from e

    async def read_some(self, to: EngineState, reply: Reply) -> bytes:
        """What has arrived, at least a byte; empty at the end. Raises EngineFailureError."""
        try:
            return await reply.read_some()
        except WireError as e:
            raise self.translate(to, e) from e

    async def fetch(self, to: EngineState, path: str, timeout_s: float) -> str | None:
        """The text of a page, or None for whatever reason."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(to.engine.url + path) as response,
            ):
                text = await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        return text if response.status == 200 else None

    async def probe(self, to: EngineState, timeout_s: float) -> tuple[Look, str]:
        """One look at /health, and what was wrong."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(to.engine.url + "/health") as response,
            ):
                await response.read()
        except TimeoutError:
            return "slow", f"/health did not answer within {timeout_s} s"
        except aiohttp.ClientConnectorError as e:
            return "refused", f"no connection: {e.strerror or e}"
        except (aiohttp.ClientError, OSError) as e:
            return "sick", f"/health broke off: {_explain(e)}"
        if response.status == 200:
            return "ok", ""
        return "sick", f"/health answered {response.status}"

    def translate(self, to: EngineState, error: WireError | OSError) -> EngineFailureError:
        """A leg's broken connection, in the words of the role whose it was."""
        status, code = 502, "unreachable"
        if isinstance(error, WireError):
            code, message = "broke_off", f"{to.name} broke the connection off: {error}"
        elif isinstance(error, TimeoutError):
            status, code = 504, "connect"
            message = f"{to.name} did not take a connection within {self._connect_s} s"
        else:
            message = f"{to.name} cannot be reached: {error.strerror or error}"
        return EngineFailureError(
            status, f"{to.engine.role}_{code}", message, engine=to.name, lost=True
        )


def _explain(error: Exception) -> str:
    return str(error) or type(error).__name__
