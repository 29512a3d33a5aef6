"""A client that asks a router, or plays one: both legs at once, with coordinates that it knows."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from benchmarks.stand import Arm, Site, build_job
from kvdeploy.adapters.load import Answer, Connection, build_request
from kvdeploy.router import legs

if TYPE_CHECKING:
    from collections.abc import Sequence


class Client:
    """Asks one arm, one request after another."""

    def __init__(
        self, arm: Arm, site: Site, coordinates: Sequence[legs.Coordinates], number: int
    ) -> None:
        """Without a router it stays with one pair; neighbours have others."""
        self._arm, self._site = arm, site
        at = number % len(site.prefill_urls)
        self._prefill_url, self._coordinates = site.prefill_urls[at], coordinates[at]
        turn = number // len(site.prefill_urls)
        self._decode_url = site.decode_urls[(at + turn) % len(site.decode_urls)]
        self._main = Connection(arm.url or self._decode_url)
        self._side = Connection(self._prefill_url)

    async def ask(self, prompt: str, tokens: int) -> Answer:
        job = build_job(self._site, prompt, tokens)
        if self._arm.url:
            return await self._main.ask(build_request(self._arm.url, job.raw, {}))
        headers = {"X-Request-Id": job.request_id}
        body = legs.build_decode_body(job, legs.build_push_params(job, self._coordinates))
        prefill = build_request(self._prefill_url, legs.build_prefill_body(job), headers)
        decode = build_request(self._decode_url, body, headers)
        side = asyncio.ensure_future(self._side.ask(prefill))
        answer = await self._main.ask(decode)
        await side
        return answer

    def close(self) -> None:
        self._main.close()
        self._side.close()


async def learn_coordinates(site: Site, prefill_url: str) -> legs.Coordinates:
    """By one request to prefill, as a router does at warm-up."""
    job = build_job(site, "who are you", 1)
    request = build_request(
        prefill_url, legs.build_prefill_body(job), {"X-Request-Id": job.request_id}
    )
    connection = Connection(prefill_url)
    answer = await connection.ask(request)
    connection.close()
    params = legs.parse_answered_params(answer.raw.partition(b"\r\n\r\n")[2])
    found = legs.parse_coordinates(params) if params else None
    if params is None or found is None:
        sys.exit(f"{prefill_url} is no prefill engine: {answer.error or answer.raw!r}")
    # Its KV has a taker, so that no lease runs out.
    taker = Connection(site.decode_urls[0])
    body = legs.build_decode_body(job, legs.build_answered_params(job, params))
    await taker.ask(build_request(site.decode_urls[0], body, {"X-Request-Id": job.request_id}))
    taker.close()
    return found
