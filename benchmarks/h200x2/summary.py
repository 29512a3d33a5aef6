"""From runs to the figures that were asked for. Pure. What was not measured is None, never 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdeploy.planning.bench.figures import SUMS, TIMES, Group, TooFewError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.h200x2.arms import Shape
    from benchmarks.h200x2.ledger import Entry
    from kvdeploy.model.bench import Cell, Run

STATISTICS = ("p50", "p90", "p99", "mean")


@dataclass(frozen=True, kw_only=True)
class Side:
    """All runs of one arm in one mode on one cell, beside the same others."""

    act: str
    beside: str
    arm: str
    group: Group

    @property
    def label(self) -> str:
        """'push-sequential' of default, 'stock'."""
        by_mode = self.arm == "default" and self.act in {"compare", "cold"}
        return self.group.mode if by_mode else self.arm

    def find(self, metric: str, statistic: str = "") -> float | None:
        try:
            return self.group.find(metric, statistic)
        except TooFewError:
            return None


def find_sides(entries: Sequence[Entry]) -> list[Side]:
    runs: dict[tuple[str, str, str, str, Cell], list[Run]] = {}
    for e in entries:
        runs.setdefault((e.act, e.beside, e.arm, e.run.mode, e.run.cell), []).append(e.run)
    return [
        Side(
            act=act,
            beside=beside,
            arm=arm,
            group=Group(mode=found[0].mode, cell=cell, runs=tuple(found)),
        )
        for (act, beside, arm, _, cell), found in runs.items()
    ]


def summarize(entries: Sequence[Entry], shape: Shape) -> dict[str, Any]:
    """Each above 1 where kvdeploy's is the better one; what is divided stands in the name.

    Requests a second are better when there are more, so that ratio is of seconds a request.
    """
    sides = find_sides(entries)
    middle = shape.concurrency[0]
    main, cold = At("shared", middle), At("cold", 1)
    told: dict[str, Any] = {
        "ttft_p50_stock_over_default": main.ratio(sides, "stock", "ttft", "p50"),
        "ttft_p99_stock_over_default": main.ratio(sides, "stock", "ttft", "p99"),
        "reqs_stock_over_default": inverse(main.ratio(sides, "stock", "rate")),
        "ttft_p99_pull_over_push_equal": main.ratio(sides, "pull", "ttft", "p99"),
        "cold_ttft_mean_pull_over_push": cold.ratio(sides, "pull", "ttft", "mean"),
        "cold_ttft_mean_stock_over_push": cold.ratio(sides, "stock", "ttft", "mean"),
    }
    for scenario in ("shared", "unique"):
        for clients in shape.concurrency:
            for metric, statistic in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p90")):
                key = f"{metric}_{statistic}_pull_over_push_equal_{scenario}_x{clients}"
                told[key] = At(scenario, clients).ratio(sides, "pull", metric, statistic)
    return told


@dataclass(frozen=True)
class At:
    """A cell, of whatever lengths."""

    scenario: str
    clients: int

    def ratio(
        self, sides: Sequence[Side], arm: str, metric: str, statistic: str = ""
    ) -> float | None:
        """The arm's figure over that of `default` in push, measured in turns with it."""
        for side in sides:
            if side.arm != arm or not self._is_of(side):
                continue
            for ours in sides:
                same = (ours.act, ours.beside, ours.group.cell) == (
                    *(side.act, side.beside, side.group.cell),
                )
                if same and (ours.arm, ours.group.mode) == ("default", "push"):
                    mine, theirs = ours.find(metric, statistic), side.find(metric, statistic)
                    return round(theirs / mine, 3) if mine and theirs is not None else None
        return None

    def _is_of(self, side: Side) -> bool:
        cell = side.group.cell
        is_here = (cell.scenario, cell.concurrency) == (self.scenario, self.clients)
        return is_here and side.act in {"compare", "cold"}


def inverse(value: float | None) -> float | None:
    return round(1 / value, 3) if value else None


def tell_sides(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    for side in find_sides(entries):
        group = side.group
        told: dict[str, Any] = {
            "act": side.act,
            "beside": side.beside,
            "arm": side.arm,
            "mode": group.mode,
            "cell": str(group.cell),
            "samples": sum(len(r.good) for r in group.runs),
        }
        for metric in TIMES:
            told[f"{metric}_ms"] = {s: _rounded(side.find(metric, s)) for s in STATISTICS}
        told |= {metric: _rounded(side.find(metric)) for metric in SUMS}
        yield told


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
