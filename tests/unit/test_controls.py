"""Ways to break a pair on purpose, and what the judges' verdicts on it mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.local.supervisor import digest_of
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.reports import RungReport, Verdict
from kvdeploy.planning.controls import (
    EFA_FAULT,
    FAULTS,
    double_blocks,
    judge_broken,
    judge_efa_control,
    pull,
)
from kvdeploy.planning.hardware import judge_efa
from kvdeploy.planning.questions import KINDS
from tests.unit.test_launch import PLACE, cluster, engine, fleets

if TYPE_CHECKING:
    from kvdeploy.planning.controls import Fault

PAIR = "prefill-0/decode-0"


def words(spec: LaunchSpec) -> dict[str, str]:
    """Flags with the word behind each."""
    pairs = zip(spec.argv, spec.argv[1:], strict=False)
    return {flag: word for flag, word in pairs if flag.startswith("--")}


def rung(name: str, verdict: Verdict, message: str = "said") -> RungReport:
    return RungReport(rung=name, subject=PAIR, verdict=verdict, message=message)


# --- engines that are broken -----------------------------------------------------------------
def test_a_decode_in_pull_mode_differs_in_its_connector_alone() -> None:
    own = engine(cluster(), "decode-0")
    broken = pull(own)
    was, now = words(own), words(broken)
    changed = {flag for flag in was if was[flag] != now[flag]}
    assert changed == {"--kv-transfer-config"}
    before, after = (json.loads(w["--kv-transfer-config"]) for w in (was, now))
    assert before["kv_connector"] == "NixlPushConnector"
    assert after == before | {"kv_connector": "NixlConnector"}
    assert (broken.env, broken.ports, broken.ready) == (own.env, own.ports, own.ready)


def test_blocks_are_doubled_whoever_chose_their_size() -> None:
    own = engine(cluster(connector={"block_size": 32}), "decode-0")
    asked = {"decode": {"engine_args": {"block-size": 64}}}
    theirs = engine(cluster(connector={"block_size": 32}, fleet=asked), "decode-0")
    assert words(double_blocks(own))["--block-size"] == "64"
    assert words(double_blocks(theirs))["--block-size"] == "128"


def test_forced_tcp_takes_efa_from_both_ends_and_leaves_the_rest() -> None:
    place = PLACE.__class__(**{**PLACE.__dict__, "efa": True, "host": "10.0.0.1"})
    spec = cluster(connector={"lease_s": 77})
    pair = [engine(spec, n, device="cuda", place=place) for n in ("prefill-0", "decode-0")]
    broken = EFA_FAULT.spoil(pair, ["prefill-0", "decode-0"])
    assert [e.name for e in broken] == ["prefill-0", "decode-0"]
    for own, other in zip(pair, broken, strict=True):
        before, after = (json.loads(words(e)["--kv-transfer-config"]) for e in (own, other))
        assert before["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
        assert after["kv_connector_extra_config"]["backends"] == ["UCX"]
        assert after["kv_connector_extra_config"]["kv_lease_duration"] == 77
        assert other.env["UCX_TLS"] == "tcp,cuda_copy,self"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.subject)
def test_every_prefill_is_another_one_and_does_the_same(fault: Fault) -> None:
    spec = cluster(fleet=fleets(2, 2))
    own = {n: engine(spec, n) for n in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
    broken = {e.name: e for e in fault.spoil(list(own.values()), ["prefill-0", "decode-0"])}
    assert broken.keys() == {"prefill-0", "prefill-1", "decode-0"}
    for name in ("prefill-0", "prefill-1"):
        assert broken[name].argv == own[name].argv
        assert broken[name].env == own[name].env | {"KVDEPLOY_CONTROL": fault.subject}
        assert digest_of(broken[name]) != digest_of(own[name])
    assert broken["decode-0"] == fault.change(own["decode-0"])


def test_an_engine_without_the_flag_cannot_be_broken_so() -> None:
    bare = LaunchSpec(
        name="decode-0", role="decode", argv=("x",), ready=Readiness(url="x", timeout_s=1)
    )
    with pytest.raises(ValueError, match=r"^decode-0 is not started with --block-size$"):
        double_blocks(bare)


# --- what the verdicts on a broken pair mean -------------------------------------------------
GREEN = [rung("tokens/short", Verdict.PASSED), rung("bytes", Verdict.PASSED)]


def test_a_broken_pair_must_be_red() -> None:
    rungs = [*GREEN, rung("tokens/long", Verdict.FAILED, "token 3 is 7 where ..."), GREEN[0]]
    report = judge_broken("other block size", rungs, seconds=3.0, limit_s=80)
    assert (report.rung, report.subject, report.verdict) == (
        "control",
        "other block size",
        Verdict.PASSED,
    )
    assert report.message == "tokens/long went red, as they must; token 3 is 7 where ..."
    assert report.seconds == 3.0


def test_a_router_that_refuses_the_pair_says_why() -> None:
    red = [rung("tokens/short", Verdict.FAILED, "the router answered 503: no pair")]
    report = judge_broken(
        "decode in pull mode", red, seconds=3.0, limit_s=80, why="warm-up failed: mismatch"
    )
    assert report.verdict is Verdict.PASSED
    assert report.message == (
        "tokens/short went red, as they must; the router refuses the pair: warm-up failed: mismatch"
    )
    assert report.evidence["router"] == "warm-up failed: mismatch"


@pytest.mark.parametrize(
    "rungs",
    [
        GREEN,
        [*GREEN, rung("local-compute", Verdict.NOT_APPLICABLE)],
        [rung("efa", Verdict.MOCKED)],
        [],
    ],
    ids=["green", "not applicable", "mocked", "nothing was asked"],
)
def test_a_broken_pair_that_nobody_sees_is_a_failure_of_smoke(rungs: list[RungReport]) -> None:
    report = judge_broken("other block size", rungs, seconds=3.0, limit_s=80)
    assert report.verdict is Verdict.FAILED
    assert report.message == (
        "every rung was green with other block size: smoke cannot be trusted to see it, and no "
        "green above means anything"
    )


def test_red_that_takes_for_ever_is_a_failure_too() -> None:
    red = [rung("tokens/short", Verdict.FAILED)]
    report = judge_broken("other block size", red, seconds=81.0, limit_s=80)
    assert report.verdict is Verdict.FAILED
    assert report.message == "red, but only after 81.0 s, 80 s allowed: clients would hang"


# --- what real engines have shown (tests/data/controls) --------------------------------------
DATA = Path(__file__).parents[1] / "data/controls"
RECORDED = json.loads((DATA / "controls.json").read_text())


def recorded(name: str) -> tuple[list[RungReport], str]:
    """The verdicts of the climb's judges, and what the router said of the pair."""
    told = RECORDED[name]
    return [RungReport.model_validate(r) for r in told["rungs"]], told["router"]


@pytest.mark.parametrize("subject", [f.subject for f in FAULTS])
def test_real_engines_that_are_broken_so_are_seen(subject: str) -> None:
    rungs, why = recorded(subject)
    report = judge_broken(subject, rungs, seconds=18.0, limit_s=80, why=why)
    assert report.verdict is Verdict.PASSED
    assert "the router refuses the pair: warm-up failed: " in report.message
    red = {r.rung for r in rungs if r.verdict is Verdict.FAILED}
    assert red == {*(f"tokens/{kind}" for kind in KINDS), "pushed", "bytes", "failures"}
    assert all(r.seconds < 1 for r in rungs[: len(KINDS)]), "a client would have waited"


def test_a_real_pair_that_is_well_would_not_do_for_a_broken_one() -> None:
    rungs, why = recorded("good")
    report = judge_broken("other block size", rungs, seconds=5.0, limit_s=80, why=why)
    assert report.verdict is Verdict.FAILED


@pytest.mark.parametrize(("mocked", "verdict"), [(True, Verdict.MOCKED), (False, Verdict.PASSED)])
def test_real_kv_over_tcp_beside_devices_that_stand_still(
    *, mocked: bool, verdict: Verdict
) -> None:
    """Of a rehearsal: real engines, mocked devices. The same bytes on real ones would be proof."""
    told = json.loads((DATA / "efa.json").read_text())
    moved = {name: told[name] for name in ("efa_bytes", "pushed_bytes")}
    seen = judge_efa("prefill-0", **moved, why_not="", mocked=mocked)
    assert seen.verdict is Verdict.FAILED
    assert judge_efa_control(seen, mocked=mocked).verdict is verdict


# --- EFA -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("efa_bytes", "pushed", "mocked", "verdict", "message"),
    [
        (
            0,
            100,
            False,
            Verdict.PASSED,
            "efa went red, as it must: 0 bytes went over EFA, and 100 bytes of KV were moved",
        ),
        (
            0,
            100,
            True,
            Verdict.MOCKED,
            "the efa rung would go red: 0 bytes went over EFA, and 100 bytes of KV were moved; "
            "devices are mocked here",
        ),
        (
            100,
            100,
            False,
            Verdict.FAILED,
            "the efa rung was green with TCP in place of EFA: 100 bytes went over EFA",
        ),
        (
            100,
            100,
            True,
            Verdict.FAILED,
            "the efa rung was green with TCP in place of EFA: 100 bytes went over EFA; mocked: "
            "this shows nothing of hardware",
        ),
        (0, 0, False, Verdict.FAILED, "no KV was moved over TCP, so nothing was shown"),
    ],
)
def test_kv_over_tcp_must_make_efa_red(
    *, efa_bytes: int, pushed: int, mocked: bool, verdict: Verdict, message: str
) -> None:
    seen = judge_efa(
        "prefill-0", efa_bytes=efa_bytes, pushed_bytes=pushed, why_not="", mocked=mocked
    )
    report = judge_efa_control(seen, mocked=mocked)
    assert (report.verdict, report.message) == (verdict, message)
    assert report.evidence["pushed_bytes"] == pushed
