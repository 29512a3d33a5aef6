"""Rung `spec` of the smoke ladder: what all the other rungs are about. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.model.reports import RungReport, Verdict
from kvdeploy.planning.changes import compare
from kvdeploy.planning.launch import engine_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.model.spec import ClusterSpec

SHOWN = 3
"""Differences that are told in words; the evidence has all."""


def judge_spec(
    spec: ClusterSpec, engines: Sequence[str], *, now: ClusterSpec | None, source: str
) -> RungReport:
    """That the engines are those asked for, and that the cluster file still asks for them.

    Args:
        spec: what the fleet was brought up with.
        engines: names of those that there are.
        now: the cluster file as it is; None when there is none to compare.
        source: where it is, in words.
    """
    asked = sorted(slot.name for slot in engine_slots(spec))
    evidence: dict[str, object] = {"engines": sorted(engines), "source": source}
    if sorted(engines) != asked:
        verdict = Verdict.FAILED
        message = f"the fleet has {_listed(engines)}; asked for were {_listed(asked)}"
    elif now is None:
        verdict = Verdict.PASSED
        message = f"{_listed(asked)} as asked for; no cluster file to compare"
    elif changes := compare(spec, now):
        verdict = Verdict.NOT_APPLICABLE
        evidence["differs"] = [{"path": c.path, "runs": c.was, "file": c.wanted} for c in changes]
        told = "; ".join(f"{c.path} is {c.was}, there {c.wanted}" for c in changes[:SHOWN])
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        message = f"what runs is not what {source} says: {told}{more}"
    else:
        verdict, message = Verdict.PASSED, f"{_listed(asked)} as {source} says"
    return RungReport(
        rung="spec", subject="cluster file", verdict=verdict, message=message, evidence=evidence
    )


def judge_account(
    *,
    account: str,
    arn: str,
    wanted: Sequence[str],
    running: Sequence[str],
    error: str,
    mocked: bool,
) -> RungReport:
    """That we are somebody in the account that holds the nodes.

    Args:
        account: as STS tells.
        arn: of who we are there.
        wanted: instances that the fleet was brought up on.
        running: instances of the cluster that run in this account.
        error: why AWS did not tell; '' when it did.
        mocked: whether a double of AWS was asked.
    """
    evidence: dict[str, object] = {"account": account, "arn": arn, "running": sorted(running)}
    absent = sorted(set(wanted) - set(running))
    if error:
        verdict, message = Verdict.FAILED, f"AWS does not say who we are: {error}"
    elif absent:
        verdict = Verdict.FAILED
        message = f"account {account} does not run {_listed(absent)}, which the fleet is on"
    else:
        verdict = Verdict.MOCKED if mocked else Verdict.PASSED
        message = f"account {account} runs all {len(wanted)} nodes"
        message += "; a double of AWS was asked" if mocked else ""
    return RungReport(
        rung="spec", subject="account", verdict=verdict, message=message, evidence=evidence
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
