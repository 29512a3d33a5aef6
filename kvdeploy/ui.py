"""What the user sees. Progress goes to stderr; stdout is kept for the result.

On a terminal a step is one live line; elsewhere it is a line when it starts, a heartbeat
while it lasts, and a line when it ends.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.errors import KvdeployError

HEARTBEAT_S: Final = 15.0


class Step:
    """One piece of work in progress."""

    def __init__(self, title: str, note: Callable[[str], None] = lambda _: None) -> None:
        self.title = title
        self.detail = ""
        self.started = time.monotonic()
        self.note = note
        """Say something that is to stay on the screen, e.g. that one part is done."""

    def update(self, detail: str) -> None:
        self.detail = detail

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.title}{detail} ({self.seconds:.0f} s)"


class Ui:
    def __init__(
        self, *, err: TextIO | None = None, live: bool | None = None, quiet: bool = False
    ) -> None:
        self._err = err or sys.stderr
        self._live = self._err.isatty() if live is None else live
        self._quiet = quiet
        self._print: Callable[[str], None] = self._print_plainly
        self._pausing, self._paused = threading.Event(), threading.Event()
        self.on_line: Callable[[str], None] | None = None
        """Also told every line, for the run's log."""

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Bracket one piece of work: its name when it starts, its time when it ends."""
        step = Step(title, self.say)
        if not self._live:
            self.say(f"-> {title}")
        show = self._spin if self._live and not self._quiet else self._beat
        done = threading.Event()
        shower = threading.Thread(target=show, args=(step, done), daemon=True)
        shower.start()
        try:
            yield step
        except BaseException:
            self._end(shower, done)
            self.say(f"!! {title} ({step.seconds:.1f} s)")
            raise
        self._end(shower, done)
        self.say(f"ok {title} ({step.seconds:.1f} s)")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the live line off the screen while somebody is asked something in a step."""
        if not self._live or self._quiet:
            yield
            return
        self._pausing.set()
        self._paused.wait(1.0)  # in vain outside of a step: nothing moves there
        try:
            yield
        finally:
            self._pausing.clear()

    def say(self, text: str) -> None:
        if not self._quiet:
            self._print(text)
        if self.on_line is not None:
            self.on_line(text)

    def _print_plainly(self, text: str) -> None:
        print(text, file=self._err, flush=True)

    def error(self, error: KvdeployError) -> None:
        lines = [f"error: {error.message}"]
        if error.hint:
            lines.append(f"  try: {error.hint}")
        if error.log:
            lines.append(f"  log: {error.log}")
        for line in lines:
            print(line, file=self._err, flush=True)
            if self.on_line is not None:
                self.on_line(line)

    def _beat(self, step: Step, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_S):
            self.say(f"   {step}")

    def _spin(self, step: Step, done: threading.Event) -> None:
        from rich.console import Console
        from rich.status import Status
        from rich.text import Text

        console = Console(file=self._err)
        with Status(Text(str(step)), console=console) as status:
            self._print = lambda line: console.print(Text(line))  # above the live line
            while not done.wait(0.1):
                if self._pausing.is_set():
                    status.stop()
                    self._paused.set()
                    while self._pausing.is_set():
                        done.wait(0.1)
                    self._paused.clear()
                    status.start()
                status.update(Text(str(step)))
        self._print = self._print_plainly

    @staticmethod
    def _end(shower: threading.Thread, done: threading.Event) -> None:
        done.set()
        shower.join()
