from __future__ import annotations

from typing import Any

import pytest

from kvdeploy.model.counters import EngineCounters
from kvdeploy.model.reports import Verdict
from kvdeploy.planning.verdicts import (
    TokenRun,
    judge_bytes,
    judge_control,
    judge_failures,
    judge_leak,
    judge_local_compute,
    judge_tokens,
    near_tie,
)

PAIR = "prefill-0/decode-0"
NIXL = frozenset(
    {"pushed_bytes", "transfers", "failed_transfers", "failed_notifications", "kv_expired"}
)
BLOCK = 65_536


def answer(*ids: int, gap: float | None = 2.0, finish: str = "length") -> TokenRun:
    """An answer whose second best token is always the best one plus 100."""
    return TokenRun(
        token_ids=ids,
        odds=() if gap is None else tuple({i: -0.1, i + 100: -0.1 - gap} for i in ids),
        finish_reason=finish,
    )


def tokens(reference: TokenRun, got: TokenRun, **more: Any) -> tuple[Verdict, str]:
    report = judge_tokens("tokens", PAIR, reference=reference, got=got, **more)
    assert (report.rung, report.subject) == ("tokens", PAIR)
    return report.verdict, report.message


def test_equal_tokens_pass() -> None:
    assert tokens(answer(1, 2, 3), answer(1, 2, 3)) == (
        Verdict.PASSED,
        "3 tokens equal to the reference",
    )


MEANS = (
    "the KV cache that decode used is not the prompt's. Usual causes: a part of the prefix was "
    "corrupted on the way, prefill and decode loaded different weights, or their block sizes differ"
)


@pytest.mark.parametrize(
    ("gap", "got", "preference"),
    [
        pytest.param(0.15, 102, ", which it preferred by 0.150", id="the reference was sure"),
        pytest.param(0.01, 9, ", and not among its 5 best", id="no candidate of a near tie"),
        pytest.param(None, 102, "", id="nobody knows how sure the reference was"),
    ],
)
def test_a_different_token_fails_and_says_what_it_usually_means(
    gap: float | None, got: int, preference: str
) -> None:
    assert tokens(answer(1, 2, 3, gap=gap), answer(1, got, 3)) == (
        Verdict.FAILED,
        f"token 1 is {got} where the reference has 2{preference}: {MEANS}",
    )


def test_the_evidence_of_a_difference_can_be_read_by_a_program() -> None:
    report = judge_tokens("tokens", PAIR, reference=answer(1, 2), got=answer(1, 102))
    assert report.evidence == {
        "reference_tokens": 2,
        "got_tokens": 2,
        "first_difference": 1,
        "expected": 2,
        "got": 102,
        "reference_gap": 2.0,
    }


def test_a_near_tie_passes_when_another_candidate_was_taken() -> None:
    assert tokens(answer(1, 2, 3, gap=0.062), answer(1, 102, 8)) == (
        Verdict.PASSED,
        "equal up to a near tie at token 1: the reference preferred 2 to 102 by 0.062 only",
    )


def test_of_three_equal_candidates_any_may_be_taken() -> None:
    undecided = TokenRun(token_ids=(2,), odds=({2: -1.0, 3: -1.0, 4: -1.1},), finish_reason="stop")
    assert tokens(undecided, answer(4))[0] is Verdict.PASSED


def test_float32_knows_hardly_any_ties() -> None:
    """The tie of 0.062 that 16 bits excuse is none there."""
    for dtype, verdict in (("float32", Verdict.FAILED), ("bfloat16", Verdict.PASSED)):
        run = answer(2, gap=0.062)
        assert tokens(run, answer(102), near_tie=near_tie(dtype))[0] is verdict
    assert near_tie("auto") == near_tie("float16") == near_tie("bfloat16")


@pytest.mark.parametrize(
    ("reference", "got", "message"),
    [
        (
            answer(1, 2, 3),
            answer(1, 2),
            "equal for 2 tokens, but the reference has 3 and the pair 2: were both asked with "
            "the same max_tokens?",
        ),
        (answer(1), answer(), "the pair answered no token at all"),
        (answer(), answer(1), "the reference answered no token at all"),
        (
            answer(1, 2),
            answer(1, 2, finish="error"),
            "the pair ended with finish_reason 'error' after 2 tokens; its log says why",
        ),
        (
            answer(1, finish="abort"),
            answer(1),
            "the reference ended with finish_reason 'abort' after 1 token; its log says why",
        ),
    ],
)
def test_an_answer_that_is_no_answer_fails(
    reference: TokenRun, got: TokenRun, message: str
) -> None:
    assert tokens(reference, got) == (Verdict.FAILED, message)


@pytest.mark.parametrize(
    ("pushed", "verdict", "message"),
    [
        (9 * BLOCK, Verdict.PASSED, "589,824 bytes pushed in 1 transfer, as computed"),
        (
            0,
            Verdict.FAILED,
            "nothing was pushed: decode computed the prompt itself (expected 589,824 bytes)",
        ),
        (
            8 * BLOCK,
            Verdict.FAILED,
            "524,288 bytes pushed, 589,824 expected: 1 block less; decode held a part of the "
            "prefix already, or some blocks never left",
        ),
        (
            18 * BLOCK,
            Verdict.FAILED,
            "1,179,648 bytes pushed, 589,824 expected: 9 blocks more; another request ran "
            "meanwhile, or the blocks went out twice",
        ),
        (
            9 * BLOCK + 5,
            Verdict.FAILED,
            "589,829 bytes pushed, 589,824 expected: 5 bytes more, which is no whole number of "
            "blocks of 65,536; do both sides use the cluster file's block size and cache type?",
        ),
        (-1, Verdict.FAILED, "prefill's counters went back: it was restarted meanwhile"),
    ],
)
def test_only_the_computed_number_of_bytes_passes(
    pushed: int, verdict: Verdict, message: str
) -> None:
    delta = EngineCounters(pushed_bytes=pushed, transfers=1, present=NIXL)
    report = judge_bytes(PAIR, expected=9 * BLOCK, pushed=delta, block_bytes=BLOCK)
    assert (report.rung, report.verdict, report.message) == ("bytes", verdict, message)


def test_an_engine_without_nixl_metrics_is_not_read_as_zero_bytes() -> None:
    report = judge_bytes(PAIR, expected=0, pushed=EngineCounters(), block_bytes=BLOCK)
    assert report.verdict is Verdict.FAILED
    assert report.message == (
        "the engine exports no NIXL metrics, so nothing shows that blocks were pushed; does it "
        "run with a NIXL connector, and a vLLM that this kvdeploy knows?"
    )


@pytest.mark.parametrize(
    ("counted", "verdict", "message"),
    [
        ({}, Verdict.PASSED, "no transfer, notification or lease failed"),
        (
            {"failed_transfers": 2, "kv_expired": 1},
            Verdict.FAILED,
            "2 failed transfers, 1 requests whose KV expired; the engine's log names them",
        ),
        (
            {"failed_notifications": 1},
            Verdict.FAILED,
            "1 failed notifications; the engine's log names them",
        ),
        (
            {"late_notifications": 1},
            Verdict.FAILED,
            "1 notifications after expiry; the engine's log names them",
        ),
        (
            {"present": NIXL - {"kv_expired"}},
            Verdict.FAILED,
            "the engine does not export kv_expired: failures would go unseen",
        ),
    ],
)
def test_any_failed_transfer_notification_or_lease_fails(
    counted: dict[str, Any], verdict: Verdict, message: str
) -> None:
    report = judge_failures("prefill-0", EngineCounters(**{"present": NIXL, **counted}))
    assert (report.rung, report.verdict, report.message) == ("failures", verdict, message)


@pytest.mark.parametrize(
    ("local", "verdict", "message"),
    [
        (1, Verdict.PASSED, "decode computed 1 prompt token itself, 1 allowed"),
        (
            2,
            Verdict.FAILED,
            "decode computed 2 prompt tokens itself, 1 allowed: it did prefill's work; is "
            "kv_load_failure_policy 'fail', and did its leg carry do_remote_prefill?",
        ),
    ],
)
def test_decode_may_not_do_prefill_s_work(local: int, verdict: Verdict, message: str) -> None:
    report = judge_local_compute("decode-0", local_tokens=local, allowed=1)
    assert (report.rung, report.verdict, report.message) == ("local-compute", verdict, message)


@pytest.mark.parametrize(
    ("status", "error", "seconds", "verdict", "message"),
    [
        (
            503,
            "no prefill",
            1.0,
            Verdict.PASSED,
            "failed with 503 after 1.0 s while prefill was stopped, as it must",
        ),
        (
            504,
            "too slow",
            12.0,
            Verdict.PASSED,
            "failed with 504 after 12.0 s while prefill was stopped, as it must",
        ),
        (
            200,
            None,
            1.0,
            Verdict.FAILED,
            "the request was answered (200) although prefill was stopped: smoke cannot be "
            "trusted; something else computes prompts",
        ),
        (
            504,
            "too slow",
            12.5,
            Verdict.FAILED,
            "no answer within 12.0 s (deadline 10.0 s) while prefill was stopped, after 12.5 s: "
            "clients would hang",
        ),
        (
            None,
            None,
            30.0,
            Verdict.FAILED,
            "no answer within 12.0 s (deadline 10.0 s) while prefill was stopped, after 30.0 s: "
            "clients would hang",
        ),
        (
            404,
            "no model",
            1.0,
            Verdict.FAILED,
            "answered 404 while prefill was stopped: that blames the client; 503 or 504 is right",
        ),
        (
            502,
            None,
            1.0,
            Verdict.FAILED,
            "failed with 502 but without an OpenAI-shaped error for the client",
        ),
    ],
)
def test_without_prefill_a_request_must_fail_in_words_and_in_time(
    status: int | None, error: str | None, seconds: float, verdict: Verdict, message: str
) -> None:
    report = judge_control(
        "router",
        status=status,
        error_message=error,
        seconds=seconds,
        deadline_s=10.0,
        tolerance=2.0,
    )
    assert (report.rung, report.verdict, report.message) == ("control", verdict, message)
    assert report.seconds == seconds


@pytest.mark.parametrize(
    ("before", "after", "verdict", "message"),
    [
        (0.0, 0.0, Verdict.PASSED, "every KV block was given back"),
        (0.2, 0.1, Verdict.PASSED, "every KV block was given back"),
        (
            0.0,
            0.0088,
            Verdict.FAILED,
            "0.880% of the KV cache is still held although nothing runs: blocks leaked; restart "
            "this engine, and look for a request that never ended",
        ),
    ],
)
def test_what_an_idle_engine_still_holds_has_leaked(
    before: float, after: float, verdict: Verdict, message: str
) -> None:
    report = judge_leak("decode-0", usage_before=before, usage_after=after)
    assert (report.rung, report.verdict, report.message) == ("leak", verdict, message)
