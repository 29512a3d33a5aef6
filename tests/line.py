"""For tests of stages."""

from __future__ import annotations


class Line:
    """A step that remembers what was said on it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self, detail: str) -> None:
        self.said.append(detail)

    def note(self, text: str) -> None:
        self.said.append(text)
