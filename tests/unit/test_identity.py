"""Rung `spec`: what all the other rungs are about."""

from __future__ import annotations

from typing import Any

from kvdeploy.model.reports import Verdict
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.identity import judge_account, judge_spec

ENGINES = ("prefill-0", "decode-0")


def spec(**changes: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "demo", **changes})


def test_a_fleet_that_is_as_its_file_says() -> None:
    rung = judge_spec(spec(), ENGINES, now=spec(), source="cluster.yaml")
    assert (rung.rung, rung.subject, rung.verdict) == ("spec", "cluster file", Verdict.PASSED)
    assert rung.message == "decode-0, prefill-0 as cluster.yaml says"


def test_without_a_file_it_is_told_that_none_was_compared() -> None:
    rung = judge_spec(spec(), ENGINES, now=None, source="")
    assert rung.verdict is Verdict.PASSED
    assert rung.message == "decode-0, prefill-0 as asked for; no cluster file to compare"


def test_a_file_that_was_changed_since_is_not_what_runs() -> None:
    now = spec(connector={"block_size": 64, "lease_s": 41}, model={"max_length": 99, "seed": 3})
    rung = judge_spec(spec(), ENGINES, now=now, source="cluster.yaml")
    assert rung.verdict is Verdict.NOT_APPLICABLE
    assert rung.message.startswith("what runs is not what cluster.yaml says: model.")
    assert rung.message.endswith(" and 1 more")
    differs = rung.evidence["differs"]
    assert isinstance(differs, list)
    assert {d["path"] for d in differs} == {
        "connector.block_size",
        "connector.lease_s",
        "model.max_length",
        "model.seed",
    }


def test_an_engine_that_was_asked_for_and_is_not_there_is_red() -> None:
    asked = spec(fleet={"decode": {"count": 2}})
    rung = judge_spec(asked, ENGINES, now=asked, source="cluster.yaml")
    assert rung.verdict is Verdict.FAILED
    assert rung.message == (
        "the fleet has prefill-0, decode-0; asked for were decode-0, decode-1, prefill-0"
    )


def account(**changes: Any) -> tuple[Verdict, str]:
    asked: dict[str, Any] = {
        "account": "123456789012",
        "arn": "arn:aws:iam::123456789012:user/me",
        "wanted": ("i-1", "i-2"),
        "running": ("i-1", "i-2", "i-3"),
        "error": "",
        "mocked": False,
    }
    rung = judge_account(**asked | changes)
    assert (rung.rung, rung.subject) == ("spec", "account")
    return rung.verdict, rung.message


def test_the_account_that_runs_the_nodes() -> None:
    assert account() == (Verdict.PASSED, "account 123456789012 runs all 2 nodes")
    assert account(mocked=True) == (
        Verdict.MOCKED,
        "account 123456789012 runs all 2 nodes; a double of AWS was asked",
    )


def test_another_account_or_none_is_red() -> None:
    assert account(running=("i-2",)) == (
        Verdict.FAILED,
        "account 123456789012 does not run i-1, which the fleet is on",
    )
    assert account(error="the token has expired", account="") == (
        Verdict.FAILED,
        "AWS does not say who we are: the token has expired",
    )
