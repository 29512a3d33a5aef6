"""Bounded waiting. The only module that sleeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that only go up; their zero means nothing."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wait_for(
    look: Callable[[], T | None],
    *,
    timeout_s: float,
    interval_s: float = 0.2,
    clock: Clock | None = None,
) -> T | None:
    """Call `look` until it answers something else than None.

    Returns its answer, or None once `timeout_s` has passed: what that means is the caller's to
    say, with evidence. `look` is called at least once.
    """
    clock = clock or SystemClock()
    ends = clock.now() + timeout_s
    while True:
        answer = look()
        if answer is not None or clock.now() >= ends:
            return answer
        clock.sleep(interval_s)
