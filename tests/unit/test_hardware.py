"""What nodes show of their hardware: judged from what a good node said, and a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.model.reports import PUSHED, RungReport, SmokeReport, Verdict
from kvdeploy.planning.hardware import (
    judge_devices,
    judge_efa,
    judge_node,
    judge_this_machine,
)

if TYPE_CHECKING:
    from kvdeploy.model.outputs import Device

P5EN = INSTANCES["p5en.48xlarge"]


@pytest.mark.parametrize(
    ("gpus", "efa", "mocked", "verdict", "message"),
    [
        (8, 16, False, Verdict.PASSED, "8 GPUs, 16 EFA devices"),
        (
            *(8, 16, True, Verdict.MOCKED),
            "8 GPUs, 16 EFA devices; mocked: this shows nothing of hardware",
        ),
        (8, 15, False, Verdict.FAILED, "8 GPUs, 15 EFA devices; p5en.48xlarge has 8 and 16"),
        (7, 16, True, Verdict.FAILED, "7 GPUs, 16 EFA devices; p5en.48xlarge has 8 and 16"),
    ],
)
def test_a_node_shows_its_devices(
    *, gpus: int, efa: int, mocked: bool, verdict: Verdict, message: str
) -> None:
    seen = NodeFacts(boot_id="b", gpus=gpus, efa_devices=efa)
    rung = judge_devices("decode-0", seen, P5EN, mocked=mocked)
    assert (rung.verdict, rung.message) == (verdict, message)


@pytest.mark.parametrize(
    ("efa", "pushed", "why_not", "mocked", "verdict", "message"),
    [
        (2000, 1000, "", False, Verdict.PASSED, "2,000 bytes went over EFA"),
        (
            *(10, 1000, "", False, Verdict.FAILED),
            "10 bytes went over EFA, and 1,000 bytes of KV were moved",
        ),
        (
            *(0, 0, "", False, Verdict.FAILED),
            "0 bytes went over EFA, and 0 bytes of KV were moved",
        ),
        (0, 1000, "it is TCP", False, Verdict.NOT_APPLICABLE, "it is TCP"),
        (
            *(2000, 1000, "", True, Verdict.MOCKED),
            "2,000 bytes went over EFA; mocked: this shows nothing of hardware",
        ),
    ],
)
def test_kv_that_went_another_way_than_efa_is_seen(
    *, efa: int, pushed: int, why_not: str, mocked: bool, verdict: Verdict, message: str
) -> None:
    rung = judge_efa(
        "prefill-0", efa_bytes=efa, pushed_bytes=pushed, why_not=why_not, mocked=mocked
    )
    assert (rung.verdict, rung.message) == (verdict, message)


def test_what_is_mocked_proves_nothing() -> None:
    seen = NodeFacts(boot_id="b", gpus=8, efa_devices=16)
    report = SmokeReport(
        cluster="demo",
        target="rehearsal",
        started_at="",
        seconds=0,
        pairs=("p/d",),
        rungs=(
            RungReport(rung=PUSHED, subject="p/d", verdict=Verdict.MOCKED, message=""),
            *judge_node("decode-0", seen, P5EN, mocked=True),
        ),
    )
    assert (report.proven, report.unmoved) == (False, ("p/d",))


# --- what a node said ------------------------------------------------------------------------
SAID: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/rungs/node.json").read_text())
GOOD = NodeFacts.model_validate(SAID["good"])


def rungs(seen: NodeFacts, kind: str = "p5en.48xlarge", *, mocked: bool = False) -> dict[str, str]:
    """Message by rung, behind '!' when it failed."""
    return {
        r.rung: f"{'!' if r.verdict is Verdict.FAILED else ''}{r.message}"
        for r in judge_node("prefill-0", seen, INSTANCES[kind], mocked=mocked)
    }


def test_a_good_node_is_good_on_every_rung() -> None:
    seen = GOOD.model_copy(update={"memlock": {"prefill-0": "unlimited"}})
    found = list(judge_node("prefill-0", seen, P5EN, mocked=False))
    assert {r.verdict for r in found} == {Verdict.PASSED}
    assert [(r.rung, r.message) for r in found] == [
        ("node", "8 GPUs, 16 EFA devices"),
        ("node/driver", "driver and fabric manager are 580.159.03"),
        ("node/memlock", "prefill-0 may lock all memory"),
        ("node/huge-pages", "5128 huge pages of 2 MiB"),
    ]
    assert found[1].evidence == {"driver": "580.159.03", "fabric_manager": "580.159.03"}
    assert found[2].evidence == {"prefill-0": {"unit": "infinity", "process": "unlimited"}}


def test_in_a_rehearsal_none_of_it_passes() -> None:
    found = list(judge_node("prefill-0", GOOD, P5EN, mocked=True))
    assert {r.verdict for r in found} == {Verdict.MOCKED}


def test_a_bad_node_is_bad_on_every_rung() -> None:
    """The same host with faults: a driver of another version, a device down, and so on."""
    assert rungs(NodeFacts.model_validate(SAID["bad"]), mocked=True) == {
        "node": "!8 GPUs, 15 EFA devices; p5en.48xlarge has 8 and 16",
        "node/driver": "!driver 580.159.03, and the fabric manager is 580.126.20: they must be the "
        "same",
        "node/memlock": "!the unit of prefill-0 may lock 65536 bytes of memory",
        "node/huge-pages": "!0 huge pages of 2 MiB, of 5128",
    }


def changed(**facts: Any) -> dict[str, str]:
    return rungs(GOOD.model_copy(update=facts))


def test_a_limit_that_the_process_itself_has_is_seen() -> None:
    said = changed(memlock={"prefill-0": "8388608"})
    assert said["node/memlock"] == "!prefill-0 may lock 8388608 bytes of memory"
    assert changed(memlock={})["node/memlock"] == (
        "!prefill-0 may lock an unknown number of bytes of memory"
    )
    assert changed(units={})["node/memlock"] == "!no engine has a unit here"


def test_a_driver_that_does_not_answer_is_seen() -> None:
    assert changed(driver="")["node/driver"] == "!no NVIDIA driver answers"
    assert changed(fabric_manager="")["node/driver"] == (
        "!driver 580.159.03, and the fabric manager is not there: they must be the same"
    )


def test_a_small_node_needs_less() -> None:
    seen = GOOD.model_copy(update={"gpus": 1, "efa_devices": 1, "fabric_manager": ""})
    found = list(judge_node("decode-0", seen, INSTANCES["p5.4xlarge"], mocked=False))
    assert [(r.rung, r.verdict) for r in found if r.rung != "node/memlock"] == [
        ("node", Verdict.PASSED),
        ("node/driver", Verdict.PASSED),
        ("node/huge-pages", Verdict.NOT_APPLICABLE),
    ]
    assert found[1].message == "driver 580.159.03; p5.4xlarge has no NVSwitches to manage"


# --- this machine ----------------------------------------------------------------------------
def engine(gpus: str) -> LaunchSpec:
    return LaunchSpec(
        name="prefill-0",
        role="prefill",
        argv=("x",),
        env={"CUDA_VISIBLE_DEVICES": gpus},
        ready=Readiness(url="x", timeout_s=1),
    )


@pytest.mark.parametrize(
    ("device", "gpus", "verdict", "message"),
    [
        ("cpu", 0, Verdict.NOT_APPLICABLE, "engines compute on this machine's CPUs"),
        ("cuda", 4, Verdict.PASSED, "3 of 4 GPUs are dealt to engines, driver 580.1"),
        ("cuda", 2, Verdict.FAILED, "engines were dealt 3 GPUs, and the driver shows 2"),
    ],
)
def test_a_machine_shows_what_its_engines_compute_on(
    device: Device, gpus: int, verdict: Verdict, message: str
) -> None:
    seen = NodeFacts(boot_id="b", gpus=gpus, driver="580.1")
    node, memlock = judge_this_machine(seen, [engine("0,1"), engine("2")], device=device)
    assert (node.rung, node.verdict, node.message) == ("node", verdict, message)
    assert (memlock.rung, memlock.verdict) == ("node/memlock", Verdict.NOT_APPLICABLE)
