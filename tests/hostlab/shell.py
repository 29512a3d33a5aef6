"""Runs programs for the lab. What fails is told with the program's own words."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Completed = subprocess.CompletedProcess[str]


class LabError(Exception):
    """The lab itself does not work: never a finding about the playbooks."""


def run(
    *argv: str | Path,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> Completed:
    """Run a program to its end.

    Raises LabError when it fails and `check`, and when it does not end in time.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            cwd=cwd,
            env=env,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as e:
        msg = f"{' '.join(words)} did not end in {timeout_s:.0f} s"
        raise LabError(msg) from e
    if check and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        msg = f"{' '.join(words)} ended with {done.returncode}: {said}"
        raise LabError(msg)
    return done
