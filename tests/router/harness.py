"""A router in the test's own process before scripted engines."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvdeploy.model.routing import RouterConfig
from kvdeploy.router.auth import read_keys
from kvdeploy.router.errors import CODES
from kvdeploy.router.reading import Reading
from kvdeploy.router.service import Service
from tests.router.scripted import Fabric, ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

PROMPT = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 8}


class Fleet:
    """A router in this process, before scripted engines."""

    def __init__(self, config: RouterConfig, fabric: Fabric, engines: list[ScriptedEngine]) -> None:
        self.config = config
        self.fabric = fabric
        self.engines = {engine.name: engine for engine in engines}
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        self.service = Service(
            Reading(config=config, keys=read_keys(config.api_key_file), tls=None)
        )
        self.url = ""

    @property
    def prefill(self) -> ScriptedEngine:
        return self.engines["prefill-0"]

    @property
    def decode(self) -> ScriptedEngine:
        return self.engines["decode-0"]

    async def post(
        self,
        body: Any = None,
        *,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        **changes: Any,
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON and headers of a request that is not a stream."""
        body = {**PROMPT, **changes} if body is None else body
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def metric(self, line: str) -> float:
        """The value of a sample, 0 when it was never counted."""
        async with self.session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        found = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    async def until(self, true: Callable[[], object], what: str) -> None:
        """Wait for something that is about to be so."""
        ends = time.monotonic() + 5
        while not true():
            if time.monotonic() > ends:
                pytest.fail(f"never happened: {what}")
            await asyncio.sleep(0.005)

    def is_idle(self) -> bool:
        """No leg is under way, nor counted as if it were."""
        engines = self.service.table.engines.values()
        return all((e.requests, e.prompt_tokens) == (0, 0) for e in engines)

    async def until_ready(self) -> None:
        pairs = self.service.table.pairs.values()
        await self.until(lambda: all(p.state == "ready" for p in pairs), "every pair is ready")


def build_config(engines: list[ScriptedEngine], **changes: Any) -> RouterConfig:
    return RouterConfig.model_validate(
        {
            "host": "127.0.0.1",
            "port": 0,
            "served_model": "tiny",
            "engines": [engine.describe() for engine in engines],
            "health_interval_s": 0.02,
            "metrics_interval_s": 0.02,
            **changes,
        }
    )


@asynccontextmanager
async def run_fleet(
    prefills: int = 1, decodes: int = 1, *, dp_size: int = 1, warm: bool = True, **changes: Any
) -> AsyncIterator[Fleet]:
    """Changes are fields of the router's configuration."""
    fabric = Fabric()
    mode = changes.get("mode", "push")
    engines = [
        ScriptedEngine(f"{role}-{i}", role, fabric, mode=mode, dp_size=dp_size)
        for role, count in (("prefill", prefills), ("decode", decodes))
        for i in range(count)
    ]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        fleet = Fleet(build_config(engines, **changes), fabric, engines)
        stack.push_async_callback(fleet.session.close)
        stack.push_async_callback(fleet.service.stop)
        fleet.url = f"http://127.0.0.1:{await fleet.service.start()}"
        if warm:
            await fleet.until_ready()
        yield fleet
        for engine in engines:
            engine.gate.set()
        counted = {s.labels.get("code") for m in fleet.service.metrics.registry.collect()
                   for s in m.samples if s.name == "kvdeploy_router_errors_total"}  # fmt: skip
        assert counted <= {*CODES}, "an error's code that no counter starts with"
    deaths = [death for engine in engines for death in engine.deaths]
    assert deaths == [], "a real engine would have died"
