"""HTTP to the engines: one pooled session, with foreign exceptions translated at this border.

Owns connections and the words for their failures. Never retries: a leg that was sent may have
been taken up.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal

import aiohttp

from kvdeploy.router.errors import EngineFailureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.router.states import EngineState

# Below the 5 s after which a vLLM server closes an idle connection (VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
# 0.32), so that no leg is written to a connection that is being closed.
_KEEP_ALIVE_S = 3.0

Look = Literal["ok", "refused", "sick", "slow"]
"""What one look at /health says."""


class EngineClient:
    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            headers={"Accept-Encoding": "identity", "User-Agent": "kvdeploy-router"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self, to: EngineState, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Raises EngineFailureError."""
        with self._translating(to):
            return await self._session.post(
                to.engine.url + path, data=body, headers=headers, allow_redirects=False
            )

    async def read(self, to: EngineState, response: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises EngineFailureError."""
        with self._translating(to):
            return await response.read()

    async def read_some(self, to: EngineState, response: aiohttp.ClientResponse) -> bytes:
        """What has arrived, at least a byte; empty at the end. Raises EngineFailureError."""
        with self._translating(to):
            return await response.content.readany()

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

    @contextlib.contextmanager
    def _translating(self, to: EngineState) -> Iterator[None]:
        role = to.engine.role
        try:
            yield
        except aiohttp.ServerTimeoutError as e:
            message = f"{to.name} did not take a connection within {self._connect_s} s"
            raise EngineFailureError(
                504, f"{role}_connect", message, engine=to.name, lost=True
            ) from e
        except aiohttp.ClientConnectorError as e:
            message = f"{to.name} cannot be reached: {e.strerror or e}"
            raise EngineFailureError(
                502, f"{role}_unreachable", message, engine=to.name, lost=True
            ) from e
        except (aiohttp.ClientError, OSError) as e:
            message = f"{to.name} broke the connection off: {_explain(e)}"
            raise EngineFailureError(
                502, f"{role}_broke_off", message, engine=to.name, lost=True
            ) from e


def _explain(error: Exception) -> str:
    return str(error) or type(error).__name__
