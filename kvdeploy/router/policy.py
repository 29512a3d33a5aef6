"""Choose the pair for a request: pure, over a table of loads.

Owns the order of preference. Never looks at an engine, a clock or a counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Policy = Literal["least-loaded", "round-robin"]


class PairLoad(NamedTuple):
    """What a choice may depend on."""

    pair: str
    prefill_tokens: int
    """Prompt tokens that P still works on."""
    decode_requests: int
    """Requests that D holds."""


def choose_pair(policy: Policy, ready: Sequence[PairLoad], turn: int) -> str | None:
    """The name of the best ready pair; `turn` counts requests and breaks ties in rotation."""
    if not ready:
        return None
    if policy == "least-loaded":
        best = min((load.prefill_tokens, load.decode_requests) for load in ready)
        ready = [load for load in ready if (load.prefill_tokens, load.decode_requests) == best]
    return ready[turn % len(ready)].pair


def order_pairs(prefills: Sequence[str], decodes: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair once, along diagonals, so that neighbours share as few engines as they can."""
    return [
        (prefill, decodes[(i + shift) % len(decodes)])
        for shift in range(len(decodes))
        for i, prefill in enumerate(prefills)
    ]
