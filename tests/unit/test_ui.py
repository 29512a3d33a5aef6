from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest

from kvdeploy.errors import FleetError
from kvdeploy.ui import Step, Ui


class Screen(io.StringIO):
    """Stderr that can be a terminal, and can be waited for."""

    def __init__(self, *, tty: bool = False, until: str = "") -> None:
        super().__init__()
        self.tty, self.until, self.seen = tty, until, threading.Event()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        wrote = super().write(text)
        if self.until and self.until in self.getvalue():
            self.seen.set()
        return wrote

    @property
    def lines(self) -> list[str]:
        """What was said, with times left out."""
        return re.sub(r"\(\d+(\.\d+)? s\)", "(T)", self.getvalue()).splitlines()


def test_without_a_terminal_a_step_is_a_line_at_each_end() -> None:
    screen = Screen()
    with Ui(err=screen).step("build the runtime") as step:
        step.update("package 3 of 9")
    assert screen.lines == ["-> build the runtime", "ok build the runtime (T)"]


def test_a_step_that_fails_ends_with_another_mark_and_its_error_goes_on() -> None:
    screen = Screen()
    with pytest.raises(ZeroDivisionError), Ui(err=screen).step("start the fleet"):
        _ = 1 / 0
    assert screen.lines == ["-> start the fleet", "!! start the fleet (T)"]


def test_an_interrupted_step_is_marked_as_failed() -> None:
    screen = Screen()
    with pytest.raises(KeyboardInterrupt), Ui(err=screen).step("start the fleet"):
        raise KeyboardInterrupt
    assert screen.lines[-1] == "!! start the fleet (T)"


def test_a_long_step_says_now_and_then_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdeploy.ui.HEARTBEAT_S", 0.01)
    screen = Screen(until="waiting for decode-0")
    with Ui(err=screen).step("start the fleet") as step:
        step.update("waiting for decode-0")
        assert screen.seen.wait(10)
    first, *beats, last = screen.lines
    assert (first, last) == ("-> start the fleet", "ok start the fleet (T)")
    assert "   start the fleet: waiting for decode-0 (T)" in beats


@pytest.mark.parametrize("tty", [False, True])
def test_a_note_stays_on_the_screen_and_in_the_log(*, tty: bool) -> None:
    screen, log = Screen(tty=tty), list[str]()
    ui = Ui(err=screen)
    ui.on_line = log.append
    with ui.step("make nodes") as step:
        step.note("   + decode-0 (12 s)")
    assert "   + decode-0 (T)" in "\n".join(screen.lines)
    assert "   + decode-0 (12 s)" in log


def test_a_question_in_a_step_has_the_screen_for_itself() -> None:
    screen = Screen(tty=True)
    ui = Ui(err=screen)
    with ui.step("make nodes"):
        with ui.pause():
            before = screen.getvalue()
            threading.Event().wait(0.4)  # four turns of the live line
            assert screen.getvalue() == before
        ui.say("answered")
    assert screen.lines[-1].endswith("ok make nodes (T)")


def test_a_pause_outside_of_a_step_is_none() -> None:
    with Ui(err=Screen()).pause():
        pass


def test_after_its_end_a_step_says_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdeploy.ui.HEARTBEAT_S", 0.01)
    before = threading.active_count()
    screen = Screen()
    with Ui(err=screen).step("x"):
        pass
    assert threading.active_count() <= before
    assert screen.lines[-1] == "ok x (T)"


def test_on_a_terminal_a_step_is_one_live_line_and_a_last_one() -> None:
    screen = Screen(tty=True, until="waiting for decode-0")
    with Ui(err=screen).step("start the fleet") as step:
        step.update("waiting for decode-0")
        assert screen.seen.wait(10)
    assert "-> start the fleet" not in screen.getvalue()
    assert screen.lines[-1].endswith("ok start the fleet (T)")


def test_brackets_in_a_title_are_text_on_a_terminal() -> None:
    screen = Screen(tty=True, until="[bold]")
    with Ui(err=screen).step("fetch [bold]x"):
        assert screen.seen.wait(10)


def test_quiet_shows_nothing_but_errors() -> None:
    screen = Screen()
    ui = Ui(err=screen, quiet=True)
    with ui.step("x"):
        ui.say("y")
    ui.error(FleetError("broken"))
    assert screen.lines == ["error: broken"]


@pytest.mark.parametrize("quiet", [False, True])
def test_whoever_keeps_the_log_is_told_everything(*, quiet: bool) -> None:
    kept: list[str] = []
    ui = Ui(err=Screen(), quiet=quiet)
    ui.on_line = kept.append
    with ui.step("x"):
        ui.say("y")
    ui.error(FleetError("broken", hint="mend it"))
    assert [re.sub(r"\(.*\)", "(T)", line) for line in kept] == [
        "-> x",
        "y",
        "ok x (T)",
        "error: broken",
        "  try: mend it",
    ]


def test_an_error_is_shown_with_what_to_do_and_where_the_log_is() -> None:
    screen = Screen()
    Ui(err=screen).error(FleetError("broken\nin two", hint="mend it", log=Path("/l/og")))
    assert screen.getvalue() == "error: broken\nin two\n  try: mend it\n  log: /l/og\n"


def test_an_error_without_either_is_one_line() -> None:
    screen = Screen()
    Ui(err=screen).error(FleetError("broken"))
    assert screen.getvalue() == "error: broken\n"


def test_a_step_shows_its_detail_only_when_it_has_one() -> None:
    step = Step("x")
    assert re.fullmatch(r"x \(0 s\)", str(step))
    step.update("y")
    assert re.fullmatch(r"x: y \(0 s\)", str(step))
