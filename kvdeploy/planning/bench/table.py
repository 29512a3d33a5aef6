"""The figures of a bench as rows of text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.planning.bench.figures import (
    PERCENTS,
    TooFewError,
    find_groups,
    samples_needed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.bench import BenchReport
    from kvdeploy.planning.bench.figures import Group

TIMED: Final = ("ttft", "tpot", "itl")
COLUMNS: Final = (
    *("cell", "mode", "asked", "errors", "requests/s"),
    *(f"{metric} p50/p90/p99 ms" for metric in TIMED),
    *("MiB a request", "descriptors", "transfer ms", "post ms"),
)
NOTHING: Final = "-"


def build_rows(report: BenchReport) -> Iterator[tuple[str, ...]]:
    for group in find_groups(report):
        asked = sum(len(run.samples) for run in group.runs)
        yield (
            str(group.cell),
            group.mode,
            str(asked),
            _tell(group, "errors"),
            _tell(group, "rate", ".2f"),
            *("/".join(_tell(group, m, ".1f", p) for p in PERCENTS) for m in TIMED),
            _tell(group, "bytes", ".3f", scale=2**-20),
            _tell(group, "descriptors", ".0f"),
            _tell(group, "transfer", ".1f"),
            _tell(group, "post", ".2f"),
        )


def too_few(report: BenchReport) -> str:
    """Which figures have too few samples to be given; '' when none has."""
    missing = {
        f"{metric} {percentile}"
        for group in find_groups(report)
        for metric in TIMED
        for percentile in PERCENTS
        if len(group.values(metric)) < samples_needed(percentile)
    }
    if not missing:
        return ""
    needed = ", ".join(f"{p} takes {samples_needed(p)}" for p in PERCENTS)
    listing = ", ".join(sorted(missing))
    return (
        f"too few samples, so not given everywhere: {listing} ({needed}); ask for more --requests"
    )


def _tell(
    group: Group, metric: str, form: str = ".0f", statistic: str = "", *, scale: float = 1
) -> str:
    try:
        return format(group.find(metric, statistic) * scale, form)
    except TooFewError:
        return NOTHING
