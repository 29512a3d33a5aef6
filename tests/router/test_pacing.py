"""The rule that finds how many prompts a prefill engine is given at once."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdeploy.router.pacing import FORGET, LEGS, MOST, Backlog, Pacer, weigh

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 1000


class Engine:
    """A prefill engine that computes what it has together, in `fixed_s` + `each_s` a prompt, and
    prompts that come evenly; the clock moves from one event to the next.
    """

    def __init__(self, *, fixed_s: float = 0.03, each_s: float = 0.03, least: int = 1) -> None:
        self.backlog = Backlog()
        self.pacer = Pacer(self.backlog, least=least)
        self.waiting: deque[float] = deque()
        self.waits: list[float] = []
        self.now = 0.0
        self._fixed_s, self._each_s = fixed_s, each_s
        self._held = 0
        self._batch = 0
        self._done_at = math.inf
        self._came = 0.0

    def run(self, until: float, *, rate: float) -> list[float]:
        """The waits of what was let in meanwhile."""
        before = len(self.waits)
        while True:
            come = max(self._came + 1 / rate, self.now) if rate else math.inf
            at = min(come, self._done_at)
            if at > until:
                self.now = until
                return self.waits[before:]
            self.now = at
            if at == come:
                self._came = at
                self.waiting.append(at)
            else:
                self._finish()
            self._let_in()

    def burst(self, count: int) -> None:
        self.waiting.extend([self.now] * count)
        self._let_in()

    def _finish(self) -> None:
        for _ in range(self._batch):
            self._tell(self._held - 1)
        self._batch, self._done_at = 0, math.inf

    def _let_in(self) -> None:
        self._say()
        while self.waiting and self.pacer.has_room(self.now):
            self.waits.append(self.now - self.waiting.popleft())
            self._say()
            self._tell(self._held + 1)
        if not self._batch and self._held:
            self._batch = self._held
            self._done_at = self.now + self._fixed_s + self._each_s * self._batch

    def _say(self) -> None:
        self.backlog.tell(self.now, weigh(len(self.waiting), TOKENS * len(self.waiting)))

    def _tell(self, held: int) -> None:
        self._held = held
        self.pacer.tell(self.now, held=held, work=weigh(held, TOKENS * held))


def test_it_begins_with_one_at_a_time() -> None:
    assert Engine().pacer.limit == 1


def test_ranks_that_compute_side_by_side_have_one_each() -> None:
    engine = Engine(least=8)
    engine.run(60, rate=5)
    assert engine.pacer.limit == 8


def test_a_light_load_never_waits_and_keeps_the_lowest_limit() -> None:
    engine = Engine()
    assert set(engine.run(100, rate=8)) == {0}
    assert engine.pacer.limit == 1


@pytest.mark.parametrize(("rate", "needed"), [(12, 1), (20, 2), (24, 3), (28, 6), (31, 14)])
def test_it_settles_near_the_smallest_limit_that_keeps_up(rate: int, needed: int) -> None:
    """`needed` at once are computed in 0.03 s and 0.03 s each."""
    assert needed / (0.03 + 0.03 * needed) >= rate > (needed - 1) / (0.03 * needed)
    engine = Engine()
    engine.run(30, rate=rate)
    seen = watch(engine, seconds=60, rate=rate)
    usual = sorted(seen)[len(seen) // 2]
    assert needed <= usual <= needed * 1.5
    assert len(engine.waiting) < 10


def test_it_comes_down_again_when_the_load_does() -> None:
    engine = Engine()
    engine.run(60, rate=32)
    high = engine.pacer.limit
    engine.run(80, rate=8)
    assert high >= 8
    assert engine.pacer.limit == 1


def test_what_comes_at_once_raises_the_limit_after_one_window() -> None:
    engine = Engine()
    engine.burst(128)
    engine.run(LEGS * 0.06, rate=0)
    assert engine.pacer.limit == 1
    engine.run((LEGS + 2) * 0.06, rate=0)
    assert engine.pacer.limit == 2


def test_a_limit_that_was_too_small_is_left_alone_for_a_while_and_then_tried_again() -> None:
    engine = Engine()
    engine.run(20, rate=17)
    assert set(watch(engine, seconds=40, rate=17)) == {2}
    seen = watch(engine, seconds=FORGET * LEGS // 17, rate=17)
    assert (1 in seen, seen[-1]) == (True, 2)


def watch(engine: Engine, *, seconds: int, rate: float) -> list[int]:
    """Its limits, every tenth of a second."""
    seen = []
    start = engine.now
    for tenth in range(10 * seconds):
        engine.run(start + tenth / 10, rate=rate)
        seen.append(engine.pacer.limit)
    return seen


def test_one_long_prompt_among_short_ones_changes_nothing() -> None:
    """Many prompts wait while it is computed, whenever one looks, but little work."""
    backlog = Backlog()
    pacer = Pacer(backlog)
    now = 0.0
    for _ in range(40):
        for tokens, takes_s in [(30_000, 1.0)] + [(100, 0.03)] * (LEGS - 1):
            pacer.tell(now, held=1, work=weigh(1, tokens))
            backlog.tell(now, weigh(11, 1100) if tokens > 100 else 0.0)
            now += takes_s
            pacer.tell(now, held=0, work=0.0)
    assert pacer.limit == 1


def test_a_little_that_waits_all_the_while_raises_the_limit_by_one_after_two_windows() -> None:
    backlog = Backlog()
    pacer = Pacer(backlog)
    backlog.tell(0.0, 0.45 * weigh(1, TOKENS))
    limits = []
    pacer.tell(0.0, held=1, work=weigh(1, TOKENS))
    for leg in range(1, 2 * LEGS + 2):
        pacer.tell(leg / 10, held=0, work=0.0)
        limits.append(pacer.limit)
        pacer.tell(leg / 10, held=1, work=weigh(1, TOKENS))
    assert limits == [1] * 2 * LEGS + [2]


def test_a_queue_before_an_engine_that_has_room_waits_for_something_else() -> None:
    """For decode, perhaps: two ranks could have a prompt each, and one of them has none."""
    backlog = Backlog()
    pacer = Pacer(backlog, least=2)
    backlog.tell(0.0, weigh(9, 9 * TOKENS))
    feed(pacer, until=lambda now: now > 20)
    assert pacer.limit == 2


def test_what_can_never_be_carried_raises_the_limit_as_long_as_that_pays() -> None:
    """Limits of 16, 32 and 64 carry 31.4, 32.3 and 32.8 a second."""
    engine = Engine()
    engine.run(240, rate=60)
    assert engine.pacer.limit == 32


def test_a_raise_that_does_not_pay_is_taken_back_and_not_tried_again_soon() -> None:
    """An engine that computes one prompt after the other carries no more with two."""
    engine = Engine(fixed_s=0.0, each_s=0.06)
    engine.run(2, rate=60)
    seen = watch(engine, seconds=FORGET * LEGS // 20, rate=60)
    assert seen.count(1) > 0.9 * len(seen)
    assert 2 in watch(engine, seconds=FORGET * LEGS // 10, rate=60)


def test_a_limit_has_a_limit() -> None:
    engine = Engine(fixed_s=0.5, each_s=0.0)
    engine.run(60, rate=2000)
    assert engine.pacer.limit == MOST


def test_what_hangs_in_the_engine_does_not_stop_the_others_for_ever() -> None:
    backlog = Backlog()
    pacer = Pacer(backlog)
    feed(pacer, until=lambda now: now > 10)
    pacer.tell(11.0, held=1, work=weigh(1, TOKENS))
    backlog.tell(11.0, weigh(1, TOKENS))
    assert not pacer.has_room(11.1)
    assert pacer.has_room(12.0)
    pacer.tell(12.0, held=2, work=weigh(2, 2 * TOKENS))
    assert not pacer.has_room(11.5)


def feed(pacer: Pacer, *, until: Callable[[float], bool], takes_s: float = 0.1) -> float:
    """Lone prompts, one after the other."""
    now = 0.0
    while not until(now):
        pacer.tell(now, held=1, work=weigh(1, TOKENS))
        now += takes_s
        pacer.tell(now, held=0, work=0.0)
    return now


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.integers(-40, 40), st.integers(0, 30_000), st.integers(0, 200)
        ),
        max_size=120,
    ),
    st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_the_limit_is_within_bounds_and_an_idle_engine_has_room(
    told: list[tuple[float, int, int, int]], least: int
) -> None:
    backlog = Backlog()
    pacer = Pacer(backlog, least=least)
    now, held = 0.0, 0
    for passed_s, step, tokens, waiting in told:
        now += passed_s
        held = max(0, held + step)
        backlog.tell(now, weigh(waiting, waiting * tokens))
        pacer.tell(now, held=held, work=weigh(held, held * tokens))
        assert least <= pacer.limit <= MOST
        assert held or pacer.has_room(now)
        assert held < pacer.limit or pacer.has_room(now) or held >= least
