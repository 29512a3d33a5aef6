"""Pass decode's bytes on to the client, untouched and as they come.

Owns the stream once its first byte is there. Never parses, joins or delays a token; an engine that
gives a stream up is not believed that it has ended it.
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


async def relay_stream(
    request: web.Request, answer: Answer, *, total_s: float
) -> tuple[web.StreamResponse, ApiError | None]:
    """The answered response and, when the stream broke, why."""
    headers = {"Content-Type": answer.content_type, "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    chunk = answer.first
    tail = chunk
    error: ApiError | None = None
    try:
        async with asyncio.timeout_at(answer.ends_at):
            await response.prepare(request)
            while chunk:
                given_up = find_given_up(chunk)
                chunk = chunk if given_up < 0 else chunk[:given_up]
                await response.write(chunk)
                tail = chunk or tail
                if given_up >= 0:
                    raise answer.build_given_up_error()
                chunk = await answer.read_some()
    except TimeoutError:
        error = answer.build_total_error(total_s)
    except ApiError as e:
        error = e
    if error is not None and not await _end_broken(response, error, tail):
        return response, error
    with contextlib.suppress(ConnectionError):  # who has read [DONE] may be gone already
        await response.write_eof()
    return response, error


async def _end_broken(response: web.StreamResponse, error: ApiError, tail: bytes) -> bool:
    """Say why the stream ends; False when the client does not take the words."""
    unfinished = b"" if tail.endswith(b"\n\n") else b"\n\n"
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await response.write(unfinished + error.render_event())
    except TimeoutError:
        return False
    return True
