"""Pass decode's bytes on to the client, untouched and as they come.

Owns the stream once its first byte is there. Never parses, joins or delays a token: a chunk is
written to the client's socket inside the callback that read it from decode's.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from kvdeploy.router.errors import ApiError
from kvdeploy.router.judge import find_given_up

if TYPE_CHECKING:
    from kvdeploy.router.dispatch import Answer

_LAST_WORDS_S = 1.0
_LOOK_S = 0.02
"""Between two looks at a client that takes nothing at the moment."""


class _Pipe:
    """Where decode's chunks go: the client's socket, in HTTP's own chunks."""

    def __init__(self, request: web.Request, response: web.StreamResponse, answer: Answer) -> None:
        self.tail = answer.first
        """The last chunk."""
        self.is_given_up = False
        """Decode has ended the stream before its end: nothing more passes."""
        self._protocol = request.protocol
        self._transport = request.transport
        self._answer = answer
        self._chunked = "Transfer-Encoding" in response.headers  # an HTTP/1.0 client has none

    def __call__(self, chunk: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # it is over, or the client has left and its handler is being told
        given_up = find_given_up(chunk)
        if given_up >= 0:
            self._transport, self.is_given_up, chunk = None, True, chunk[:given_up]
        if chunk:
            self.tail = chunk
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)
        if self._protocol.writing_paused and not self.is_given_up:
            self._answer.hold(held=True)
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def close(self) -> bytes:
        """Nothing more passes: what is written next are the last words. The last chunk."""
        self._transport = None
        return self.tail

    def _look(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._protocol.writing_paused:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        else:
            self._answer.hold(held=False)


async def relay_stream(
    request: web.Request, answer: Answer, *, total_s: float
) -> tuple[web.StreamResponse, ApiError | None]:
    """The answered response and, when the stream broke, why."""
    headers = {"Content-Type": answer.content_type, "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    tail = answer.first
    error: ApiError | None = None
    try:
        async with asyncio.timeout_at(answer.ends_at):
            await response.prepare(request)
            given_up = find_given_up(answer.first)
            # With the headers.
            await response.write(answer.first if given_up < 0 else answer.first[:given_up])
            if given_up >= 0:
                raise answer.build_given_up_error()
            pipe = _Pipe(request, response, answer)
            try:
                await answer.pour(pipe)
            finally:
                tail = pipe.close()
            if pipe.is_given_up:
                raise answer.build_given_up_error()
    except TimeoutError:
        error = answer.build_total_error(total_s)
    except ApiError as e:
        error = e
    if error is not None and not await _end_broken(request, response, error, tail):
        return response, error
    with contextlib.suppress(ConnectionError):  # who has read [DONE] may be gone already
        await response.write_eof()
    return response, error


async def _end_broken(
    request: web.Request, response: web.StreamResponse, error: ApiError, tail: bytes
) -> bool:
    """Say why the stream ends; False when the client does not take the words."""
    unfinished = b"" if tail.endswith(b"\n\n") else b"\n\n"
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            while request.protocol.writing_paused:
                await asyncio.sleep(_LOOK_S)
            await response.write(unfinished + error.render_event())
    except TimeoutError:
        return False
    return True
