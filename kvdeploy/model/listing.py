"""Files that list one thing a line, with comments between. Pure."""

from __future__ import annotations

from typing import Final

HASHED: Final = "sha256:"
"""A line of an API key file that begins so holds the hash of a key, in hexadecimal."""


def entries(text: str) -> list[str]:
    """The lines that count: neither blank nor a comment, without space around them."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
