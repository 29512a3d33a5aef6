"""What a reader has to know of a report's figures, as sentences. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.planning.bench.figures import TooFewError, find_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.bench import BenchReport
    from kvdeploy.planning.bench.figures import Group

CPU: Final = "engines ran on CPUs: these figures say nothing about GPUs, only that the bench works"
COLD: Final = (
    "a cold pair was not measured: the router warms every pair before it uses one, so none of its "
    "requests meets one (--scenario cold --restart measures what that saves)"
)
MORE: Final = 1.1
"""Times the descriptors of unique prompts that tell scattered blocks from others."""


def find_notes(report: BenchReport, *, planned: int) -> Iterator[str]:
    """`planned` is how many runs there were to be."""
    if len(report.runs) < planned and not report.failed:
        yield f"it did not come to its end: {len(report.runs)} of {planned} runs were made"
    if report.environment.get("device") == "cpu":
        yield CPU
    for gpu, engines in _shared_gpus(report).items():
        yield (
            f"{' and '.join(engines)} share GPU {gpu}: they wait for each other, and KV does not "
            "leave it; with a GPU each all figures are others"
        )
    groups = find_groups(report)
    if not any(g.cell.scenario == "cold" for g in groups):
        yield COLD
    for group in groups:
        if group.cell.scenario == "fragmented" and group.mode != "aggregated":
            yield from _find_unscattered(group, groups)


def _find_unscattered(group: Group, groups: list[Group]) -> Iterator[str]:
    """Neighbouring blocks move as one: without more descriptors nothing was fragmented."""
    cell = group.cell.model_copy(update={"scenario": "unique"})
    plain = next((g for g in groups if (g.mode, g.cell) == (group.mode, cell)), None)
    what = f"{group.mode} on {group.cell}"
    if plain is None:
        yield f"{what}: whether blocks were scattered cannot be told without --scenario unique"
        return
    try:
        found, usual = group.find("descriptors"), plain.find("descriptors")
    except TooFewError:
        yield f"{what}: whether blocks were scattered cannot be told: no KV was counted"
        return
    if found < MORE * usual:
        yield (
            f"{what}: blocks were not more scattered than with unique prompts "
            f"({found:.0f} descriptors a request, and {usual:.0f})"
        )


def _shared_gpus(report: BenchReport) -> dict[str, list[str]]:
    return dict(report.environment.get("machine", {}).get("shared_gpus") or {})
