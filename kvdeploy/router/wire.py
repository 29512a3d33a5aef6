"""HTTP/1.1 to one engine, at the socket: a pool of connections that carry one request at a time.

Owns connections and the framing of what goes over them. Body bytes are handed on inside the
callback that read them, with no task between: at 250 streams a second of tokens is 12,000 chunks,
and whatever is done for each is what the router costs. Never retries, sets no deadline but the
connect's, and knows nothing of legs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Sink = Callable[[bytes], None]

KEEP_ALIVE_S = 3.0
"""Below the 5 s after which a vLLM server closes an idle connection
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 0.32), so that no leg is written to one that is being closed.
"""
_ALWAYS = "User-Agent: kvdeploy-router\r\nAccept-Encoding: identity\r\n"


class WireError(Exception):
    """The connection broke, or what came over it was not HTTP."""


class Reply:
    """An engine's answer, as far as it has come."""

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.content_type = "application/json"
        self.moved_at = 0.0
        """When the last byte came that was poured; on the event loop's clock."""
        self.held = False
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._ended = False
        self._error: WireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._poured: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Until the status is known. Raises WireError."""
        while not self.status:
            self._raise_error()
            await self._wait()

    async def read(self) -> bytes:
        """The whole body. Raises WireError."""
        while not self._ended:
            self._raise_error()
            await self._wait()
        return self._take()

    async def read_some(self) -> bytes:
        """What has arrived, at least a byte; empty at the end. Raises WireError."""
        while not self._chunks and not self._ended:
            self._raise_error()
            await self._wait()
        return self._take()

    def pour(self, sink: Sink) -> asyncio.Future[None]:
        """Give all that comes from now on to `sink`, at once. Done at the end, or a WireError."""
        poured = self._poured = self._loop.create_future()
        self._sink, self.moved_at = sink, self._loop.time()
        if rest := self._take():
            sink(rest)
        if self._error is not None:
            poured.set_exception(self._error)
        elif self._ended:
            poured.set_result(None)
        return poured

    def hold(self, *, held: bool) -> None:
        """Let the engine wait: nobody takes its bytes at the moment."""
        if self._ended or self._error is not None:
            return  # its connection is another's by now
        self.held, self.moved_at = held, self._loop.time()
        self._connection.hold(held=held)

    def close(self) -> None:
        """An answer that is not whole ends its connection, which is how the engine is told."""
        if self._poured is not None:
            self._poured.cancel()
        if not self._ended and self._error is None:
            self._connection.abort()

    # --- told by the connection ---

    def add(self, data: bytes) -> None:
        if self._sink is not None:
            self.moved_at = self._loop.time()
            self._sink(data)
        else:
            self._chunks.append(data)
            self.wake()

    def end(self, error: WireError | None = None) -> None:
        self._ended, self._error = error is None, error
        poured = self._poured
        if poured is not None and not poured.done():
            if error is None:
                poured.set_result(None)
            else:
                poured.set_exception(error)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class Connection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self.idle_since = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._framed = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Reply:
        assert self._transport is not None  # noqa: S101 - the pool gives open ones only
        self._reply = reply = Reply(self)
        self._framed = False
        self._transport.writelines((head, body))
        return reply

    def hold(self, *, held: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has its own class

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"not HTTP: {e}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        reply = self._reply
        if reply is not None and reply.status and not self._framed and exc is None:
            self._reply = None
            reply.end()  # without a length, the end of the connection is that of the answer
        else:
            self._fail(str(exc) if exc else "the engine closed it")

    def _fail(self, why: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.end(WireError(why))

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-type" and self._reply is not None:
            self._reply.content_type = value.decode("latin-1")
        elif key in {b"content-length", b"transfer-encoding"}:
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._reply is not None and status >= 200:
            self._reply.status = status
            self._reply.wake()

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.add(data)

    def on_message_complete(self) -> None:
        reply = self._reply
        if reply is None or not reply.status:
            return  # an interim answer
        self._reply = None
        transport = self._transport
        if transport is not None:
            if reply.held:
                transport.resume_reading()
            if self._parser.should_keep_alive() and not transport.get_write_buffer_size():
                self._pool.take_back(self)
            else:
                transport.close()
        reply.end()


class Pool:
    """The connections to one engine; what is idle is used again, the latest first."""

    def __init__(self, url: str, *, connect_s: float) -> None:
        parts = urlsplit(url)
        self._connect_s = connect_s
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._netloc = parts.netloc
        self._idle: deque[Connection] = deque()
        self._loop = asyncio.get_running_loop()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer, from its status on. Raises WireError, OSError (TimeoutError to connect)."""
        connection = self._find_idle() or await self._connect()
        told = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._netloc}\r\n{_ALWAYS}{told}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        reply = connection.send(head.encode("latin-1"), body)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    def take_back(self, connection: Connection) -> None:
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        while self._idle[0].idle_since < connection.idle_since - KEEP_ALIVE_S:
            self._idle.popleft().abort()

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _find_idle(self) -> Connection | None:
        oldest = self._loop.time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        async with asyncio.timeout(self._connect_s):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self), self._host, self._port
            )
        return connection
