"""How many prompts a prefill engine is given at once, found by watching what waits for it. Pure.

Owns the rule of `prefill_at_once: auto` (docs/decisions/0012). Knows no clock: who tells it of a
change says when that was, on any clock that only goes forward.

A prefill engine computes what it has together, and nothing of that is done before all of it is. So
a small limit is quick as long as it keeps up, and the rule is the smallest limit that does:
a limit is too small when prompts wait before the engine for a good part of the time that they then
spend in it, and it is tried whether a smaller one would do when next to nothing waits.

But a queue alone is no reason: where all that is asked cannot be carried, as by engines that share
a GPU, prompts wait at every limit. So a raise has to pay: it is taken back when the engine does not
end more than it did before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CROWDED = 0.3
"""The limit is too small when work waits over this share of the time that it is in the engine."""
QUIET = 0.1
"""Below this share a smaller limit may do."""
RISING = 0.7
"""A queue that has shrunk to less than this since the window began is left to go by itself."""
ROOM = 0.85
"""A smaller limit must have been seen to carry this much more than is asked of it now."""
PAYS = 0.02
"""A limit twice as high must end so much more, and one in between accordingly."""
LEGS = 24
"""Prompts that a window lasts at least: fewer say little."""
FORGET = 96
"""Windows after which what a limit could carry is tried again: prompts may have become others."""
MOST = 256
OVERDUE = 8.0
"""An engine that has ended nothing for so many usual legs gets one prompt more, and so on: what it
holds may be hanging."""
_SHORTEST_S = 0.001
REQUEST_TOKENS = 500
"""What a prompt costs besides its tokens, in tokens; a 100-token prompt is not nothing."""


def weigh(prompts: int, tokens: int) -> float:
    """Work, in tokens."""
    return float(tokens + REQUEST_TOKENS * prompts)


class Backlog:
    """Work that waits for any prefill engine, for each of them, and its sum over time."""

    def __init__(self) -> None:
        self.work = 0.0
        self._area = 0.0
        self._at = 0.0

    def tell(self, now: float, work: float) -> None:
        """From now on this much waits for each."""
        self._area = self.area(now)
        self._at, self.work = now, work

    def area(self, now: float) -> float:
        return self._area + self.work * (now - self._at)


@dataclass(slots=True)
class _Window:
    """Sums over the time since the limit was last looked at."""

    since: float
    waiting: float
    """Work that waited when it began."""
    queue: float = 0.0
    """Work that waited, times seconds, while the engine had no room."""
    work: float = 0.0
    """Work that the engine had, times seconds."""
    held: float = 0.0
    """Prompts that it had, times seconds."""
    full_s: float = 0.0
    ended: int = 0
    done: float = 0.0
    """Work that has ended."""


class Pacer:
    """The limit of one prefill engine."""

    def __init__(self, backlog: Backlog, *, least: int = 1) -> None:
        """`least` is the lowest limit: an engine's data parallel ranks compute side by side."""
        self.limit = self._least = least
        self._backlog = backlog
        self._held = 0
        self._work = 0.0
        self._at = self._ended_at = self._area = 0.0
        self._leg_s = 1.0
        """Of a usual leg; before the first one has ended, a guess."""
        self._settling = 1
        """Legs that have yet to end before a window begins: those of an earlier limit."""
        self._is_crowded = False
        self._count = 0
        self._carried: dict[int, tuple[float, int]] = {}
        """What limits carried while prompts waited: work a second, and in which window."""
        self._lower: int | None = None
        """The limit before the last raise, while it is not known whether that has paid."""
        self._window = _Window(0.0, 0.0)

    def has_room(self, now: float) -> bool:
        overdue = 0
        if self._held:
            overdue = int((now - self._ended_at) / (OVERDUE * self._leg_s))
        return self._held < self.limit + overdue

    def tell(self, now: float, *, held: int, work: float) -> None:
        """From now on the engine has so many prompts, together so much work (`weigh`)."""
        self._sum(now)
        ended, done = self._held - held, self._work - work
        if not self._held:
            self._ended_at = now
        self._held, self._work = held, work
        for _ in range(ended):
            self._end(now, done / ended)

    def _sum(self, now: float) -> None:
        window, passed_s = self._window, now - self._at
        area = self._backlog.area(now)
        window.work += self._work * passed_s
        window.held += self._held * passed_s
        if self._held >= self.limit:
            window.queue += area - self._area
            window.full_s += passed_s
        self._at, self._area = now, area

    def _end(self, now: float, work: float) -> None:
        """One prompt is done, of so much work."""
        self._ended_at = now
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._open(now)
            return
        window = self._window
        window.ended += 1
        window.done += work
        passed_s = now - window.since
        if passed_s > 0 and window.ended >= max(LEGS, 2 * window.held / passed_s):
            self._leg_s = max(_SHORTEST_S, window.held / window.ended)
            self._decide(now, window, passed_s)

    def _decide(self, now: float, window: _Window, passed_s: float) -> None:
        self._count += 1
        crowd = window.queue / window.work if window.work else 0.0
        if crowd > CROWDED:
            self._rise(now, window, passed_s, crowd)
            return
        self._is_crowded = False
        if crowd < QUIET:
            self._fall(now, window, passed_s)
        else:
            self._open(now)

    def _rise(self, now: float, window: _Window, passed_s: float, crowd: float) -> None:
        """Twice as much where much waits, one more where some has waited twice, if that pays."""
        if window.full_s > passed_s / 2:
            self._note(window.done / window.full_s)
            if self._lower is not None and not self._pays(self._lower, self.limit):
                self._set(now, self._lower)
                return
            self._lower = None
        higher = self.limit
        if self._backlog.work >= RISING * window.waiting:
            if crowd > 2 * CROWDED:
                higher = 2 * self.limit
            elif self._is_crowded:
                higher = self.limit + 1
        self._is_crowded = True
        if higher > self.limit and self._pays(self.limit, higher):
            lower = self.limit
            self._set(now, higher)
            self._lower = lower
        else:
            self._open(now)

    def _note(self, rate: float) -> None:
        known, _ = self._carried.get(self.limit, (rate, 0))
        self._carried[self.limit] = ((known + rate) / 2, self._count)

    def _pays(self, lower: int, higher: int) -> bool:
        """Whether the higher limit ends more, as far as is known."""
        less, _ = self._carried.get(lower, (0.0, 0))
        more, when = self._carried.get(higher, (math.inf, self._count))
        if self._count - when > FORGET:
            return True
        return more > less * (1 + PAYS * (higher - lower) / lower)

    def _fall(self, now: float, window: _Window, passed_s: float) -> None:
        """To the smallest limit that is above what was needed, and not known to be too small."""
        rate = window.done / passed_s
        needed = math.ceil(1.3 * window.held / passed_s)
        for limit in range(max(self._least, min(self.limit - 1, needed)), self.limit):
            carried, when = self._carried.get(limit, (math.inf, self._count))
            if rate < ROOM * carried or self._count - when > FORGET:
                self._set(now, limit)
                return
        self._open(now)

    def _set(self, now: float, limit: int) -> None:
        self.limit = max(self._least, min(MOST, limit))
        self._is_crowded = False
        self._lower = None
        self._settling = max(1, self._held)
        self._open(now)

    def _open(self, now: float) -> None:
        self._window = _Window(now, self._backlog.work)
