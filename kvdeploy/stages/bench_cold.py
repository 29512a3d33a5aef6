"""First requests of pairs that have never met.

Every decode engine is started anew, under an id that no prefill engine knows, while the router
leaves pairs cold (`router.warm_pairs`). Each engine then computes a prompt of that length by
itself, so that what is new is the pair alone; then one request goes over each pair: the sample.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters import http
from kvdeploy.errors import FleetError
from kvdeploy.model.bench import Moved, Run
from kvdeploy.stages.bench_clients import PATH, REQUEST_LIMIT_S, Clients
from kvdeploy.stages.bench_counters import find_moved, wait_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.model.bench import Sample
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.planning.bench.prompts import Script
    from kvdeploy.stages.asking import Asker

ALONE_TOKENS: Final = 2


def measure(
    asker: Asker,
    wanted: Planned,
    script: Script,
    renew: Callable[[], None],
    *,
    starts: int,
    still_s: float,
) -> Run:
    """Meet over every pair, after each of so many starts.

    Raises:
        FleetError: engines do not come back, or do not answer.
    """
    samples: list[Sample] = []
    moved = Moved()
    for _ in range(starts):
        renew()
        for engine in asker.config.engines:
            _ask_alone(asker, engine.url, script.next(()))
        before = wait_settled(asker, still_s)
        for prefill, decode in asker.pairs:
            pair = f"{prefill.name}/{decode.name}"
            samples.append(asyncio.run(_meet(Clients(asker, wanted, pair), script.next(()))))
        moved += find_moved(before, wait_settled(asker, still_s))
    return Run(
        mode=wanted.mode,
        cell=wanted.cell,
        round=wanted.round,
        seconds=sum(s.total_s for s in samples),
        samples=tuple(samples),
        moved=moved,
    )


async def _meet(clients: Clients, prompt: Sequence[int]) -> Sample:
    try:
        return await clients.ask_once(prompt)
    finally:
        clients.close()


def _ask_alone(asker: Asker, url: str, prompt: Sequence[int]) -> None:
    body: dict[str, Any] = {
        "model": asker.config.served_model,
        "prompt": prompt,
        "max_tokens": ALONE_TOKENS,
        "temperature": 0,
    }
    answer = http.post(f"{url}{PATH}", body, timeout_s=REQUEST_LIMIT_S)
    if answer.status != 200:
        msg = f"an engine that was asked alone did not answer: {answer.message}"
        raise FleetError(msg, hint="'kvdeploy status' shows how the fleet is.")
