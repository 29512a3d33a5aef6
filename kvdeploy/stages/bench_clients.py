"""The clients of one run: as many connections as its cell has, over which prompts are asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters import http, load
from kvdeploy.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvdeploy.model.bench import Sample
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.planning.bench.prompts import Script
    from kvdeploy.stages.asking import Asker

PATH: Final = "/v1/completions"
REQUEST_LIMIT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a run lasts: until `requests` were asked or `seconds` are over."""

    requests: int
    seconds: float


class Clients:
    """As many connections as a cell has clients, each of which asks again when it is answered."""

    def __init__(self, asker: Asker, wanted: Planned, pair: str | None = None) -> None:
        """They ask over `pair`, if one is named."""
        self._wanted, self._model = wanted, asker.config.served_model
        self._url = f"{asker.fleet.url}{PATH}"
        self._headers = asker.headers
        if wanted.mode != asker.config.usual_mode:
            self._headers["X-Kvdeploy-Mode"] = wanted.mode
        if pair is not None:
            self._headers["X-Kvdeploy-Pair"] = pair
        trust = http.trusting(asker.fleet.trust) if asker.fleet.trust else None
        self._connections = [
            load.Connection(asker.fleet.url, trust) for _ in range(wanted.cell.concurrency)
        ]

    async def warm_up(self, scripts: Sequence[Script]) -> None:
        """The first client alone, so that what all share is there before it is asked for at once.

        Raises:
            FleetError: it is not answered.
        """
        first, *others = (script.warm_up() for script in scripts)
        await self.ask_each([first])
        await asyncio.gather(*(self._ask_uncounted(n, p) for n, p in enumerate(others, 1)))

    async def ask_each(self, prompts: Sequence[Iterable[Sequence[int]]]) -> None:
        """Each client what is its own, one prompt after the other; none of it counts.

        Raises:
            FleetError: one is not answered.
        """
        await asyncio.gather(*(self._ask_uncounted(n, p) for n, p in enumerate(prompts)))

    async def _ask_uncounted(self, client: int, prompts: Iterable[Sequence[int]]) -> None:
        for prompt in prompts:
            sample, _ = await self._ask(self._connections[client], prompt)
            if sample.error:
                msg = f"a warm-up request was not answered: {sample.error}"
                raise FleetError(msg, hint="'kvdeploy status' shows how the fleet is.")

    async def ask(self, scripts: Sequence[Script], pace: Pace) -> list[Sample]:
        samples: list[Sample] = []
        numbers = itertools.count()
        ends = time.perf_counter() + pace.seconds

        async def client(connection: load.Connection, script: Script) -> None:
            answer: list[int] = []
            while time.perf_counter() < ends and next(numbers) < pace.requests:
                sample, answer = await self._ask(connection, script.next(answer))
                samples.append(sample)
                if sample.error:
                    await asyncio.sleep(0.1)

        await asyncio.gather(
            *(client(*one) for one in zip(self._connections, scripts, strict=True))
        )
        return samples

    async def _ask(
        self, connection: load.Connection, prompt: Sequence[int]
    ) -> tuple[Sample, list[int]]:
        tokens = self._wanted.cell.output_tokens
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        request = load.build_request(self._url, json.dumps(body).encode(), self._headers)
        return load.read_sample(await connection.ask(request, limit_s=REQUEST_LIMIT_S), tokens)

    async def ask_once(self, prompt: Sequence[int]) -> Sample:
        """One request, by the first client alone."""
        sample, _ = await self._ask(self._connections[0], prompt)
        return sample

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
