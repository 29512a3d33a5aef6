"""What was measured so far, run by run, in a folder from which another call goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdeploy.model.bench import Run

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.h200x2.arms import Arm
    from kvdeploy.model.bench import Cell
    from kvdeploy.model.routing import Mode


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run that is wanted."""

    act: str
    beside: str
    """The arms that are up together: what is compared was measured in turns."""
    arm: Arm
    mode: Mode
    cell: Cell
    round: int

    @property
    def key(self) -> tuple[str, ...]:
        return (self.act, self.beside, self.arm.name, self.mode, str(self.cell), str(self.round))


@dataclass(frozen=True, kw_only=True)
class Entry:
    act: str
    beside: str
    arm: str
    run: Run

    @property
    def key(self) -> tuple[str, ...]:
        run = self.run
        return (self.act, self.beside, self.arm, run.mode, str(run.cell), str(run.round))


class Ledger:
    """Lines that are only added to; one that a killed call left half is not read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._runs, self._calls = folder / "runs.jsonl", folder / "calls.jsonl"
        self.entries = [
            Entry(
                act=told["act"],
                beside=told["beside"],
                arm=told["arm"],
                run=Run.model_validate(told["run"]),
            )
            for told in _read(self._runs)
        ]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every call's environment, smoke and failures."""
        return _read(self._calls)

    def has(self, job: Job) -> bool:
        return any(entry.key == job.key for entry in self.entries)

    def add(self, job: Job, run: Run) -> None:
        entry = Entry(act=job.act, beside=job.beside, arm=job.arm.name, run=run)
        self.entries.append(entry)
        told = {"act": job.act, "beside": job.beside, "arm": job.arm.name}
        _append(self._runs, told | {"run": run.model_dump(mode="json")})

    def add_call(self, told: dict[str, Any]) -> None:
        _append(self._calls, told)


def _append(path: Path, document: dict[str, Any]) -> None:
    before = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        # After a line that was cut, the next one begins anew.
        file.write("\n" if before and not before.endswith("\n") else "")
        file.write(json.dumps(document) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
