"""Scatter the free KV blocks of a fleet, as those of one that has served for long are.

A new engine gives its blocks out in their order, and NIXL moves neighbours as one. So every block
has to have been in use once, by prompts of many lengths side by side.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters import http
from kvdeploy.errors import FleetError
from kvdeploy.router.gauges import parse_kv
from kvdeploy.stages.bench_clients import Clients

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdeploy.model.routing import Mode
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.planning.bench.prompts import Script
    from kvdeploy.stages.asking import Asker

AT_ONCE: Final = 8
MORE: Final = 1.25
"""Of the tokens that the largest cache holds: blocks are not filled to their ends."""
LIMIT_S: Final = 120.0


def widen(wanted: Planned, mode: Mode) -> Planned:
    """Many at once, and short answers: prompts are what takes blocks."""
    cell = wanted.cell.model_copy(update={"output_tokens": 1, "concurrency": AT_ONCE})
    return replace(wanted, mode=mode, cell=cell)


async def scatter(asker: Asker, wide: Planned, scripts: Sequence[Script]) -> None:
    """Until so many tokens were asked, or LIMIT_S are over: then descriptors tell how far it came.

    Raises:
        FleetError: a request is not answered.
    """
    left = find_capacity(asker) * MORE
    ends = time.monotonic() + LIMIT_S
    clients = Clients(asker, wide)

    def prompts(script: Script) -> Iterator[Sequence[int]]:
        nonlocal left
        while left > 0 and time.monotonic() < ends:
            for prompt in script.warm_up():
                left -= len(prompt)
                yield prompt

    try:
        await clients.ask_each([prompts(script) for script in scripts])
    finally:
        clients.close()


def find_capacity(asker: Asker) -> int:
    """Tokens of KV that the largest cache holds.

    Raises:
        FleetError: an engine does not tell.
    """
    most = 0
    for engine in asker.config.engines:
        answer = http.get(f"{engine.url}/metrics", timeout_s=10)
        gauges = parse_kv(answer.body) if isinstance(answer.body, str) else None
        if gauges is None or not gauges.blocks:
            msg = f"{engine.name} does not tell how many KV blocks it has"
            raise FleetError(msg, hint="Leave the scenario 'fragmented' out.")
        most = max(most, gauges.blocks * asker.config.block_size)
    return most
