"""What the evidence of a smoke climb means. Pure: it is handed numbers and returns RungReports.

Nothing here is lenient by default: what was not seen has not happened, and a proof that could
pass on a broken fleet is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.counters import EngineCounters

NEAR_TIE: Final = 0.15
"""Natural log units. Two tokens closer than this may change places for no fault of the cache:
decode computes the end of the prompt in a batch of another shape than the reference did, kernels
then add up in another order, and in 16 bits that shows: bfloat16 logits from 8 to 16 lie 1/16
apart. A tie of 0.062 was seen to change places, with one request alone."""
NEAR_TIE_FLOAT32: Final = 0.001
"""The same where numbers have 32 bits: rounding is a hundred times smaller than this."""
CANDIDATES: Final = 5
"""How many of its best tokens the reference is asked for, a step: of 16-bit logits more than two
may be as good as equal."""

USAGE_NOISE: Final = 1e-6
"""Cache usages are rounded floats; one leaked block of any real cache is more than this."""


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """One greedy answer. The tuples are as long as `token_ids`, or empty where not asked for."""

    token_ids: tuple[int, ...]
    odds: tuple[Mapping[int, float], ...] = ()
    """Log probabilities of the best tokens, a step."""
    finish_reason: str
    text: str = ""

    def preference(self, step: int, *, of: int, to: int) -> float | None:
        """By how much `of` was likelier than `to`, in natural log units; None when not known."""
        seen = self.odds[step] if step < len(self.odds) else {}
        return seen[of] - seen[to] if of in seen and to in seen else None


def near_tie(dtype: str) -> float:
    """What counts as a tie of an engine that runs with --dtype `dtype`."""
    return NEAR_TIE_FLOAT32 if dtype == "float32" else NEAR_TIE


def judge_tokens(
    rung: str, subject: str, *, reference: TokenRun, got: TokenRun, near_tie: float = NEAR_TIE
) -> RungReport:
    """Compare an answer given through the pair with the reference engine's.

    Equal passes. A difference passes only if at its first token the reference itself was
    undecided (it preferred its own by less than `near_tie`); what follows such a token proves
    nothing and is not compared.
    """
    for who, run in (("the reference", reference), ("the pair", got)):
        if run.finish_reason in {"error", "abort"}:
            return _failed(
                rung,
                subject,
                f"{who} ended with finish_reason {run.finish_reason!r} after "
                f"{_n(len(run.token_ids), 'token')}; its log says why",
            )
        if not run.token_ids:
            return _failed(rung, subject, f"{who} answered no token at all")
    return _compare(rung, subject, reference=reference, got=got, near_tie=near_tie)


def _compare(
    rung: str, subject: str, *, reference: TokenRun, got: TokenRun, near_tie: float
) -> RungReport:
    pairs = zip(reference.token_ids, got.token_ids, strict=False)
    step = next((i for i, (want, have) in enumerate(pairs) if want != have), None)
    evidence: dict[str, object] = {
        "reference_tokens": len(reference.token_ids),
        "got_tokens": len(got.token_ids),
    }
    if step is None and len(reference.token_ids) == len(got.token_ids):
        return _passed(
            rung,
            subject,
            f"{_n(len(got.token_ids), 'token')} equal to the reference",
            **evidence,
        )
    if step is None:
        return _failed(
            rung,
            subject,
            f"equal for {_n(min(len(reference.token_ids), len(got.token_ids)), 'token')}, but "
            f"the reference has {len(reference.token_ids)} and the pair {len(got.token_ids)}: "
            "were both asked with the same max_tokens?",
            **evidence,
        )
    want, have = reference.token_ids[step], got.token_ids[step]
    gap = reference.preference(step, of=want, to=have)
    evidence |= {"first_difference": step, "expected": want, "got": have, "reference_gap": gap}
    if gap is not None and gap < near_tie:
        return _passed(
            rung,
            subject,
            f"equal up to a near tie at token {step}: the reference preferred {want} to {have} "
            f"by {gap:.3f} only",
            **evidence,
        )
    undecided = (
        f", which it preferred by {gap:.3f}"
        if gap is not None
        else f", and not among its {CANDIDATES} best"
        if reference.odds
        else ""
    )
    return _failed(
        rung,
        subject,
        f"token {step} is {have} where the reference has {want}{undecided}: the KV cache that "
        "decode used is not the prompt's. Usual causes: a part of the prefix was corrupted on the "
        "way, prefill and decode loaded different weights, or their block sizes differ",
        **evidence,
    )


def judge_bytes(
    subject: str, *, expected: int, pushed: EngineCounters, block_bytes: int
) -> RungReport:
    """Compare what prefill says it wrote, in bytes, with the prompt's whole blocks.

    `pushed` is prefill's counters, later minus earlier; `block_bytes` turns a difference
    into blocks for the reader.
    """
    seen = pushed.pushed_bytes
    evidence = {"expected_bytes": expected, "pushed_bytes": seen, "transfers": pushed.transfers}
    if not pushed.has_nixl:
        return _failed(
            "bytes",
            subject,
            "the engine exports no NIXL metrics, so nothing shows that blocks were pushed; "
            "does it run with a NIXL connector, and a vLLM that this kvdeploy knows?",
            **evidence,
        )
    if seen == expected:
        return _passed(
            "bytes",
            subject,
            f"{seen:,} bytes pushed in {_n(pushed.transfers, 'transfer')}, as computed",
            **evidence,
        )
    if seen == 0:
        return _failed(
            "bytes",
            subject,
            f"nothing was pushed: decode computed the prompt itself (expected {expected:,} bytes)",
            **evidence,
        )
    if seen < 0:
        return _failed(
            "bytes", subject, "prefill's counters went back: it was restarted meanwhile", **evidence
        )
    return _failed(
        "bytes",
        subject,
        f"{seen:,} bytes pushed, {expected:,} expected: {_blocks(seen - expected, block_bytes)}",
        **evidence,
    )


def judge_failures(subject: str, delta: EngineCounters) -> RungReport:
    """Transfers, notifications and leases: none may have failed, later minus earlier."""
    counted = {
        "failed transfers": delta.failed_transfers,
        "failed notifications": delta.failed_notifications,
        "requests whose KV expired": delta.kv_expired,
        "notifications after expiry": delta.late_notifications,
    }
    needed = {"failed_transfers", "failed_notifications", "kv_expired"}
    if missing := sorted(needed - delta.present):
        return _failed(
            "failures",
            subject,
            f"the engine does not export {', '.join(missing)}: failures would go unseen",
            missing=missing,
        )
    if bad := {what: count for what, count in counted.items() if count}:
        listed = ", ".join(f"{count} {what}" for what, count in bad.items())
        return _failed("failures", subject, f"{listed}; the engine's log names them", **counted)
    return _passed("failures", subject, "no transfer, notification or lease failed", **counted)


def judge_local_compute(subject: str, *, local_tokens: int, allowed: int) -> RungReport:
    """Decode may compute at most `allowed` prompt tokens itself: those that are not in the push."""
    evidence = {"local_tokens": local_tokens, "allowed": allowed}
    if local_tokens <= allowed:
        return _passed(
            "local-compute",
            subject,
            f"decode computed {_n(local_tokens, 'prompt token')} itself, {allowed} allowed",
            **evidence,
        )
    return _failed(
        "local-compute",
        subject,
        f"decode computed {_n(local_tokens, 'prompt token')} itself, {allowed} allowed: it did "
        "prefill's work; is kv_load_failure_policy 'fail', and did its leg carry "
        "do_remote_prefill?",
        **evidence,
    )


def judge_control(
    subject: str,
    *,
    status: int | None,
    error_message: str | None,
    seconds: float,
    deadline_s: float,
    tolerance: float,
) -> RungReport:
    """Judge a request sent while prefill was stopped: it must fail, in words and in time.

    `status` is None or 0 when no answer came within the caller's patience, `error_message` the
    `error.message` of an OpenAI-shaped body or None; `tolerance` is in seconds.
    """
    limit = deadline_s + tolerance
    failed = None
    if status and status < 400:
        failed = (
            f"the request was answered ({status}) although prefill was stopped: smoke cannot be "
            "trusted; something else computes prompts"
        )
    elif not status or seconds > limit:
        failed = (
            f"no answer within {limit:.1f} s (deadline {deadline_s:.1f} s) while prefill was "
            f"stopped, after {seconds:.1f} s: clients would hang"
        )
    elif status < 500:
        failed = (
            f"answered {status} while prefill was stopped: that blames the client; 503 or 504 "
            "is right"
        )
    elif not error_message:
        failed = f"failed with {status} but without an OpenAI-shaped error for the client"
    return RungReport(
        rung="control",
        subject=subject,
        verdict=Verdict.FAILED if failed else Verdict.PASSED,
        message=failed
        or f"failed with {status} after {seconds:.1f} s while prefill was stopped, as it must",
        evidence={"status": status, "error": error_message, "deadline_s": deadline_s},
        seconds=seconds,
    )


def judge_leak(subject: str, *, usage_before: float, usage_after: float) -> RungReport:
    """Usages (0 to 1) of an idle engine: what is still held after the last answer is leaked."""
    evidence = {"usage_before": usage_before, "usage_after": usage_after}
    if usage_after > usage_before + USAGE_NOISE:
        return _failed(
            "leak",
            subject,
            f"{usage_after - usage_before:.3%} of the KV cache is still held although nothing "
            "runs: blocks leaked; restart this engine, and look for a request that never ended",
            **evidence,
        )
    return _passed("leak", subject, "every KV block was given back", **evidence)


def _blocks(difference: int, block_bytes: int) -> str:
    """Put a difference in bytes as blocks, with what it suggests."""
    blocks, rest = divmod(abs(difference), block_bytes)
    more = "more" if difference > 0 else "less"
    if rest:
        return (
            f"{abs(difference):,} bytes {more}, which is no whole number of blocks of "
            f"{block_bytes:,}; do both sides use the cluster file's block size and cache type?"
        )
    cause = (
        "another request ran meanwhile, or the blocks went out twice"
        if difference > 0
        else "decode held a part of the prefix already, or some blocks never left"
    )
    return f"{_n(blocks, 'block')} {more}; {cause}"


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _passed(rung: str, subject: str, message: str, **evidence: object) -> RungReport:
    return RungReport(
        rung=rung, subject=subject, verdict=Verdict.PASSED, message=message, evidence=evidence
    )


def _failed(rung: str, subject: str, message: str, **evidence: object) -> RungReport:
    return RungReport(
        rung=rung, subject=subject, verdict=Verdict.FAILED, message=message, evidence=evidence
    )
