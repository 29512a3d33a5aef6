"""From samples to figures. Pure. A figure that its samples do not carry is not given at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvdeploy.model.bench import BenchReport, Cell, Moved, Run, Sample
    from kvdeploy.model.routing import Mode

TIMES: Final[dict[str, Callable[[Sample], Iterable[float | None]]]] = {
    "ttft": lambda s: (s.ttft_s,),
    "tpot": lambda s: (s.tpot_s,),
    "itl": lambda s: s.gaps_s,
    "e2e": lambda s: (s.total_s,),
}
"""What is timed of each request, in milliseconds everywhere below."""
STATISTICS: Final = ("p50", "p90", "p99", "mean")
PERCENTS: Final = {"p50": 50, "p90": 90, "p99": 99}

SUMS: Final[dict[str, Callable[[Sequence[Run]], float]]] = {
    "rate": lambda runs: _count(runs) / sum(r.seconds for r in runs),
    "tokens": lambda runs: (
        sum(s.output_tokens for r in runs for s in r.good) / sum(r.seconds for r in runs)
    ),
    "errors": lambda runs: float(sum(bool(s.error) for r in runs for s in r.samples)),
    "bytes": lambda runs: sum(m.kv_bytes for m in _moved(runs)) / _count(runs),
    "descriptors": lambda runs: sum(m.descriptors for m in _moved(runs)) / _count(runs),
    "transfer": lambda runs: _each(runs, lambda m: m.transfer_s),
    "post": lambda runs: _each(runs, lambda m: m.post_s),
}
"""Of a mode: requests and tokens a second, errors in all, and what a request (or, for the two
times, a transfer) took of the fabric."""
UNITS: Final = {
    "rate": "requests/s",
    "tokens": "tokens/s",
    "errors": "",
    "bytes": "bytes a request",
    "descriptors": "a request",
    "transfer": "ms a transfer",
    "post": "ms a transfer",
} | dict.fromkeys(TIMES, "ms")


class TooFewError(ValueError):
    """The samples do not carry the figure that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All runs of one mode on one cell."""

    mode: Mode
    cell: Cell
    runs: tuple[Run, ...]

    def values(self, metric: str) -> list[float]:
        """Of every request that was answered, in milliseconds."""
        good = (s for run in self.runs for s in run.good)
        return [v * 1e3 for s in good for v in TIMES[metric](s) if v is not None]

    def find(self, metric: str, statistic: str = "") -> float:
        """Raises TooFewError."""
        if metric in TIMES:
            return find_statistic(self.values(metric), statistic)
        try:
            return SUMS[metric](self.runs)
        except ZeroDivisionError:
            msg = "nothing was answered or moved"
            raise TooFewError(msg) from None


def find_groups(report: BenchReport) -> list[Group]:
    """In the order in which cells and modes were asked first."""
    found: dict[tuple[Cell, Mode], list[Run]] = {}
    for run in report.runs:
        found.setdefault((run.cell, run.mode), []).append(run)
    cells = list(dict.fromkeys(run.cell for run in report.runs))
    return [
        Group(mode=mode, cell=cell, runs=tuple(found[cell, mode]))
        for cell in cells
        for mode in report.modes
        if (cell, mode) in found
    ]


def samples_needed(statistic: str) -> int:
    """So many that the percentile is not simply the worst one seen."""
    percent = PERCENTS.get(statistic)
    return 1 if percent is None else max(5, 100 // (100 - percent))


def find_statistic(values: Sequence[float], statistic: str) -> float:
    """Of percentiles the nearest rank. Raises TooFewError."""
    needed = samples_needed(statistic)
    if len(values) < needed:
        msg = f"{len(values)} samples, and {statistic} takes {needed}"
        raise TooFewError(msg)
    if statistic == "mean":
        return math.fsum(values) / len(values)
    return sorted(values)[math.ceil(len(values) * PERCENTS[statistic] / 100) - 1]


def _count(runs: Sequence[Run]) -> int:
    return sum(len(r.good) for r in runs)


def _moved(runs: Sequence[Run]) -> list[Moved]:
    moved = [r.moved for r in runs if r.moved is not None]
    if len(moved) < len(runs):
        msg = "engines' counters could not be read after one of its runs"
        raise TooFewError(msg)
    return moved


def _each(runs: Sequence[Run], take: Callable[[Moved], float]) -> float:
    moved = _moved(runs)
    return sum(map(take, moved)) * 1e3 / sum(m.transfers for m in moved)
