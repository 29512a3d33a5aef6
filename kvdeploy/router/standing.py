"""Failures in a row within a time. Pure: it is told what the clock says."""

from __future__ import annotations

from collections import deque


class Standing:
    """What an engine's answers say of it. A good one forgives all failures before it: an engine
    that is only overloaded does answer now and then.
    """

    def __init__(self) -> None:
        self._failures: deque[float] = deque()

    def fail(self, now: float, *, limit: int, window_s: float) -> bool:
        """True when this failure takes the engine out of use, which starts the count anew."""
        self._failures.append(now)
        while self._failures[0] < now - window_s:
            self._failures.popleft()
        if len(self._failures) < limit:
            return False
        self._failures.clear()
        return True

    def succeed(self) -> None:
        self._failures.clear()
