"""What a choice costs, and the cheapest of a few: pure, over numbers.

Owns the order of preference. Never looks at an engine, a clock or a counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

T = TypeVar("T")
Policy = Literal["least-loaded", "round-robin"]

LOOKS = 8
"""Engines of a role that are compared for one request: two would do, all of them cost time."""
EASY_SHARE = 0.5
"""Up to this share of its KV in use a decode is as good as an empty one."""
FULL_WEIGHT = 16.0
"""A decode whose KV is all in use counts as if it had so many requests more."""
CACHED_WEIGHT = 1.0
"""A prompt that decode has whole in its cache is worth so many requests."""
NO_ROOM = 1e6
"""A decode that has not the blocks for a prompt is the last resort."""


def prefill_cost(*, outstanding: int, prompt: int, cached: int) -> float:
    """Tokens to be computed until this prompt is done: what is under way, and what of the prompt
    is not in P's cache. So a cached prefix draws a prompt as far as it saves work, and no further.
    """
    return float(outstanding + prompt - min(cached, prompt))


def decode_cost(
    *, requests: int, prompt: int, cached: int, used_share: float | None, free_tokens: int | None
) -> float:
    """Requests that D holds, corrected by how full its KV is and what of the prompt it has.

    Args:
        requests: in flight from this router.
        prompt: its length in tokens, estimated.
        cached: how much of it D has in its cache, in tokens.
        used_share: of D's KV, 0 to 1; None when not known.
        free_tokens: that D's free blocks can hold; None when not known.
    """
    cost = float(requests) - CACHED_WEIGHT * min(cached, prompt) / max(1, prompt)
    if used_share is not None:
        cost += FULL_WEIGHT * max(0.0, used_share - EASY_SHARE) / (1 - EASY_SHARE)
    if free_tokens is not None and prompt - min(cached, prompt) > free_tokens:
        cost += NO_ROOM
    return cost


def look_at(items: Sequence[T], turn: int, rng: random.Random) -> list[T]:
    """The few that are compared: all of a small fleet, beginning with another each turn, and
    some by chance of a large one, so that a choice costs the same whatever the fleet's size.
    """
    count = len(items)
    if count <= LOOKS:
        start = turn % count if count else 0
        return [*items[start:], *items[:start]]
    return rng.sample(items, LOOKS)


def rank(costs: Sequence[float]) -> list[int]:
    """Places from the cheapest to the dearest; equals keep their order."""
    return sorted(range(len(costs)), key=costs.__getitem__)


def order_pairs(prefills: Sequence[str], decodes: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair once, along diagonals, so that neighbours share as few engines as they can."""
    return [
        (prefill, decodes[(i + shift) % len(decodes)])
        for shift in range(len(decodes))
        for i, prefill in enumerate(prefills)
    ]
