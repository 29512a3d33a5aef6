"""Rung `ttft`: push must not be slower to the first token than pull, on the same pair. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from kvdeploy.model.bench import Cell
from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.bench import Run

RUNG: Final = "ttft"
ROUNDS: Final = 2
LEAST: Final = 20
"""Samples of a mode, in all its rounds: with fewer a median is the luck of a few."""
TOLERANCE: Final = 0.25
"""How much slower the median of push may be, as a share of pull's."""
ON_CPUS: Final = "on CPUs engines share their cores with what moves KV, which shows nothing of GPUs"


def build_cell(*, block_size: int, max_length: int) -> Cell:
    """What is asked: prompts of over 8 blocks where they fit, one after the other.

    Raises:
        ValueError: not even one of a block and a token fits.
    """
    tokens = min(8 * block_size + block_size // 2, (max_length - 2) * 3 // 4)
    if tokens <= block_size:
        msg = f"model.max_length, {max_length}, has no room for a prompt of over one KV block"
        raise ValueError(msg)
    return Cell(scenario="unique", input_tokens=tokens, output_tokens=2, concurrency=1)


def judge_ttft(
    subject: str, runs: Sequence[Run], *, why_not: str = "", tolerance: float = TOLERANCE
) -> RungReport:
    """Compare medians over all rounds of each mode.

    Args:
        subject: the pair.
        runs: of both modes, in the order in which they were made.
        why_not: why these figures say nothing of push and pull; '' when they do.
        tolerance: how much slower the median of push may be, as a share of pull's.
    """
    seen = {m: [s.ttft_s for r in runs if r.mode == m for s in r.good] for m in ("push", "pull")}
    evidence: dict[str, object] = {
        "tolerance": tolerance,
        "rounds": [
            {
                "mode": r.mode,
                "round": r.round,
                "ttft_ms": [round(s.ttft_s * 1e3, 2) for s in r.good],
                "errors": [s.error for s in r.samples if s.error],
                "kv_bytes": r.moved.kv_bytes if r.moved else None,
            }
            for r in runs
        ],
    }
    few = {m: len(samples) for m, samples in seen.items() if len(samples) < LEAST}
    if few:
        listed = " and ".join(f"{count} of {mode}" for mode, count in few.items())
        message = f"too few answers for a median: {listed}, {LEAST} needed"
        return _report(subject, Verdict.NOT_APPLICABLE, message, evidence)
    if idle := sorted({r.mode for r in runs if not (r.moved and r.moved.kv_bytes)}):
        message = f"{' and '.join(idle)} moved no KV, so there is nothing to compare"
        return _report(subject, Verdict.FAILED, message, evidence)
    medians = {m: statistics.median(samples) * 1e3 for m, samples in seen.items()}
    return _compare(subject, medians, seen, evidence, why_not=why_not, tolerance=tolerance)


def _compare(
    subject: str,
    medians: Mapping[str, float],
    seen: Mapping[str, Sequence[float]],
    evidence: dict[str, object],
    *,
    why_not: str,
    tolerance: float,
) -> RungReport:
    ratio = medians["push"] / medians["pull"]
    counted = {m: len(samples) for m, samples in seen.items()}
    evidence |= {"median_ms": dict(medians), "ratio": round(ratio, 3), "samples": counted}
    told = (
        f"median {medians['push']:.1f} ms by push, {medians['pull']:.1f} ms by pull "
        f"({ratio:.2f}, up to {1 + tolerance:.2f} allowed; {counted['push']} and "
        f"{counted['pull']} answers)"
    )
    if why_not:
        return _report(subject, Verdict.NOT_APPLICABLE, f"{why_not}; {told}", evidence)
    if ratio > 1 + tolerance:
        return _report(subject, Verdict.FAILED, f"push is slower than pull: {told}", evidence)
    return _report(subject, Verdict.PASSED, told, evidence)


def _report(
    subject: str, verdict: Verdict, message: str, evidence: dict[str, object]
) -> RungReport:
    return RungReport(
        rung=RUNG, subject=subject, verdict=verdict, message=message, evidence=evidence
    )
