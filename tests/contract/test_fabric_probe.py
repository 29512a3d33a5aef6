"""The two ends of a ping over every rail, as on nodes, with the stand-in of fi_pingpong."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvdeploy import probes
from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.model.reports import Verdict
from kvdeploy.planning.fabric import build_order, judge_rails

pytestmark = pytest.mark.real_process

PAIR = "prefill-0/decode-0"
PROBE = (Path(probes.__file__).parent / "fabric.py").read_text()
STANDIN = Path(__file__).parents[1] / "hostlab/standins/efa/fi_pingpong"
DOMAINS = ("rdmap85s0-rdm", "rdmap86s0-rdm")


class Node:
    """A node's devices, and the program that goes over them, in a folder."""

    def __init__(self, root: Path) -> None:
        self.sys, self.program = root / "sys", root / "fi_pingpong"
        (self.sys / "module/efa").mkdir(parents=True)
        for domain in DOMAINS:
            self.set_state(domain, "4: ACTIVE")
        self.program.write_text(STANDIN.read_text().replace('"/sys/', f'"{self.sys}/'))
        self.program.chmod(0o755)

    def set_state(self, domain: str, state: str) -> None:
        ports = self.sys / "class/infiniband" / domain.removesuffix("-rdm") / "ports/1"
        ports.mkdir(parents=True, exist_ok=True)
        (ports / "state").write_text(f"{state}\n")

    def talk(self) -> Dialogue:
        argv = (sys.executable, "-I", "-c", PROBE)
        return Dialogue(argv, env={"PATH": os.defpath}, log=self.program.with_name("log"))


def ping(prefill: Node, decode: Node) -> tuple[dict[str, Any], dict[str, Any]]:
    with decode.talk() as server, prefill.talk() as client:
        server.say(build_order(DOMAINS) | {"program": str(decode.program)})
        ready = server.hear(10)
        if "error" in ready:
            return {}, ready
        towards = {"peer": "127.0.0.1", "ports": ready["ports"]}
        client.say(build_order(DOMAINS, **towards) | {"program": str(prefill.program)})
        asked = client.hear(10)
        server.say({"enough": True})
        return asked, server.hear(5)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Node, Node]:
    return Node(tmp_path / "prefill-0"), Node(tmp_path / "decode-0")


def test_every_rail_answers(nodes: tuple[Node, Node]) -> None:
    rung = judge_rails(PAIR, 2, *ping(*nodes), mocked=False)
    assert rung.verdict is Verdict.PASSED, rung.evidence
    took = rung.evidence["microseconds"]
    assert isinstance(took, dict)
    assert set(took) == set(DOMAINS)


def test_a_device_that_is_down_does_not(nodes: tuple[Node, Node]) -> None:
    nodes[0].set_state(DOMAINS[1], "1: DOWN")
    rung = judge_rails(PAIR, 2, *ping(*nodes), mocked=False)
    assert rung.verdict is Verdict.FAILED
    assert rung.message.startswith("1 of 2 rails answer; rdmap86s0-rdm: fi_getinfo(): ")
    assert rung.message.endswith("ret=-61 (No data available)")


def test_a_peer_that_is_down_does_not(nodes: tuple[Node, Node]) -> None:
    nodes[1].set_state(DOMAINS[0], "1: DOWN")
    rung = judge_rails(PAIR, 2, *ping(*nodes), mocked=False)
    assert rung.verdict is Verdict.FAILED
    assert (
        rung.message == "1 of 2 rails answer; rdmap85s0-rdm: failed to connect: Connection refused"
    )


def test_a_program_that_is_not_there_is_told(nodes: tuple[Node, Node]) -> None:
    nodes[1].program.unlink()
    rung = judge_rails(PAIR, 2, *ping(*nodes), mocked=False)
    assert rung.message == f"decode-0: {nodes[1].program}: No such file or directory"


def test_nobody_waits_on_when_the_probe_is_killed(nodes: tuple[Node, Node]) -> None:
    with nodes[1].talk() as server:
        server.say(build_order(DOMAINS) | {"program": str(nodes[1].program)})
        assert len(server.hear(10)["ports"]) == 2
        waiting = psutil.Process(server.pid).children()
        os.kill(server.pid, signal.SIGKILL)
        assert len(waiting) == 2
        assert psutil.wait_procs(waiting, timeout=5)[1] == []


def test_whoever_waits_ends_when_nobody_listens_any_more(nodes: tuple[Node, Node]) -> None:
    with nodes[1].talk() as server:
        server.say(build_order(DOMAINS) | {"program": str(nodes[1].program)})
        assert len(server.hear(10)["ports"]) == 2
    assert server.hear(1)["rails"][0]["code"] == -9
    assert server.hear(1) == {"error": "ended (0)"}
