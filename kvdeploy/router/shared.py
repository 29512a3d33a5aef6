"""What the workers of one router have in common, in one folder: what they have counted, as files
of prometheus_client's, one set a worker; and which engines an operator holds back.

Owns how a worker's values get there and how all are read. A worker that takes the place of another
counts on where that one ended; gauges of a worker that is gone are gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

COMPLETE: Final = "kvdeploy_router_complete"
OF_THE_TABLE: Final = frozenset(
    f"kvdeploy_router_{name}" for name in ("pair_ready", "engine_state", "lost_blocks")
)
"""Gauges that speak of engines that the router knows now, and of no others."""
_ENGINE_LABELS: Final = ("engine", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of one worker among several."""

    slot: int
    workers: int
    port: int
    folder: str


def admin_socket(folder: str, slot: int) -> str:
    """Where one worker answers their parent."""
    return f"{folder}/admin-{slot}.sock"


def read_held(folder: str) -> frozenset[str]:
    """Names of the engines that an operator holds back."""
    try:
        return frozenset(json.loads((Path(folder) / "held.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()


def write_held(folder: str, names: frozenset[str]) -> None:
    part = Path(folder) / "held.part"
    part.write_text(json.dumps(sorted(names)), encoding="utf-8")
    part.replace(Path(folder) / "held.json")


def share_values(folder: str, slot: int) -> None:
    """From now on metrics of this process are kept in the folder. Call it before any is made."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]


def forget_worker(folder: str, slot: int) -> None:
    """It is gone: what it held counts no more, what it has counted stays."""
    mark_process_dead(slot, folder)  # type: ignore[no-untyped-call]


class Shared:
    """The sum of all workers, as a registry to be rendered."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.engines: frozenset[str] = frozenset()
        """Those in the table."""

    def collect(self) -> Iterable[Metric]:
        files = MultiProcessCollector(None, self._folder)  # type: ignore[no-untyped-call]
        for metric in files.collect():  # type: ignore[no-untyped-call]
            if metric.name in OF_THE_TABLE:
                metric.samples = [s for s in metric.samples if self._is_known(s.labels)]
            yield metric

    def is_complete(self, workers: int) -> bool:
        """Whether so many workers have every pair ready."""
        return any(
            sample.value == workers
            for metric in self.collect()
            if metric.name == COMPLETE
            for sample in metric.samples
        )

    def _is_known(self, labels: dict[str, str]) -> bool:
        return all(labels.get(name) in {None, *self.engines} for name in _ENGINE_LABELS)
