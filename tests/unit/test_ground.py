"""The lower rungs on nodes and on this machine: who is asked what, and what becomes of it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.errors import AwsError, FleetError, UnreachableError
from kvdeploy.model.awsfacts import Identity
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs, NodeFacts, RuntimeOutputs
from kvdeploy.model.reports import Verdict
from kvdeploy.model.routing import RouterConfig
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.writing import shapes_for
from kvdeploy.proc import Command, Outcome
from kvdeploy.stages.ground import LocalGround
from kvdeploy.stages.hardware import NodeGround
from kvdeploy.stages.units import units_of
from tests.line import Line
from tests.unit.test_node_stages import Fleet, Made, Memory, cluster, crew_of, up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdeploy.model.inventory import Host
    from kvdeploy.model.reports import RungReport

DATA = Path(__file__).parents[1] / "data/rungs"
NODE: dict[str, Any] = json.loads((DATA / "node.json").read_text())
FABRIC: dict[str, Any] = json.loads((DATA / "fabric.json").read_text())
WRITE: dict[str, Any] = json.loads((DATA / "write.json").read_text())
REAL: dict[str, Any] = NODE["good"] | {"memlock": {"prefill-0": "unlimited"}}
"""Where no machine lies under the node that limits it."""
SOURCE = "cluster.yaml"


class End:
    """One end of a ping or of a WRITE, which answers what it was asked for."""

    def __init__(self, host: str, argv: tuple[str, ...], bad: str) -> None:
        self.host, self.argv, self.bad = host, argv, bad
        self.heard: list[Mapping[str, Any]] = []
        self.answers: list[dict[str, Any]] = []

    def say(self, document: Mapping[str, Any]) -> None:
        self.heard.append(document)
        if document == {"enough": True}:
            return
        if self.bad == "silent":
            self.answers = [{"error": "ended (255): connection refused"}]
        elif "domains" in document:
            rail = {"code": 0, "said": FABRIC["ping"]["good"]}
            domains = document["domains"]
            ready = [] if "peer" in document else [{"ports": list(range(len(domains)))}]
            reached = domains[: len(document.get("ports", domains))]
            rails = [rail | {"domain": name} for name in reached]
            self.answers += [*ready, {"rails": rails}]
        elif document.get("role") == "target":
            self.answers.append({"metadata": "bWQ=", "memory": "DRAM", "why_not_vram": ""})
            for shape in shapes_for("cpu"):
                wrong = int(self.bad == "wrong")
                found = {"pieces": shape.total // 4096, "wrong": wrong, "touched": 0, "first": 4096}
                self.answers.append({"shape": shape.name, **found})
        elif "metadata" in document:
            for shape in shapes_for("cpu"):
                wrote = WRITE["good"]["wrote"] | {"shape": shape.name, "bytes": shape.total}
                self.answers.append(wrote)

    def hear(self, timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        return self.answers.pop(0)


class Nodes(Fleet):
    def __init__(self) -> None:
        super().__init__()
        self.said = dict.fromkeys(("prefill-0", "decode-0"), REAL)
        self.fi_info = dict.fromkeys(("prefill-0", "decode-0"), FABRIC["fi_info"]["good"])
        self.efa_bytes = 0
        self.bad: dict[str, str] = {}
        self.ends: list[End] = []

    def ask(self, hosts: Sequence[Host]) -> dict[str, NodeFacts | UnreachableError]:
        if any(h.name not in self.said for h in hosts):
            return super().ask(hosts)  # while they are made ready
        return {h.name: self._said(h) for h in hosts}

    def _said(self, host: Host) -> NodeFacts | UnreachableError:
        said = self.said[host.name]
        own = {key: {host.name: said[key]["prefill-0"]} for key in ("units", "memlock")}
        return NodeFacts.model_validate(said | own | {"efa_bytes": self.efa_bytes})

    def run(self, host: Host, *argv: str, timeout_s: float = 60.0) -> Outcome:
        if argv[0] != "/opt/amazon/efa/bin/fi_info":
            return super().run(host, *argv, timeout_s=timeout_s)
        assert argv[1:] == ("-p", "efa", "-t", "FI_EP_RDM")
        said = self.fi_info[host.name]
        return Outcome(command=Command(argv=argv), code=0, stdout=said, stderr="", seconds=0)

    @contextmanager
    def talk(self, host: Host, *argv: str) -> Iterator[End]:
        self.ends.append(End(host.name, argv, self.bad.get(host.name, "")))
        yield self.ends[-1]


class Under:
    """A cluster whose nodes are ready, and what is under it."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.nodes = Nodes()
        self.spec = cluster(runtime={"device": "cpu"}, **changes)
        crew, memory = crew_of(self.spec, self.nodes, root), Memory()
        up(Made(self.spec), crew, memory)
        units = units_of(memory.record, crew)
        assert units is not None
        self.units, self.refused = units, ""

    def account(self) -> tuple[Identity, tuple[str, ...]]:
        if self.refused:
            raise AwsError(self.refused)
        return Identity(account="1", arn="arn:me", user="me"), ("i-1", "i-2", "i-3")

    def ground(self) -> NodeGround:
        return NodeGround(self.units, self.account, now=self.spec, source=SOURCE)

    def climb(self) -> list[RungReport]:
        return list(self.ground().rungs(Line(), "n1"))


def red(rungs: Sequence[RungReport]) -> dict[str, str]:
    return {r.rung: r.message for r in rungs if r.verdict is Verdict.FAILED}


REHEARSED: dict[str, Any] = {"endpoint": "http://127.0.0.1:5000"}


def test_good_nodes_are_good_on_every_rung(tmp_path: Path) -> None:
    under = Under(tmp_path, aws=REHEARSED)
    rungs = under.climb()
    node = ("node", "node/driver", "node/memlock", "node/huge-pages")
    assert [(r.rung, r.subject, r.verdict.value) for r in rungs] == [
        ("spec", "account", "mocked"),
        ("spec", "cluster file", "passed"),
        *((rung, "decode-0", "mocked") for rung in node),
        *((rung, "prefill-0", "mocked") for rung in node),
        ("fabric", "decode-0", "mocked"),
        ("fabric", "prefill-0", "mocked"),
        ("fabric/rails", "prefill-0/decode-0", "mocked"),
        *(
            (f"write/{shape}", "prefill-0/decode-0", "mocked")
            for shape in ("small", "many", "large")
        ),
    ]


def test_on_real_nodes_they_pass(tmp_path: Path) -> None:
    under = Under(tmp_path)
    assert {r.verdict for r in under.climb()} == {Verdict.PASSED}


def test_decode_answers_what_prefill_asks(tmp_path: Path) -> None:
    under = Under(tmp_path)
    under.climb()
    server, client, target, writer = under.nodes.ends
    assert [e.host for e in under.nodes.ends] == ["decode-0", "prefill-0"] * 2
    assert server.argv[:3] == ("python3", "-I", "-c")
    assert client.heard[0]["peer"] == under.units.host("decode-0").address
    assert client.heard[0]["ports"] == list(range(16))
    assert writer.argv[:3] == ("sudo", "-n", "systemd-run")
    orders = [end.heard[0] for end in (target, writer)]
    assert [(o["role"], o["backend"], o["memory"]) for o in orders] == [
        ("target", "UCX", "DRAM"),
        ("writer", "UCX", "DRAM"),
    ]
    assert len({o["nonce"] for o in orders}) == 1
    assert writer.heard[1]["metadata"] == "bWQ="


@pytest.mark.parametrize(
    ("what", "rungs"),
    [
        ("node", {"node", "node/driver", "node/memlock", "node/huge-pages"}),
        ("fi_info", {"fabric", "fabric/rails"}),
        ("silent", {"fabric/rails", "write/small"}),
        ("wrong", {"write/small"}),
    ],
)
def test_what_is_wrong_with_one_node_is_red(tmp_path: Path, what: str, rungs: set[str]) -> None:
    under = Under(tmp_path)
    if what == "node":
        under.nodes.said["decode-0"] = NODE["bad"]
    elif what == "fi_info":
        under.nodes.fi_info["decode-0"] = FABRIC["fi_info"]["one down"]
    else:
        under.nodes.bad["decode-0"] = what
    assert red(under.climb()).keys() == rungs


def test_an_account_that_does_not_answer_is_red(tmp_path: Path) -> None:
    under = Under(tmp_path, aws=REHEARSED)
    under.refused = "the token has expired"
    assert red(under.climb()) == {"spec": "AWS does not say who we are: the token has expired"}


def test_nodes_without_efa_have_no_fabric_to_show(tmp_path: Path) -> None:
    under = Under(tmp_path, aws={"instance_type": "c7i.large"})
    rungs = {r.rung: r.verdict for r in under.climb()}
    assert rungs["fabric"] is Verdict.NOT_APPLICABLE
    assert "node" not in rungs
    assert rungs["write/large"] is Verdict.PASSED


def test_what_efa_carried_is_counted_from_after_the_writes(tmp_path: Path) -> None:
    under = Under(tmp_path)
    ground = under.ground()
    under.nodes.efa_bytes = 5000
    list(ground.rungs(Line(), "n1"))
    under.nodes.efa_bytes = 7000
    (rung,) = ground.carried({"prefill-0": 1000})
    assert rung.verdict is Verdict.NOT_APPLICABLE  # on CPUs
    assert rung.evidence == {"efa_bytes": 2000, "pushed_bytes": 1000}


# --- this machine ----------------------------------------------------------------------------
class Runner:
    def run(self, command: Command, **_more: Any) -> Outcome:
        assert command.argv[1:3] == ("-I", "-c")
        said = json.dumps(NODE["good"])
        return Outcome(command=command, code=0, stdout=f"{said}\n", stderr="", seconds=0)


class Hung:
    def run(self, command: Command, **_more: Any) -> Outcome:
        return Outcome(
            command=command,
            code=-9,
            stdout="",
            stderr="",
            seconds=command.timeout_s,
            timed_out=True,
        )


class Local(LocalGround):
    def _begin(self, engine: LaunchSpec) -> Any:
        return opened(End(engine.name, engine.argv, ""))


@contextmanager
def opened(end: End) -> Iterator[End]:
    yield end


def engine(name: str) -> LaunchSpec:
    role = name.partition("-")[0]
    ready = Readiness(url="x", timeout_s=1)
    return LaunchSpec.model_validate(
        {"name": name, "role": role, "argv": ("/python", "x"), "ready": ready}
    )


def local(root: Path, runner: Runner | Hung) -> LocalGround:
    spec = ClusterSpec.model_validate({"name": "demo", "fleet": {"decode": {"count": 2}}})
    fleet = FleetOutputs(
        url="x",
        engines=tuple(map(engine, ("prefill-0", "decode-0", "decode-1"))),
        router=engine("decode-9").model_copy(update={"role": "router"}),
        router_config=RouterConfig(host="127.0.0.1", port=1, served_model="m", engines=()),
        generations={},
    )
    runtime = RuntimeOutputs(python="/python", device="cpu", built=True, versions={})
    return Local(spec, fleet, runtime, runner, now=spec, source=SOURCE, log=root / "log")


def test_a_machine_that_does_not_tell_of_itself_is_no_bug(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="this machine does not tell of itself: no answer"):
        list(local(tmp_path, Hung()).rungs(Line(), "n1"))


def test_on_one_machine_what_does_not_apply_is_told(tmp_path: Path) -> None:
    ground = local(tmp_path, Runner())
    rungs = list(ground.rungs(Line(), "n1"))
    assert [(r.rung, r.subject, r.verdict.value) for r in rungs] == [
        ("spec", "cluster file", "passed"),
        ("node", "this machine", "not applicable"),
        ("node/memlock", "this machine", "not applicable"),
        ("fabric", "this machine", "not applicable"),
        *((f"write/{s}", "prefill-0/decode-0", "passed") for s in ("small", "many", "large")),
    ]
    assert all(r.message for r in rungs)
    assert list(ground.carried({"prefill-0": 1})) == []
