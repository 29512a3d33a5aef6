from __future__ import annotations

from dataclasses import dataclass, field

from kvdeploy.polling import SystemClock, wait_for


@dataclass
class FakeClock:
    """Time passes only by sleeping, or by looking when that takes long."""

    time: float = 100.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def test_an_answer_ends_the_wait_at_once() -> None:
    clock = FakeClock()
    assert wait_for(lambda: "there", timeout_s=10, clock=clock) == "there"
    assert clock.slept == []


def test_it_looks_until_there_is_an_answer() -> None:
    clock, answers = FakeClock(), iter([None, None, 7])
    assert wait_for(lambda: next(answers), timeout_s=10, interval_s=0.5, clock=clock) == 7
    assert clock.slept == [0.5, 0.5]


def test_an_answer_that_is_false_is_an_answer() -> None:
    assert wait_for(lambda: False, timeout_s=10, clock=FakeClock()) is False


def test_it_gives_up_when_the_time_has_passed() -> None:
    clock, looks = FakeClock(), []
    assert wait_for(lambda: looks.append(1), timeout_s=2, interval_s=0.5, clock=clock) is None
    assert (clock.time, len(looks)) == (102.0, 5)


def test_without_any_time_it_looks_once() -> None:
    clock, looks = FakeClock(), []
    assert wait_for(lambda: looks.append(1), timeout_s=0, clock=clock) is None
    assert (len(looks), clock.slept) == (1, [])


def test_slow_looks_count() -> None:
    clock = FakeClock()

    def look() -> None:
        clock.time += 3

    assert wait_for(look, timeout_s=5, interval_s=0.1, clock=clock) is None
    assert clock.slept == [0.1]


def test_what_goes_wrong_while_looking_ends_the_wait() -> None:
    clock = FakeClock()

    def look() -> None:
        raise ValueError

    try:
        wait_for(look, timeout_s=5, clock=clock)
    except ValueError:
        assert clock.slept == []
    else:
        raise AssertionError


def test_the_systems_clock_goes_up() -> None:
    clock = SystemClock()
    before = clock.now()
    clock.sleep(0.001)
    assert clock.now() > before
