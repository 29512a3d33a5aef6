"""A scripted engine: behaves at its border as a vLLM prefill or decode server does (0.32).

It is strict where a real engine is: a leg that would end a real engine's process is answered
with 500 and remembered in `deaths`, and a decode leg whose prompt was never written waits for
ever and keeps its blocks. Nothing else of an engine is imitated.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvdeploy.model.launch import GENERATION
from kvdeploy.model.routing import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNKS = (
    b'data: {"choices":[{"text":" one"}]}\n\n',
    b'data: {"choices":[{"text":" tw\xc3\xb6"}]}\n\n',
    b"data: [DONE]\n\n",
)


def strip_random_suffix(request_id: str) -> str:
    return re.sub(r"-[0-9a-f]{8}$", "", request_id, flags=re.IGNORECASE)


class Fabric:
    """What NIXL does between scripted engines: a WRITE lands when both sides have the request."""

    def __init__(self) -> None:
        self._landed: dict[str, asyncio.Event] = {}
        self.engine_ids: set[str] = set()
        self.held: set[str] = set()
        """Decode's blocks that wait for a WRITE, by engine and request id."""

    def landing(self, request_id: str) -> asyncio.Event:
        return self._landed.setdefault(request_id, asyncio.Event())

    def write(self, request_id: str) -> None:
        self.landing(request_id).set()
        self.held = {h for h in self.held if h.split("|")[1] != request_id}


@dataclass
class Seen:
    """One leg as it arrived."""

    path: str
    request_id: str
    rank: str | None
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params


@dataclass
class ScriptedEngine:
    name: str
    role: str
    fabric: Fabric
    engine_id: str = ""
    model: str = "tiny"
    mode: str = "push"
    dp_size: int = 1
    chunks: tuple[bytes, ...] = CHUNKS
    # switches
    health: int = 200
    fail: int = 0
    """Answer legs with this status, once the gate is open."""
    finish: str = "length"
    """Its finish_reason; a prefill that ends otherwise than with "length" has freed its blocks."""
    metrics: str = ""
    """Its /metrics; without, it has none."""
    writes: bool = True
    """Prefill's WRITE lands; without, it answers as if it had."""
    mute: bool = False
    """Decode sends no token while its gate is closed, not even the first."""
    choices: int = 1
    """Decode answers with so many."""
    lists: bool = True
    """It lists its names; without, it has no such page."""
    nameless: bool = False
    """Its id is not among them, as with an engine that kvdeploy did not start."""
    silent: bool = False
    """Prefill answers without transfer parameters."""
    die_after: int | None = None
    """Decode drops the connection after so many chunks."""
    # what was seen
    seen: list[Seen] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    looks: int = 0
    """At its health."""
    port: int = 0

    def __post_init__(self) -> None:
        self.engine_id = self.engine_id or f"{self.name}-g1"
        self.gate = asyncio.Event()
        """Closed: prefill computes for ever, decode has no next token."""
        self.gate.set()
        self.health_gate = asyncio.Event()
        self.health_gate.set()
        self._runner: web.AppRunner | None = None

    @property
    def clients(self) -> list[Seen]:
        """Legs of clients' requests, without the warm-up."""
        return [leg for leg in self.seen if not leg.request_id.startswith("warmup.")]

    def describe(self) -> Engine:
        return Engine.model_validate(
            {
                "name": self.name,
                "role": self.role,
                "url": f"http://127.0.0.1:{self.port}",
                "engine_id": f"{self.name}-{GENERATION}",
                "side_channel_host": "10.9.9.9",
                "side_channel_port": 5600,
                "dp_size": self.dp_size,
            }
        )

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._serve),
                web.post("/v1/chat/completions", self._serve),
            ]
        )
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        if self.role == "prefill":
            self.fabric.engine_ids |= {self._rank_id(rank) for rank in range(self.dp_size)}

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.fabric.engine_ids -= {self._rank_id(rank) for rank in range(self.dp_size)}

    def _rank_id(self, rank: int) -> str:
        return f"{self.engine_id}_dp{rank}" if self.dp_size > 1 else self.engine_id

    async def _health(self, _: web.Request) -> web.Response:
        self.looks += 1
        await self.health_gate.wait()
        return web.Response(status=self.health)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def _models(self, _: web.Request) -> web.Response:
        names = [self.model] if self.nameless else [self.model, self.engine_id]
        listed = {"object": "list", "data": [{"id": name} for name in names]}
        return web.json_response(listed, status=200 if self.lists else 404)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        leg = Seen(
            path=request.path,
            request_id=request.headers.get("X-Request-Id", ""),
            rank=request.headers.get("X-data-parallel-rank"),
            body=body,
            headers=request.headers,
        )
        if body.get("model") != self.model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        fatal = self._find_fatal(leg)
        self.seen.append(leg)
        if fatal:
            self.deaths.append(f"{self.name}: {fatal}")
            return _error(500, "EngineCore encountered an issue.")
        if self.fail:
            await self.gate.wait()
            return _error(self.fail, f"scripted {self.fail}")
        try:
            if self.role == "prefill":
                return await self._prefill(leg)
            return await self._decode(request, leg)
        except asyncio.CancelledError:
            self.aborted.append(leg.request_id)
            raise

    def _find_fatal(self, leg: Seen) -> str:
        params = leg.body.get("kv_transfer_params")
        if params is None and self.role == "decode":
            return ""  # a plain request: decode computes the prompt itself
        if not isinstance(params, dict):
            return "no kv_transfer_params"
        if leg.request_id in {other.request_id for other in self.seen}:
            return "a request id came twice"
        if strip_random_suffix(leg.request_id) != leg.request_id or "," in leg.request_id:
            return "a request id that engines cannot match"
        if (leg.rank is not None) != (self.dp_size > 1):
            return f"rank {leg.rank} with {self.dp_size} ranks"
        return self._find_fatal_prefill(leg) if self.role == "prefill" else _find_fatal_decode(leg)

    def _find_fatal_prefill(self, leg: Seen) -> str:
        params, body = leg.params, leg.body
        remote = [params.get(f"remote_{key}") for key in ("engine_id", "host", "port", "block_ids")]
        if params.get("do_remote_decode") is not True or params.get("do_remote_prefill"):
            return f"not a prefill leg: {params}"
        if any(value is not None for value in remote):
            return f"a prefill leg with coordinates: {params}"
        if body.get("stream") or body.get("max_tokens") != 1 or "stream_options" in body:
            return f"a prefill leg that generates: {body}"
        if body.get("max_completion_tokens", 1) != 1 or body.get("min_tokens", 0) > 1:
            return f"a prefill leg that generates: {body}"
        return ""

    async def _prefill(self, leg: Seen) -> web.Response:
        await self.gate.wait()
        chat = leg.path == "/v1/chat/completions"
        own_id = f"chatcmpl-{leg.request_id}" if chat else f"cmpl-{leg.request_id}-0"
        self.done.append(leg.request_id)
        if self.silent or self.finish != "length":
            return web.json_response({"choices": [{"finish_reason": self.finish}]})
        if self.writes:
            self.fabric.write(leg.request_id)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self._rank_id(int(leg.rank or 0)),
            "remote_request_id": own_id,
            "remote_host": "127.0.0.1",
            "remote_port": 26601 + int(leg.rank or 0),
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
            "transfer_mode": self.mode,
        }
        answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": params}
        return web.json_response(answer)

    async def _decode(self, request: web.Request, leg: Seen) -> web.StreamResponse:
        if "kv_transfer_params" not in leg.body:
            self.done.append(leg.request_id)
            return web.json_response({"choices": [{"text": " alone"}], "by": self.name})
        if leg.params["remote_engine_id"] not in self.fabric.engine_ids:
            await asyncio.Event().wait()  # a dead P: no error ever comes
        landing = self.fabric.landing(leg.request_id)
        if not landing.is_set():
            self.fabric.held.add(f"{self.name}|{leg.request_id}")
        if not leg.body.get("stream"):
            await landing.wait()
            await self.gate.wait()
            self.done.append(leg.request_id)
            choice = {"text": " one two", "finish_reason": self.finish}
            return web.json_response({"choices": [choice] * self.choices, "by": self.name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await landing.wait()
        for number, chunk in enumerate(self.chunks):
            if number == self.die_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number or self.mute:
                await self.gate.wait()
            await response.write(chunk)
        await response.write_eof()
        self.done.append(leg.request_id)
        return response


def _find_fatal_decode(leg: Seen) -> str:
    params = leg.params
    if params.get("do_remote_prefill") is not True or params.get("do_remote_decode"):
        return f"not a decode leg: {params}"
    for key, kind in (
        ("remote_engine_id", str),
        ("remote_request_id", str),
        ("remote_host", str),
        ("remote_port", int),
        ("tp_size", int),
    ):
        if not isinstance(params.get(key), kind):
            return f"{key} is missing: {params}"
    if leg.request_id not in params["remote_request_id"]:
        return f"a remote_request_id that P does not have: {params}"
    if "remote_block_ids" in params and not params["remote_block_ids"]:
        return f"empty remote_block_ids: {params}"
    return ""


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Scripted", "param": None, "code": status}
    return web.Response(
        status=status, body=json.dumps({"error": error}), content_type="application/json"
    )
