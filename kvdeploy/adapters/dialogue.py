"""A program that is spoken to while it runs: one JSON document a line, on its stdin and stdout.

What it says that is no such line is passed over: libraries print. That it fell silent or ended is
an answer like any other, {"error": ...}, so that whoever judges needs no other way.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final, Self

from kvdeploy.polling import wait_for
from kvdeploy.proc import spawn_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

LEAVE_S: Final = 5.0
"""For a program to end by itself once nobody listens any more."""
END_S: Final = 2.0
NOISE_KEPT: Final = 20
"""Last lines of a program's other words that are kept, to say why it ended."""


class Dialogue:
    """A context manager: the program has ended when it is left."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        """Start it. `env` is its whole environment; its stderr goes to `log`.

        Raises:
            ToolError: it cannot be started.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._said_before = log, log.stat().st_size if log.exists() else 0
        self._process = spawn_session(argv, env=env, log=log, talks=True)
        self._heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._noise: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, document: Mapping[str, object]) -> None:
        """One that has ended does not hear it: `hear` tells that."""
        with suppress(OSError):
            self._stdin.write(f"{json.dumps(document)}\n".encode())
            self._stdin.flush()

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next document; `error` says why there is none."""
        try:
            found = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return {"error": f"said nothing for {timeout_s:.0f} s"}
        if found is None:
            self._heard.put(None)  # so it is for whoever asks again
            return {"error": self._how_it_ended()}
        return found

    def close(self) -> None:
        """Let it end; then make it end."""
        with suppress(OSError):
            self._stdin.close()
        for number, patience_s in (
            (None, LEAVE_S),
            (signal.SIGTERM, END_S),
            (signal.SIGKILL, END_S),
        ):
            if number is not None:
                self._process.send_signal(number)
            if wait_for(self._has_ended, timeout_s=patience_s, interval_s=0.02):
                break
        self._reader.join(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None  # noqa: S101  # it talks
        return self._process.stdin

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  # it talks
        with self._process.stdout as out:
            for raw in out:
                line = raw.decode("utf-8", "replace").strip()
                document = _document(line)
                if document is not None:
                    self._heard.put(document)
                elif line:
                    self._noise = [*self._noise, line][-NOISE_KEPT:]
        self._heard.put(None)

    def _has_ended(self) -> bool | None:
        return True if self._process.poll() is not None else None

    def _how_it_ended(self) -> str:
        wait_for(self._has_ended, timeout_s=END_S, interval_s=0.02)
        code = self._process.poll()
        if code is None:
            how = "says no more"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
        with self._log.open("rb") as log:
            log.seek(self._said_before)
            stderr = log.read().decode("utf-8", "replace").split("\n")
        words = next((w for w in reversed([*self._noise, *stderr]) if w.strip()), "")
        return f"{how}: {words.strip()}" if words else how


def _document(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
