"""Growing files, line by line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Tail:
    """A growing file, read line by line; a file that replaces it is read from its start."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._at, self._inode, self._rest = 0, 0, b""

    def last(self, count: int) -> list[str]:
        """The last `count` lines; what follows comes from `new`."""
        lines = self.new()
        return lines[-count:] if count > 0 else []

    def new(self) -> list[str]:
        """Whole lines since the last call."""
        try:
            with self._path.open("rb") as f:
                found = os.fstat(f.fileno())
                if found.st_ino != self._inode or found.st_size < self._at:
                    self._at, self._inode, self._rest = 0, found.st_ino, b""
                f.seek(self._at)
                data = self._rest + f.read()
                self._at = f.tell()
        except FileNotFoundError:
            return []
        *whole, self._rest = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]
