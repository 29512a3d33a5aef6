"""One leg on its way: sent, read, counted, and judged by what it answered.

Owns what a leg's answer means and the loads it puts on its engine. Knows nothing of the other
leg and sets no deadline but the prefill leg's outermost one.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdeploy.router import identity, legs, loads
from kvdeploy.router.errors import (
    ApiError,
    EngineBusyError,
    EngineFailureError,
    EngineRefusalError,
    deadline,
)
from kvdeploy.router.judge import find_decode_fault, find_prefill_fault, find_stream_fault
from kvdeploy.router.wire import WireError

if TYPE_CHECKING:
    from kvdeploy.router.background import Background
    from kvdeploy.router.client import EngineClient
    from kvdeploy.router.metrics import Metrics
    from kvdeploy.router.states import EngineState
    from kvdeploy.router.table import Table
    from kvdeploy.router.wire import Reply, Sink

BACKGROUND_S = 300.0
"""How long a prefill leg may go on after its deadline was told to the client."""
_EXCERPT = 300


@dataclass(frozen=True, slots=True)
class Wires:
    """What every leg needs."""

    client: EngineClient
    table: Table
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How a prefill leg ended: P's transfer parameters, or what went wrong."""

    params: dict[str, Any]
    error: ApiError | None = None


async def run_prefill(
    wires: Wires, job: legs.Job, to: EngineState, rank: int | None, *, sent: legs.Coordinates | None
) -> Prefilled:
    """Never raises for what P does. `sent` is what D was told of P, if it was told already."""
    bound_s = wires.table.config.deadlines.prefill_s + BACKGROUND_S
    started = time.perf_counter()
    try:
        async with asyncio.timeout(bound_s):
            reply = await wires.client.post(
                to, job.endpoint, legs.build_prefill_body(job), legs.build_headers(job, rank)
            )
            try:
                body = await wires.client.read(to, reply)
            finally:
                reply.close()
        _raise_for_status(to, reply.status, reply.content_type, body)
        return Prefilled(_judge_prefill(wires.table, to, rank, body, sent))
    except TimeoutError:
        message = f"{to.name} did not finish the prompt within {bound_s} s"
        return Prefilled({}, deadline(message, code="prefill_deadline", engine=to.name))
    except ApiError as e:
        _note(wires.table, to, e)
        return Prefilled({}, e)
    finally:
        elapsed = time.perf_counter() - started
        wires.metrics.leg_seconds.labels(to.name, to.engine.role).observe(elapsed)


def start_prefill(
    wires: Wires,
    background: Background,
    job: legs.Job,
    to: EngineState,
    rank: int | None,
    *,
    sent: legs.Coordinates | None,
) -> asyncio.Task[Prefilled]:
    """Send the leg and count it at once: the next choice must see it."""
    _load(wires, to, job.prompt_tokens, 1)
    task = background.start(run_prefill(wires, job, to, rank, sent=sent))
    task.add_done_callback(lambda _: _load(wires, to, -job.prompt_tokens, -1))
    return task


class DecodeLeg:
    """D's side of a request, from sending to its last byte."""

    def __init__(self, wires: Wires, job: legs.Job, to: EngineState, rank: int | None) -> None:
        self.to = to
        self.content_type = ""
        self.settled = False
        """D answered, refused or died: it does not hold blocks that wait for a WRITE."""
        self.left_to_settle = False
        """P refused the request; D gets a moment to refuse it as well."""
        self._wires = wires
        self.job = job
        self._rank = rank
        self._reply: Reply | None = None
        self._task: asyncio.Task[bytes] | None = None
        self._started = time.perf_counter()
        self._closed = False

    @property
    def task(self) -> asyncio.Task[bytes]:
        if self._task is None:
            message = "the leg was not started"
            raise RuntimeError(message)
        return self._task

    def start(self, params: dict[str, Any] | None) -> None:
        """Send the leg; without `params` decode does all itself."""
        _load(self._wires, self.to, 0, 1)
        self._task = asyncio.create_task(self._open(params))
        self._task.add_done_callback(_retrieve)

    async def pour(self, sink: Sink, limit_s: float) -> bool:
        """The rest of the body into `sink`, as it comes; False when nothing came for so long.

        Raises EngineFailureError.
        """
        reply = self._reply
        if reply is None:
            return True
        poured = reply.pour(sink)
        now, idle_s = asyncio.get_running_loop().time, 0.0
        while idle_s < limit_s:
            await asyncio.wait({poured}, timeout=limit_s - idle_s)
            if poured.done():
                break
            idle_s = 0.0 if reply.held else now() - reply.moved_at
        else:
            return False
        try:
            poured.result()
        except WireError as e:
            error = self._wires.client.translate(self.to, e)
            _note(self._wires.table, self.to, error)
            raise error from e
        return True

    def hold(self, *, held: bool) -> None:
        """Let D wait: its client takes no more at the moment."""
        if self._reply is not None:
            self._reply.hold(held=held)

    def close(self) -> None:
        """End the leg wherever it is; D aborts the request when its connection closes."""
        if self._closed:
            return
        self._closed = True
        self.task.cancel()
        if self._reply is not None:
            self._reply.close()
        _load(self._wires, self.to, 0, -1)
        elapsed = time.perf_counter() - self._started
        self._wires.metrics.leg_seconds.labels(self.to.name, self.to.engine.role).observe(elapsed)

    async def _open(self, params: dict[str, Any] | None) -> bytes:
        """The whole body, or a stream's first bytes. Raises ApiError."""
        job, client = self.job, self._wires.client
        try:
            reply = self._reply = await client.post(
                self.to,
                job.endpoint,
                legs.build_decode_body(job, params),
                legs.build_headers(job, self._rank),
            )
            self.content_type = reply.content_type
            # vLLM sends a stream's headers before it has a token: they settle nothing.
            if job.stream and reply.status == 200:
                body = await client.read_some(self.to, reply)
            else:
                body = await client.read(self.to, reply)
        except EngineFailureError as e:
            self.settled = True
            _note(self._wires.table, self.to, e)
            raise
        self.settled = True
        _raise_for_status(self.to, reply.status, self.content_type, body)
        if not body:
            fault = "ended its answer before the first byte"
        else:
            fault = find_stream_fault(body) if job.stream else find_decode_fault(body)
        if fault:
            message = f"{self.to.name} {fault}"
            raise EngineFailureError(502, "decode_failed", message, engine=self.to.name)
        return body


def _judge_prefill(
    table: Table,
    to: EngineState,
    rank: int | None,
    body: bytes,
    sent: legs.Coordinates | None,
) -> dict[str, Any]:
    """P's transfer parameters. Raises ApiError when there will be no WRITE to where D waits."""
    fault = find_prefill_fault(body)
    if fault:
        raise EngineFailureError(502, "prefill_failed", f"{to.name} {fault}", engine=to.name)
    params = legs.parse_answered_params(body)
    found = legs.parse_coordinates(params) if params else None
    if params is None or found is None:
        message = f"{to.name} answered without transfer parameters: it has no KV to send"
        raise EngineFailureError(502, "prefill_failed", message, engine=to.name)
    if not found.engine_id.startswith(to.engine.id_prefix):
        message = identity.explain(to.engine, found.engine_id)
        table.refuse(to, message)
        raise EngineFailureError(502, "prefill_wrong_engine", message, engine=to.name)
    mode, wanted = params.get("transfer_mode"), table.config.mode
    if mode is not None and mode != wanted:
        message = f"{to.name} runs the {mode} connector; the router is set to {wanted}"
        raise EngineFailureError(502, "prefill_wrong_mode", message, engine=to.name)
    table.identify(to, rank, found)
    if sent is not None and sent.engine_id != found.engine_id:
        message = f"{to.name} was restarted: it is {found.engine_id} now, was {sent.engine_id}"
        raise EngineFailureError(502, "prefill_restarted", message, engine=to.name)
    return params


def _raise_for_status(to: EngineState, status: int, content_type: str, body: bytes) -> None:
    if status == 200:
        return
    message = f"{to.name} answered {status}: {_excerpt(body)}"
    if status == 429:
        raise EngineBusyError(to.engine.role, message, engine=to.name)
    if 400 <= status < 500:
        kind = content_type or "application/json"
        raise EngineRefusalError(status, message, content_type=kind, body=body)
    raise EngineFailureError(502, f"{to.engine.role}_failed", message, engine=to.name)


def _excerpt(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:_EXCERPT]
    except (ValueError, KeyError, TypeError):
        return body[:_EXCERPT].decode("utf-8", "replace") or "no body"


def _note(table: Table, to: EngineState, error: ApiError) -> None:
    if isinstance(error, EngineFailureError) and error.lost:
        table.eject(to, error.message)


def _load(wires: Wires, to: EngineState, tokens: int, requests: int) -> None:
    loads.count(wires.table.config, wires.metrics, to, tokens=tokens, requests=requests)
    if requests < 0:
        wires.table.on_change()


def _retrieve(task: asyncio.Task[bytes]) -> None:
    """Keep asyncio from reporting an error that the other leg's error has overtaken."""
    if not task.cancelled():
        task.exception()
