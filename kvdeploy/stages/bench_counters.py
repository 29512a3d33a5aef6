"""What a fleet's engines have counted between two moments of a bench."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvdeploy.model.bench import Moved
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.stages.asking import Asker

STILL_S: Final = 0.6
SETTLE_S: Final = 5.0
"""Engines count a transfer at a later step: wait until nothing changes, but no longer."""


def wait_settled(asker: Asker, still_s: float) -> dict[str, EngineCounters]:
    """Counters once they stand still."""
    seen, since = asker.counters(), time.monotonic()

    def look() -> bool | None:
        nonlocal seen, since
        now = asker.counters()
        if now != seen:
            seen, since = now, time.monotonic()
        return True if time.monotonic() - since >= still_s else None

    wait_for(look, timeout_s=SETTLE_S, interval_s=0.2)
    return seen


def find_moved(before: Mapping[str, EngineCounters], after: Mapping[str, EngineCounters]) -> Moved:
    """Whoever writes counts: prefill in push, decode in pull; the other's counters stay."""
    deltas = {name: after[name] - before[name] for name in after}
    return Moved(
        kv_bytes=sum(d.pushed_bytes for d in deltas.values()),
        transfers=sum(d.transfers for d in deltas.values()),
        descriptors=sum(d.descriptors for d in deltas.values()),
        transfer_s=sum(d.transfer_s for d in deltas.values()),
        post_s=sum(d.post_s for d in deltas.values()),
        failed=sum(
            d.failed_transfers + d.failed_notifications + d.kv_expired for d in deltas.values()
        ),
        prompt_tokens={name: dict(d.prompt_tokens_by_source) for name, d in deltas.items()},
    )
