"""Rung `fabric` of the smoke ladder: what libfabric finds on a node, and whether every EFA device
of one node reaches the same of another. Pure: programs' own words are given.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.planning.hardware import failed, good

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.reports import RungReport

BIN: Final = "/opt/amazon/efa/bin"
"""Of the EFA installer: its libfabric alone knows EFA's RDMA."""
FI_INFO: Final = (f"{BIN}/fi_info", "-p", "efa", "-t", "FI_EP_RDM")
FI_PINGPONG: Final = f"{BIN}/fi_pingpong"
PORT_BASE: Final = 19600
"""Of the TCP connections over which two ends of a ping find each other: below those that the
kernel deals to anybody."""
DEADLINE_S: Final = 40.0
ANSWERED_S: Final = 5.0
"""For the answering end to tell how it ended, once the asking one has."""
FIELD: Final = re.compile(r"^\s*(provider|domain):\s*(\S+)\s*$", re.MULTILINE)
FIGURES: Final = re.compile(
    r"^\S+(?:\s+\S+){3}\s+[\d.]+s\s+([\d.]+)\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE
)
"""The line of fi_pingpong's table: MB/s and microseconds a transfer."""


def parse_domains(said: str) -> tuple[str, ...]:
    """Domains of provider efa in what fi_info said, each once: newer ones list a device under the
    fabrics efa and efa-direct.
    """
    found, provider = set(), ""
    for name, value in FIELD.findall(said):
        if name == "provider":
            provider = value
        elif provider == "efa":
            found.add(value)
    return tuple(sorted(found))


def judge_domains(node: str, said: str, wanted: int, *, mocked: bool) -> RungReport:
    """That libfabric can use every EFA device of a node."""
    domains = parse_domains(said)
    evidence: dict[str, object] = {"domains": list(domains), "wanted": wanted}
    if len(domains) == wanted:
        found = f"libfabric has {len(domains)} domains of provider efa"
        return good("fabric", node, found, evidence, mocked=mocked)
    words = "" if domains else f": {' '.join(said.split())[:200] or 'fi_info said nothing'}"
    message = f"libfabric has {len(domains)} of {wanted} domains of provider efa{words}"
    return failed("fabric", node, message, evidence)


def build_order(domains: Sequence[str], **towards: object) -> dict[str, object]:
    """What one end of a ping is told: probes/fabric.py. `towards` is the asking end's peer and its
    ports, in the order of the domains.
    """
    told = towards or {"port_base": PORT_BASE}
    return {
        "program": FI_PINGPONG,
        "domains": list(domains),
        "deadline_s": DEADLINE_S,
        **told,
    }


def judge_rails(
    subject: str, wanted: int, client: Mapping[str, Any], server: Mapping[str, Any], *, mocked: bool
) -> RungReport:
    """That a ping went over every rail and came back with the bytes that were sent.

    Args:
        subject: 'prefill-0/decode-0': who asked, and who answered.
        wanted: rails that a node has.
        client: what the asking end said last: {"rails": [...]} or {"error": ...}.
        server: what the other end said last.
        mocked: whether the devices are.
    """
    asking, _, answering = subject.partition("/")
    evidence: dict[str, object] = {"client": dict(client), "server": dict(server)}
    for name, said in ((answering, server), (asking, client)):
        if "error" in said:
            return failed("fabric/rails", subject, f"{name}: {said['error']}", evidence)
    took: dict[str, float] = {}
    bad: list[str] = []
    for rail in client["rails"]:
        figures = FIGURES.search(rail["said"])
        if rail["code"] or figures is None:
            bad.append(f"{rail['domain']}: {_last(rail['said']) or 'no answer'}")
        else:
            took[rail["domain"]] = float(figures[2])
    evidence["microseconds"] = took
    if bad or len(took) != wanted:
        message = f"{len(took)} of {wanted} rails answer; {'; '.join(bad[:3])}".rstrip("; ")
        return failed("fabric/rails", subject, message, evidence)
    slowest = max(took, key=lambda name: took[name])
    message = f"all {wanted} rails answer, {slowest} last, in {took[slowest]:.1f} us"
    return good("fabric/rails", subject, message, evidence, mocked=mocked)


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
