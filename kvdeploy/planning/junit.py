"""A climb as JUnit XML, for CI systems: a test case a rung. Pure.

Only what passed is a green case: what was not applicable, not run or mocked is skipped, with why.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from kvdeploy.model.reports import SmokeReport, Verdict

if TYPE_CHECKING:
    from kvdeploy.model.reports import RungReport

NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, escaped or not."""
SUITE: Final = "kvdeploy smoke"


def render(report: SmokeReport) -> str:
    """The whole climb. A pair that nothing was seen to move over is a failure of its own."""
    red = {r.subject for r in report.failed}
    unmoved = [pair for pair in report.unmoved if pair not in red]
    counts = {
        "tests": len(report.rungs) + len(unmoved),
        "failures": len(report.failed) + len(unmoved),
        "errors": 0,
        "skipped": sum(r.verdict not in {Verdict.PASSED, Verdict.FAILED} for r in report.rungs),
    }
    root, suite = _suite(report.cluster, counts, seconds=report.seconds)
    suite.set("timestamp", report.started_at)
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("cluster", report.cluster),
        ("target", report.target),
        ("proven", str(report.proven).lower()),
    ):
        ET.SubElement(properties, "property", name=name, value=_clean(value))
    for rung in report.rungs:
        _add(suite, rung)
    for pair in unmoved:
        case = ET.SubElement(suite, "testcase", classname=_class(pair), name="proven", time="0")
        ET.SubElement(case, "failure", message=f"no KV was seen to move over {_clean(pair)}")
    return _text(root)


def render_unfinished(cluster: str) -> str:
    """What stands there until a climb has come to its end, and stays when it does not."""
    counts = {"tests": 1, "failures": 0, "errors": 1, "skipped": 0}
    root, suite = _suite(cluster, counts, seconds=0.0)
    case = ET.SubElement(suite, "testcase", classname=_class("fleet"), name="climb", time="0")
    ET.SubElement(case, "error", message="the climb did not come to its end")
    return _text(root)


def _suite(
    cluster: str, counts: dict[str, int], *, seconds: float
) -> tuple[ET.Element, ET.Element]:
    attributes = {name: str(count) for name, count in counts.items()}
    attributes |= {"name": f"{SUITE} {_clean(cluster)}", "time": f"{seconds:.2f}"}
    root = ET.Element("testsuites", attributes)
    return root, ET.SubElement(root, "testsuite", attributes)


def _add(suite: ET.Element, rung: RungReport) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        classname=_class(rung.subject),
        name=_clean(rung.rung),
        time=f"{rung.seconds:.2f}",
    )
    evidence = _clean(json.dumps(rung.evidence, indent=1, default=str, ensure_ascii=False))
    if rung.verdict is Verdict.FAILED:
        failure = ET.SubElement(case, "failure", message=_clean(rung.message))
        failure.text = evidence
        return
    if rung.verdict is not Verdict.PASSED:
        why = f"{rung.verdict.value}: {rung.message}"
        ET.SubElement(case, "skipped", message=_clean(why))
    told = ET.SubElement(case, "system-out")
    told.text = f"{_clean(rung.message)}\n{evidence}"


def _class(subject: str) -> str:
    """Systems that show cases as a tree split their class at dots and slashes."""
    return f"smoke.{_clean(re.sub(r'[./]', '-', subject))}"


def _clean(text: str) -> str:
    return NOT_XML.sub("\ufffd", text)


def _text(root: ET.Element) -> str:
    ET.indent(root)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ET.tostring(root, encoding='unicode')}\n"
