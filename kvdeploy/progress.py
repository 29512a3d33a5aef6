"""What work in progress says of itself, whoever shows it."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """The line of progress of one piece of work."""

    def update(self, detail: str) -> None:
        """Say what is happening or being waited for, right now."""

    def note(self, text: str) -> None:
        """Say something that is to stay on the screen, e.g. that one part is done."""


class Mute:
    """Shows nothing."""

    def update(self, detail: str) -> None: ...

    def note(self, text: str) -> None: ...
