"""The controls that start engines otherwise: against a scripted fleet that is broken by them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvdeploy.adapters.store import RunLog
from kvdeploy.cli.restarting import finish
from kvdeploy.errors import FleetError
from kvdeploy.model.bench import Moved, Run, Sample
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.reports import SmokeReport, Verdict
from kvdeploy.planning.hardware import judge_efa
from kvdeploy.planning.questions import KINDS
from kvdeploy.stages.bench import Bench
from kvdeploy.stages.restarts import RestartControls, Site
from kvdeploy.stages.ttft import HOW, PULLS, UNPROVEN, Ttft, climb_on, note_all
from tests.line import Line
from tests.unit.test_smoke import CONFIG, PAIR, ScriptedFleet, Stand, outputs_of, stand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.reports import RungReport
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.smoke import Smoke

pytestmark = pytest.mark.real_process

__all__ = ["stand"]  # a fixture


class Screen:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.said: list[str] = []

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        self.steps.append(title)
        yield Line()

    def say(self, text: str) -> None:
        self.said.append(text)


class Scripted:
    """Starts a scripted fleet otherwise: a fault is one of its switches."""

    def __init__(self, fleet: ScriptedFleet, **faults: str) -> None:
        self.fleet, self.faults = fleet, faults
        self.done: list[str] = []
        self.started: list[dict[str, LaunchSpec]] = []
        self.refuses = self.loses = ""
        self.interrupted_restores = 0
        self.interrupts = self.pulls = False
        self.env: dict[str, str] = {}

    def spoil(self, engines: Sequence[LaunchSpec], step: Step) -> None:
        step.update("starting")
        self.done.append("spoil")
        self.started.append({e.name: e for e in engines})
        if self.interrupts:
            raise KeyboardInterrupt
        if self.refuses:
            raise FleetError(self.refuses)
        mode = "pull" if "NixlConnector" in " ".join(self._decode.argv) else "blocks"
        if switch := self.faults.get(mode):
            setattr(self.fleet, switch, True)

    @property
    def _decode(self) -> LaunchSpec:
        return self.started[-1]["decode-0"]

    def serve_pull(self) -> FleetOutputs:
        self.done.append("pull")
        if self.pulls:
            return fleet_of(self.fleet)
        msg = "no pull here"
        raise FleetError(msg)

    def restore(self) -> FleetOutputs:
        self.done.append("restore")
        if self.interrupted_restores:
            self.interrupted_restores -= 1
            raise KeyboardInterrupt
        if self.loses:
            raise FleetError(self.loses)
        for switch in self.faults.values():
            setattr(self.fleet, switch, False)
        return fleet_of(self.fleet, self.env)


def fleet_of(fleet: ScriptedFleet, env: dict[str, str] | None = None) -> FleetOutputs:
    """With engines that are started as real ones are."""
    words = ("--block-size", "32", "--kv-transfer-config", '{"kv_connector":"NixlPushConnector"}')
    engines = tuple(
        LaunchSpec(
            name=name,
            role="prefill" if name in fleet.prefill_names else "decode",
            argv=("x", *words),
            env=env or {},
            ready=Readiness(url="x", timeout_s=1),
        )
        for name in fleet.counters
    )
    return outputs_of(fleet).model_copy(update={"engines": engines})


class Devices:
    """EFA devices that count such a share of what is moved."""

    def __init__(self, *, mocked: bool, why_not: str, share: float = 0.0) -> None:
        self.mocked, self.why_not, self.share = mocked, why_not, share

    def look(self) -> dict[str, int]:
        return {"prefill-0": 7}

    def judge(self, before: Mapping[str, int], pushed: Mapping[str, int]) -> RungReport:
        assert before == {"prefill-0": 7}
        total = sum(pushed.values())
        return judge_efa(
            "prefill-0",
            efa_bytes=int(total * self.share),
            pushed_bytes=total,
            why_not="",
            mocked=self.mocked,
        )


@pytest.fixture
def smoke_of(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Smoke]:
    monkeypatch.setattr("kvdeploy.stages.restarts.DEADLINE_S", 0.2)
    monkeypatch.setattr("kvdeploy.stages.restarts.OPINION_S", 0.0)

    def make(fleet: ScriptedFleet) -> Smoke:
        smoke = stand.smoke(fleet)
        smoke.asker.fleet = fleet_of(fleet)
        return smoke

    return make


def verdicts(smoke: Smoke) -> dict[str, tuple[Verdict, str]]:
    return {r.subject: (r.verdict, r.message) for r in smoke.ledger.rungs}


def controls(
    smoke: Smoke, restarting: Scripted, efa: Devices | None = None
) -> dict[str, tuple[Verdict, str]]:
    RestartControls(Site(smoke, restarting, Screen(), efa)).run()
    return verdicts(smoke)


# --- red as it must be -----------------------------------------------------------------------
def test_each_fault_is_seen_and_the_fleet_is_restored_after_it(
    smoke_of: Callable[..., Smoke],
) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet, pull="transfers_fail", blocks="wrong_tokens")
    found = controls(smoke_of(fleet), restarting)
    assert restarting.done == ["spoil", "restore"] * 2
    assert [sorted(started) for started in restarting.started] == [["decode-0", "prefill-0"]] * 2
    assert found["decode in pull mode"][0] is Verdict.PASSED
    assert found["decode in pull mode"][1].startswith("failures went red, as they must; ")
    assert found["other block size"][0] is Verdict.PASSED
    assert "tokens/long" in found["other block size"][1]
    assert found["TCP in place of EFA"] == (
        Verdict.NOT_APPLICABLE,
        "there is no EFA on this machine",
    )


def test_the_pair_is_asked_what_every_pair_is_asked(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet(prefills=2, decodes=2)
    restarting = Scripted(fleet, blocks="wrong_tokens")
    smoke = smoke_of(fleet)
    RestartControls(Site(smoke, restarting, Screen())).run()
    assert [pair for pair, _ in fleet.asked] == [PAIR] * 2 * len(KINDS)
    assert sorted(restarting.started[0]) == ["decode-0", "prefill-0", "prefill-1"]
    judged = cast("list[dict[str, Any]]", smoke.ledger.rungs[1].evidence["rungs"])
    assert [r["rung"] for r in judged[:5]] == [f"tokens/{kind}" for kind in KINDS]


def test_a_fault_that_smoke_does_not_see_makes_the_control_red(
    smoke_of: Callable[..., Smoke],
) -> None:
    fleet = ScriptedFleet()
    found = controls(smoke_of(fleet), Scripted(fleet, pull="transfers_fail"))
    assert found["other block size"][0] is Verdict.FAILED
    assert found["other block size"][1].startswith("every rung was green with other block size")


def test_a_pair_that_does_not_answer_at_all_is_red(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    smoke = smoke_of(fleet)
    found = controls(smoke, Scripted(fleet, pull="refuses", blocks="refuses"))
    assert found["decode in pull mode"][0] is Verdict.PASSED
    (judged,) = cast("list[dict[str, Any]]", smoke.ledger.rungs[0].evidence["rungs"])
    assert (judged["rung"], judged["message"]) == (
        "asked",
        "prefill-0 does not tokenize: engine is dead",
    )


def test_a_router_that_refuses_the_broken_pair_is_asked_once_it_has_tried(
    smoke_of: Callable[..., Smoke],
) -> None:
    fleet = ScriptedFleet(why_down="warm-up failed: mismatch")
    found = controls(smoke_of(fleet), Scripted(fleet, pull="wrong_tokens", blocks="wrong_tokens"))
    assert {verdict for verdict, _ in list(found.values())[:2]} == {Verdict.PASSED}
    assert found["other block size"][1].endswith(
        " went red, as they must; the router refuses the pair: warm-up failed: mismatch"
    )


def test_red_proves_nothing_while_the_router_has_not_tried_the_pair(
    smoke_of: Callable[..., Smoke],
) -> None:
    fleet = ScriptedFleet(why_down="decode-0: connection refused")
    found = controls(smoke_of(fleet), Scripted(fleet, pull="wrong_tokens", blocks="wrong_tokens"))
    assert found["other block size"] == (
        Verdict.NOT_APPLICABLE,
        "nothing was shown: the router did not try the pair in 0 s: decode-0: connection refused",
    )


def test_no_question_to_a_broken_pair_waits_for_ever(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    smoke = smoke_of(fleet)
    fleet.paused.add("prefill-0")  # it would answer nobody without a deadline
    asked = smoke.ask_pair(*smoke.asker.pairs[0], timeout_s=0.1)
    assert [r.message for r in asked[: len(KINDS)]] == [
        "the router answered 504: prefill did not answer in time"
    ] * len(KINDS)


def test_engines_that_cannot_be_started_so_show_nothing(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet)
    restarting.refuses = "decode-0 ended (1) before it was ready"
    found = controls(smoke_of(fleet), restarting)
    assert found["other block size"] == (
        Verdict.NOT_APPLICABLE,
        "nothing was shown: decode-0 ended (1) before it was ready",
    )
    assert restarting.done == ["spoil", "restore"] * 2


def test_an_engine_without_a_block_size_of_its_own_is_not_touched(
    smoke_of: Callable[..., Smoke],
) -> None:
    fleet = ScriptedFleet()
    smoke = smoke_of(fleet)
    smoke.asker.fleet = outputs_of(fleet)
    restarting = Scripted(fleet)
    found = controls(smoke, restarting)
    assert found["other block size"] == (
        Verdict.NOT_APPLICABLE,
        "nothing was shown: decode-0 is not started with --block-size",
    )
    assert restarting.done == []


# --- EFA -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("devices", "verdict", "starts"),
    [
        (Devices(mocked=False, why_not=""), Verdict.PASSED, 3),
        (Devices(mocked=False, why_not="", share=1.0), Verdict.FAILED, 3),
        (Devices(mocked=False, why_not="backend is UCX"), Verdict.NOT_APPLICABLE, 2),
        (Devices(mocked=True, why_not="engines compute on CPUs"), Verdict.MOCKED, 2),
        (Devices(mocked=True, why_not="on CPUs", share=1.0), Verdict.FAILED, 2),
    ],
    ids=["over TCP", "EFA all the same", "not meant", "rehearsal", "rehearsal, bytes on EFA"],
)
def test_without_efa_its_rung_must_go_red_where_efa_is_expected(
    smoke_of: Callable[..., Smoke], devices: Devices, verdict: Verdict, starts: int
) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet)
    found = controls(smoke_of(fleet), restarting, devices)
    assert found["TCP in place of EFA"][0] is verdict
    assert restarting.done == ["spoil", "restore"] * starts


# --- there and back --------------------------------------------------------------------------
def test_what_does_not_come_back_is_told_with_its_cure(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet, pull="wrong_tokens")
    restarting.loses = "decode-0 failed"
    smoke = smoke_of(fleet)
    with pytest.raises(FleetError) as caught:
        controls(smoke, restarting)
    assert (caught.value.message, caught.value.hint) == (
        "after 'control: decode in pull mode' the cluster did not get its own engines back: "
        "decode-0 failed",
        "'kvdeploy up' starts them as the cluster file says, and proves them.",
    )
    assert list(verdicts(smoke)) == ["decode in pull mode"]


def test_ctrl_c_gives_the_cluster_its_own_engines_back(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    restarting, screen = Scripted(fleet), Screen()
    restarting.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        RestartControls(Site(smoke_of(fleet), restarting, screen)).run()
    assert restarting.done == ["spoil", "restore"]
    assert screen.said == [
        "interrupted in 'control: decode in pull mode': the cluster's own engines are started "
        "again; Ctrl-C once more leaves that to 'kvdeploy up'"
    ]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_they_come_back_is_taken_once(
    smoke_of: Callable[..., Smoke], times: int
) -> None:
    fleet = ScriptedFleet()
    restarting, screen = Scripted(fleet, pull="wrong_tokens"), Screen()
    restarting.interrupted_restores = times
    with pytest.raises(KeyboardInterrupt):
        RestartControls(Site(smoke_of(fleet), restarting, screen)).run()
    assert restarting.done == ["spoil", "restore", "restore"]
    left = (
        "engines are left as 'control: decode in pull mode' had them: 'kvdeploy up' starts them "
        "as the cluster file says, and proves them."
    )
    assert len(screen.said) == times
    assert (screen.said[-1] == left) is (times == 2)


# --- all of it -------------------------------------------------------------------------------
ALL = ["decode in pull mode", "other block size", "TCP in place of EFA", PAIR]


def test_without_being_asked_to_nothing_is_started(smoke_of: Callable[..., Smoke]) -> None:
    smoke = smoke_of(ScriptedFleet())
    note_all(smoke)
    assert verdicts(smoke) == dict.fromkeys(ALL, (Verdict.NOT_RUN, HOW))


def test_a_fleet_that_is_not_proven_is_not_broken_further(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet(wrong_tokens=True)
    smoke, restarting = smoke_of(fleet), Scripted(fleet)
    smoke.prove()
    climb_on(smoke, restarting, Screen())
    assert restarting.done == []
    assert [verdicts(smoke)[subject] for subject in ALL[:3]] == [(Verdict.NOT_RUN, UNPROVEN)] * 3


def test_engines_that_pull_are_not_broken(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    smoke, restarting = smoke_of(fleet), Scripted(fleet)
    smoke.prove()
    connector = smoke.spec.connector.model_copy(update={"mode": "pull"})
    smoke.spec = smoke.spec.model_copy(update={"connector": connector})
    climb_on(smoke, restarting, Screen())
    assert restarting.done == []
    shown = verdicts(smoke)
    assert [shown[s] for s in ALL[:3]] == [(Verdict.NOT_APPLICABLE, PULLS)] * 3


def test_what_was_seen_is_kept_when_it_breaks_off(
    smoke_of: Callable[..., Smoke], tmp_path: Path
) -> None:
    fleet = ScriptedFleet()
    smoke, restarting = smoke_of(fleet), Scripted(fleet, pull="wrong_tokens")
    smoke.prove()
    restarting.loses = "decode-0 failed"
    with pytest.raises(FleetError):
        finish(Screen(), smoke, RunLog(tmp_path), restarting)
    kept = SmokeReport.model_validate_json((tmp_path / "reports/smoke.json").read_text())
    assert kept.rungs == tuple(smoke.ledger.rungs)
    assert kept.rungs[-1].subject == "decode in pull mode"


def test_pull_that_cannot_be_served_leaves_ttft_unshown(
    smoke_of: Callable[..., Smoke], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet, pull="wrong_tokens", blocks="wrong_tokens")
    smoke = smoke_of(fleet)
    smoke.model = smoke.model.model_copy(update={"config": {**CONFIG, "vocab_size": 320}})
    monkeypatch.setattr(Bench, "measure", measured)
    smoke.prove()
    climb_on(smoke, restarting, Screen())
    assert restarting.done == [*["spoil", "restore"] * 2, "pull", "restore"]
    ttft = smoke.ledger.rungs[-1]
    assert (ttft.rung, ttft.verdict, ttft.message) == (
        "ttft",
        Verdict.NOT_APPLICABLE,
        "not measured to the end: pull: no pull here",
    )


def measured(bench: Bench, _fleet: FleetOutputs, planned: Sequence[Planned], _step: Step) -> None:
    """Thirty answers a run; a real Bench is tested against a scripted fleet of its own."""
    for wanted in planned:
        samples = (Sample(ttft_s=0.01, total_s=0.02, output_tokens=2),) * 30
        bench.runs.append(
            Run(
                mode=wanted.mode,
                cell=wanted.cell,
                round=wanted.round,
                seconds=1.0,
                samples=samples,
                moved=Moved(kv_bytes=1),
            )
        )


@pytest.mark.parametrize(
    ("env", "verdict"),
    [({}, Verdict.PASSED), ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, Verdict.NOT_APPLICABLE)],
)
def test_ttft_is_measured_push_pull_pull_push(
    smoke_of: Callable[..., Smoke],
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    verdict: Verdict,
) -> None:
    fleet = ScriptedFleet()
    restarting = Scripted(fleet)
    restarting.pulls, restarting.env = True, env
    smoke = smoke_of(fleet)
    smoke.model = smoke.model.model_copy(update={"config": {**CONFIG, "vocab_size": 320}})
    monkeypatch.setattr(Bench, "measure", measured)
    Ttft(Site(smoke, restarting, Screen())).run()
    (ttft,) = smoke.ledger.rungs
    assert (ttft.rung, ttft.subject, ttft.verdict) == ("ttft", PAIR, verdict)
    rounds = cast("list[dict[str, Any]]", ttft.evidence["rounds"])
    assert [(r["mode"], r["round"]) for r in rounds] == [
        ("push", 1),
        ("pull", 1),
        ("pull", 2),
        ("push", 2),
    ]
    assert restarting.done == ["pull", "restore"]


def test_a_fleet_that_pulls_is_not_compared(smoke_of: Callable[..., Smoke]) -> None:
    fleet = ScriptedFleet()
    smoke = smoke_of(fleet)
    smoke.model = smoke.model.model_copy(update={"config": {**CONFIG, "vocab_size": 320}})
    whole = smoke.asker.fleet
    config = whole.router_config.model_copy(update={"mode": "pull"})
    smoke.asker.fleet = whole.model_copy(update={"router_config": config})
    restarting = Scripted(fleet)
    Ttft(Site(smoke, restarting, Screen())).run()
    assert verdicts(smoke) == {
        PAIR: (
            Verdict.NOT_APPLICABLE,
            "this fleet serves by pull, and it is push that pull would be compared with",
        )
    }
    assert restarting.done == []
