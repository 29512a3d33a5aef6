"""A climb as JUnit XML, read again by a parser."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvdeploy.model.reports import PUSHED, RungReport, SmokeReport, Verdict
from kvdeploy.planning.junit import render, render_unfinished

PAIR = "prefill-0/decode-0"


def rung(name: str, verdict: Verdict, message: str = "said", **more: Any) -> RungReport:
    return RungReport(rung=name, subject=PAIR, verdict=verdict, message=message, **more)


def report(*rungs: RungReport) -> SmokeReport:
    return SmokeReport(
        cluster="demo",
        target="rehearsal",
        started_at="2026-12-01T12:00:00+00:00",
        seconds=12.5,
        pairs=(PAIR,),
        rungs=rungs,
    )


def parsed(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == "testsuites"
    (suite,) = root
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": str(len(suite.findall("testcase"))),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": str(len(suite.findall("testcase/error"))),
        "skipped": str(len(suite.findall("testcase/skipped"))),
    }
    return suite


def test_every_rung_is_a_case_and_only_what_passed_is_green() -> None:
    suite = parsed(
        render(
            report(
                rung(PUSHED, Verdict.PASSED, "99 bytes moved", seconds=1.25, evidence={"n": 99}),
                rung("bytes", Verdict.FAILED, "1 block more", evidence={"expected": 5}),
                rung("node", Verdict.MOCKED, "8 GPUs"),
                rung("efa", Verdict.NOT_APPLICABLE, "no EFA"),
                rung("ttft", Verdict.NOT_RUN, "--restart does that"),
            )
        )
    )
    assert suite.get("time") == "12.50"
    assert suite.get("timestamp") == "2026-12-01T12:00:00+00:00"
    assert {p.get("name"): p.get("value") for p in suite.iter("property")} == {
        "cluster": "demo",
        "target": "rehearsal",
        "proven": "false",
    }
    cases = {c.get("name"): c for c in suite.findall("testcase")}
    assert {c.get("classname") for c in cases.values()} == {"smoke.prefill-0-decode-0"}
    assert cases[PUSHED].get("time") == "1.25"
    green = [n for n, c in cases.items() if {e.tag for e in c} == {"system-out"}]
    assert green == [PUSHED]
    assert cases[PUSHED].findtext("system-out") == '99 bytes moved\n{\n "n": 99\n}'
    (failure,) = cases["bytes"].findall("failure")
    assert (failure.get("message"), failure.text) == ("1 block more", '{\n "expected": 5\n}')
    skipped = {n: s.get("message") for n, c in cases.items() for s in c.findall("skipped")}
    assert skipped == {
        "node": "mocked: 8 GPUs",
        "efa": "not applicable: no EFA",
        "ttft": "not run: --restart does that",
    }


@pytest.mark.parametrize(
    ("pushed", "failures"),
    [
        (rung(PUSHED, Verdict.NOT_APPLICABLE), ["no KV was seen to move over prefill-0/decode-0"]),
        (rung(PUSHED, Verdict.FAILED, "none moved"), ["none moved"]),
        (rung(PUSHED, Verdict.PASSED), []),
    ],
)
def test_a_climb_that_proves_nothing_is_never_all_green(
    pushed: RungReport, failures: list[str]
) -> None:
    suite = parsed(render(report(pushed)))
    assert [f.get("message") for f in suite.iter("failure")] == failures


def test_what_no_xml_may_hold_is_replaced() -> None:
    said = rung(
        PUSHED, Verdict.FAILED, "a\x00b \x1b[31mred\x1b[0m <&> ü \ud800", evidence={"x": "\x07"}
    )
    suite = parsed(render(report(said)))
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "a\ufffdb \ufffd[31mred\ufffd[0m <&> ü \ufffd"


def test_until_it_is_finished_a_climb_is_an_error() -> None:
    suite = parsed(render_unfinished("demo"))
    assert [e.get("message") for e in suite.iter("error")] == ["the climb did not come to its end"]
