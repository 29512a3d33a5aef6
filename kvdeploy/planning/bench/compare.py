"""Two reports side by side. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.planning.bench.figures import SUMS, TIMES, UNITS, TooFewError, find_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.bench import BenchReport
    from kvdeploy.planning.bench.figures import Group

COLUMNS: Final = ("cell", "mode", "figure", "first", "second", "second/first")


def build_rows(one: BenchReport, other: BenchReport) -> Iterator[tuple[str, ...]]:
    """Every figure that both have, for each mode and cell that both have measured."""
    theirs = {(g.cell, g.mode): g for g in find_groups(other)}
    for mine in find_groups(one):
        if (matching := theirs.get((mine.cell, mine.mode))) is None:
            continue
        for metric, statistic in _figures():
            first, second = (_find(g, metric, statistic) for g in (mine, matching))
            if first is None or second is None:
                continue
            ratio = f"{second / first:.2f}" if first else "-"
            label = " ".join(part for part in (metric, statistic, UNITS[metric]) if part)
            yield (str(mine.cell), mine.mode, label, f"{first:.6g}", f"{second:.6g}", ratio)


def find_differences(one: BenchReport, other: BenchReport) -> Iterator[str]:
    """What makes the two less alike than their figures look, as lines."""
    mine, theirs = (
        {f"{g.mode} on {g.cell}" for g in find_groups(report)} for report in (one, other)
    )
    yield from (f"only in the first: {what}" for what in sorted(mine - theirs))
    yield from (f"only in the second: {what}" for what in sorted(theirs - mine))
    flat = [
        dict(_flatten({"environment": r.environment, "options": r.options})) for r in (one, other)
    ]
    for path in sorted(flat[0].keys() | flat[1].keys()):
        first, second = (side.get(path, "nothing") for side in flat)
        if first != second:
            yield f"differs: {path}: {first} and {second}"


def _flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from _flatten(value, where)
        else:
            yield where, json.dumps(value)


def _figures() -> Iterator[tuple[str, str]]:
    for metric in TIMES:
        for statistic in ("p50", "p90", "p99"):
            yield metric, statistic
    for metric in SUMS:
        yield metric, ""


def _find(group: Group, metric: str, statistic: str) -> float | None:
    try:
        return group.find(metric, statistic)
    except TooFewError:
        return None
