"""Push against pull: what medians mean, and when they mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.model.bench import Cell, Moved, Run, Sample
from kvdeploy.model.reports import Verdict
from kvdeploy.planning.ttft import LEAST, TOLERANCE, build_cell, judge_ttft

if TYPE_CHECKING:
    from kvdeploy.model.routing import Mode

CELL = Cell(scenario="unique", input_tokens=272, output_tokens=2, concurrency=1)
PAIR = "prefill-0/decode-0"


def run(
    mode: Mode, number: int, times_ms: list[float], *, kv_bytes: int = 1, errors: int = 0
) -> Run:
    good = [Sample(ttft_s=t / 1e3, total_s=t / 1e3, output_tokens=2) for t in times_ms]
    return Run(
        mode=mode,
        cell=CELL,
        round=number,
        seconds=1.0,
        samples=(*good, *(Sample(error="cut") for _ in range(errors))),
        moved=Moved(kv_bytes=kv_bytes),
    )


def runs(push: float, pull: float, *, count: int = LEAST) -> list[Run]:
    """Rounds around these medians, in milliseconds."""
    around = [0.9, 1.0, 1.1] * count
    half = count // 2
    return [
        run("push", 1, [push * f for f in around[:half]]),
        run("pull", 1, [pull * f for f in around[:half]]),
        run("pull", 2, [pull * f for f in around[: count - half]]),
        run("push", 2, [push * f for f in around[: count - half]]),
    ]


@pytest.mark.parametrize(
    ("push", "verdict"),
    [
        (50.0, Verdict.PASSED),
        (100.0, Verdict.PASSED),
        (100.0 * (1 + TOLERANCE) - 1, Verdict.PASSED),
        (100.0 * (1 + TOLERANCE) + 1, Verdict.FAILED),
        (300.0, Verdict.FAILED),
    ],
)
def test_push_may_be_slower_by_the_tolerance_and_no_more(push: float, verdict: Verdict) -> None:
    report = judge_ttft(PAIR, runs(push, 100.0))
    assert (report.rung, report.subject, report.verdict) == ("ttft", PAIR, verdict)
    assert report.evidence["samples"] == {"push": LEAST, "pull": LEAST}


def test_every_sample_is_evidence() -> None:
    report = judge_ttft(PAIR, [run("push", 1, [1.0] * 25), run("pull", 1, [2.0] * 25, errors=2)])
    assert report.message == (
        "median 1.0 ms by push, 2.0 ms by pull (0.50, up to 1.25 allowed; 25 and 25 answers)"
    )
    assert report.evidence["rounds"] == [
        {"mode": "push", "round": 1, "ttft_ms": [1.0] * 25, "errors": [], "kv_bytes": 1},
        {"mode": "pull", "round": 1, "ttft_ms": [2.0] * 25, "errors": ["cut"] * 2, "kv_bytes": 1},
    ]


def test_one_round_that_was_disturbed_does_not_decide() -> None:
    calm = [100.0] * 30
    report = judge_ttft(
        PAIR,
        [
            run("push", 1, calm),
            run("pull", 1, calm),
            run("pull", 2, calm),
            run("push", 2, [100.0] * 5 + [900.0] * 25),
        ],
    )
    assert report.verdict is Verdict.PASSED


RECORDED = json.loads((Path(__file__).parents[1] / "data/controls/ttft.json").read_text())


@pytest.mark.parametrize(
    ("name", "verdict", "ratio"),
    [
        ("calm", Verdict.PASSED, 1.052),
        ("disturbed", Verdict.PASSED, 0.576),
        ("loaded", Verdict.FAILED, 1.57),
    ],
)
def test_real_engines_are_judged_by_their_medians(
    name: str, verdict: Verdict, ratio: float
) -> None:
    """On two cores, which others used while `loaded` was measured: there it is not judged."""
    rounds = [
        run(r["mode"], r["round"], r["ttft_ms"], kv_bytes=r["kv_bytes"]) for r in RECORDED[name]
    ]
    report = judge_ttft(PAIR, rounds)
    assert (report.verdict, report.evidence["ratio"]) == (verdict, pytest.approx(ratio, abs=0.01))
    assert report.evidence["samples"] == {"push": 80, "pull": 80}


def test_too_few_answers_are_no_median() -> None:
    report = judge_ttft(PAIR, runs(300.0, 100.0, count=LEAST - 1))
    assert (report.verdict, report.message) == (
        Verdict.NOT_APPLICABLE,
        f"too few answers for a median: {LEAST - 1} of push and {LEAST - 1} of pull, "
        f"{LEAST} needed",
    )
    assert judge_ttft(PAIR, []).verdict is Verdict.NOT_APPLICABLE


def test_a_mode_that_moved_nothing_was_not_compared() -> None:
    times = [1.0] * LEAST
    report = judge_ttft(PAIR, [run("push", 1, times), run("pull", 1, times, kv_bytes=0)])
    assert (report.verdict, report.message) == (
        Verdict.FAILED,
        "pull moved no KV, so there is nothing to compare",
    )


@pytest.mark.parametrize("push", [50.0, 300.0])
def test_figures_that_say_nothing_are_told_and_not_judged(push: float) -> None:
    report = judge_ttft(PAIR, runs(push, 100.0), why_not="engines compute on CPUs")
    assert report.verdict is Verdict.NOT_APPLICABLE
    assert report.message.startswith(f"engines compute on CPUs; median {push:.1f} ms by push, ")


@pytest.mark.parametrize(
    ("block", "longest", "tokens"), [(32, 2048, 272), (128, 8192, 1088), (128, 1024, 766)]
)
def test_prompts_are_of_several_blocks_where_they_fit(
    block: int, longest: int, tokens: int
) -> None:
    assert build_cell(block_size=block, max_length=longest).input_tokens == tokens


def test_a_model_without_room_for_a_block_and_more_cannot_be_asked() -> None:
    message = r"^model.max_length, 128, has no room for a prompt of over one KV block$"
    with pytest.raises(ValueError, match=message):
        build_cell(block_size=128, max_length=128)
