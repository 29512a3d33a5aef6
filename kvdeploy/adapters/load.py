"""Streamed completions under load, timed at the socket.

Owns a client that does as little as it can while the clock runs: answers are kept as bytes, with
the time at which each piece came, and looked at when all is over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvdeploy.model.bench import Sample

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator

_FIRST = b"data: {"
_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`; 0 is never."""

    sent: float
    first: float = 0.0
    done: float = 0.0
    raw: bytes = b""
    error: str = ""
    times: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Of each piece of `raw`: when it came, and where it ends."""

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent


class Connection(asyncio.Protocol):
    """One request after another over one socket, which is opened again when it was closed.

    `trust` is for https: what the server's certificate is held to.
    """

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._trust = trust if parts.scheme == "https" else None
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._end: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._tail = b""
        self._length: int | None = None
        self._size = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, self._host, self._port, ssl=self._trust)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def ask(self, request: bytes, *, limit_s: float = 60.0) -> Answer:
        if self._transport is None:
            try:
                await self.open()
            except OSError as e:
                now = time.perf_counter()
                return Answer(sent=now, done=now, error=f"no connection: {e.strerror or e}")
        assert self._transport is not None  # noqa: S101  # it was opened above
        self._parts, self._tail, self._length, self._size = [], b"", None, 0
        self._end = asyncio.get_running_loop().create_future()
        self._answer = answer = Answer(sent=time.perf_counter())
        self._transport.write(request)
        try:
            await asyncio.wait_for(self._end, limit_s)
        except TimeoutError:
            answer.error = "hung"
            self.close()
        self._answer = None
        answer.raw = b"".join(self._parts)
        answer.done = answer.done or time.perf_counter()
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are not of asyncio's class

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:
            self._answer.error = "connection lost"
            self._finish()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        now = time.perf_counter()
        if not answer.first and _FIRST in data:
            answer.first = now
        self._parts.append(data)
        self._size += len(data)
        answer.times.append(now)
        answer.ends.append(self._size)
        if self._length is None:
            # A header's value may look like the end of a body.
            data = self._read_head()
        if self._length:
            if self._size >= self._length:
                self._finish()
        elif data:
            self._tail = (self._tail + data)[-len(_END) :]
            if self._tail == _END:
                self._finish()

    def _read_head(self) -> bytes:
        """How the answer ends: after so many bytes, or (0) with an empty chunk; what follows."""
        head, end, rest = b"".join(self._parts).partition(b"\r\n\r\n")
        if end:
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            self._length = len(head) + 4 + int(found[1]) if found else 0
        return rest

    def _finish(self) -> None:
        assert self._answer is not None  # noqa: S101  # callers have looked
        self._answer.done = time.perf_counter()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


def build_request(url: str, body: bytes, headers: dict[str, str]) -> bytes:
    parts = urlsplit(url)
    lines = [
        f"POST {parts.path or '/v1/completions'} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def find_fault(answer: Answer, tokens: int, text: str | None) -> str:
    """What a streamed answer lacks: so many tokens, its end, and the text if that is known."""
    if answer.error:
        return answer.error
    head, _, body = answer.raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        return f"status {status}"
    if b"chunked" in head.lower():
        body = unchunk(body)
    events = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e.strip()]
    if not events or events[-1] != b"[DONE]":
        return "no [DONE]"
    told, got, finish = None, "", None
    for event in events[:-1]:
        fields = json.loads(event)
        if fields.get("error"):
            return f"error event: {fields['error'].get('code')}"
        told = (fields.get("usage") or {}).get("completion_tokens", told)
        for choice in fields["choices"]:
            got += choice["text"]
            finish = choice.get("finish_reason") or finish
    if told != tokens:
        return f"{told} tokens"
    if finish != "length":
        return f"finish_reason {finish}"
    return "" if text is None or got == text else "wrong text"


def read_sample(answer: Answer, tokens: int) -> tuple[Sample, list[int]]:
    """What a client saw of a request for so many tokens, and the tokens, where the engine told."""
    try:
        fault = find_fault(answer, tokens, None)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        fault = f"not an answer: {type(e).__name__}"
    if fault:
        return Sample(error=fault), []
    events = list(_events_at(answer))
    with_choice = [(at, event["choices"][0]) for at, event in events if event["choices"]]
    times = [at for at, _ in with_choice]
    sample = Sample(
        ttft_s=times[0] - answer.sent,
        total_s=times[-1] - answer.sent,
        gaps_s=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
        output_tokens=tokens,
    )
    return sample, [token for _, choice in with_choice for token in choice.get("token_ids") or ()]


def _events_at(answer: Answer) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each event of a whole answer, and when its last byte came."""
    head, _, body = answer.raw.partition(b"\r\n\r\n")
    at = len(head) + 4
    chunks = list(_chunks(body)) if b"chunked" in head.lower() else [(0, body)]
    starts, length = [], 0
    for _, data in chunks:
        starts.append(length)
        length += len(data)
    whole, end = b"".join(data for _, data in chunks), 0
    while (end := whole.find(b"\n\n", start := end)) >= 0:
        end += 2
        number = bisect_left(starts, end) - 1
        last = at + chunks[number][0] + end - starts[number]
        text = whole[start:end].strip().removeprefix(b"data: ")
        if text.startswith(b"{"):
            yield answer.times[bisect_left(answer.ends, last)], json.loads(text)


def unchunk(body: bytes) -> bytes:
    """Raises ValueError when the body is cut."""
    return b"".join(data for _, data in _chunks(body))


def _chunks(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each chunk's data begins, and the data. Raises ValueError when the body is cut."""
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return
        yield end + 2, body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


async def run_clients(
    ask: Callable[[int, int], Awaitable[Answer]], clients: int, seconds: float, spread_s: float
) -> tuple[list[Answer], float]:
    """Each client asks again as soon as it has its answer, for so many seconds.

    Clients begin spread over `spread_s`, so that they do not march in step.

    Returns:
        Every answer, and how long all of it took.
    """
    began = time.perf_counter()
    answers: list[Answer] = []

    async def one(number: int) -> None:
        await asyncio.sleep(spread_s * number / clients)
        turn = 0
        while time.perf_counter() - began < seconds + spread_s:
            answers.append(await ask(number, turn))
            turn += 1

    await asyncio.gather(*(one(number) for number in range(clients)))
    return answers, time.perf_counter() - began
