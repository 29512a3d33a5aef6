"""The stages behind the nodes: what they do to which node, and when they hold."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy import pipeline
from kvdeploy.adapters.ansible.report import PlayReport
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import App
from kvdeploy.cli.aws.bench import NodeGround
from kvdeploy.cli.benching import Up
from kvdeploy.errors import FleetError, UnreachableError
from kvdeploy.model.infra import NodeOutputs, ProvisionOutputs
from kvdeploy.model.inventory import Connection
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, NodeFacts
from kvdeploy.model.record import Record, StageRecord
from kvdeploy.model.reports import Verdict
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.proc import Command, Outcome
from kvdeploy.progress import Mute
from kvdeploy.stages.configure import ConfigureStage, NodeModelStage
from kvdeploy.stages.doctor import examine_node
from kvdeploy.stages.efa import NodeEfa
from kvdeploy.stages.nodefleet import NodeFleetStage
from kvdeploy.stages.nodes import Crew
from kvdeploy.stages.units import units_of
from kvdeploy.ui import Ui
from tests.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvdeploy.adapters.ansible.client import Play
    from kvdeploy.model.inventory import Host
    from kvdeploy.progress import Listener
    from kvdeploy.stages.base import Results
    from kvdeploy.stages.writing import Talker

CONFIG: Final = {"model_type": "llama", "num_hidden_layers": 4}
UNREACHABLE: Final = UnreachableError("decode-0 (10.0.0.2) is not reachable: connection refused")


class Fleet:
    """Nodes and playbooks in one: what is run on whom, and what nodes say."""

    connection = Connection(user="ubuntu", known_hosts="/k")

    def __init__(self) -> None:
        self.listener: Listener = Mute()
        self.plays: list[Play] = []
        self.boots = dict.fromkeys(("prefill-0", "decode-0", "router-0"), "boot-1")
        self.generations = {"prefill-0": "g1", "decode-0": "g1", "router": "g1"}
        self.silent: dict[str, int] = {}
        """How often a node does not answer yet."""
        self.config = json.dumps(CONFIG)
        self.commands: list[tuple[str, tuple[str, ...]]] = []
        self.ports: dict[tuple[str, int], int] = {}

    def run_play(self, play: Play) -> PlayReport:
        self.plays.append(play)
        return PlayReport(playbook=play.playbook, seconds=1, hosts=())

    def ask(self, hosts: Sequence[Host]) -> dict[str, NodeFacts | UnreachableError]:
        return {h.name: self._facts(h) for h in hosts}

    def _facts(self, host: Host) -> NodeFacts | UnreachableError:
        if self.silent.get(host.name, 0):
            self.silent[host.name] -= 1
            return UNREACHABLE
        known = {n: g for n, g in self.generations.items() if host.name in {n, f"{n}-0"}}
        return NodeFacts(
            boot_id=self.boots[host.name], interface="eth0", cores=(0, 1), generations=known
        )

    def run(self, host: Host, *argv: str, timeout_s: float = 60.0) -> Outcome:
        self.commands.append((host.name, argv))
        text = self.config if argv[0] == "cat" else ""
        return Outcome(command=Command(argv=argv), code=0, stdout=text, stderr="", seconds=0)

    @contextmanager
    def way(
        self, through: Host, targets: Sequence[tuple[str, int]]
    ) -> Iterator[Mapping[tuple[str, int], int]]:
        assert through.name == "router-0"
        yield {target: 40000 + i for i, target in enumerate(targets)}

    def follow(self, host: Host, *argv: str, log: Path) -> None:
        raise NotImplementedError

    def talk(self, host: Host, *argv: str) -> AbstractContextManager[Talker]:
        raise NotImplementedError


class Router:
    """Says /ready with one status after the other."""

    def __init__(self, answers: Iterator[int]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(next(answers))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Plays:
    def __init__(self, fleet: Fleet) -> None:
        self.listener: Listener = Mute()
        self.run = fleet.run_play


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Memory:
    def __init__(self) -> None:
        self.record = Record(cluster="demo", target="aws")
        self.line = Line()

    def write(self, record: Record) -> None:
        self.record = Record.model_validate_json(record.model_dump_json())

    @contextmanager
    def step(self, title: str) -> Iterator[Line]:
        yield self.line


class Made:
    """Stage `provision`, done."""

    name = "provision"
    title = "make nodes"

    def __init__(self, spec: ClusterSpec) -> None:
        self.nodes = {
            n.name: NodeOutputs(
                id=f"i-{i}",
                role=n.role,
                private_ip=f"10.0.0.{i}",
                instance_type=n.instance_type,
                zone="us-west-2a",
            )
            for i, n in enumerate(nodes_of(spec), start=1)
        }

    def inputs(self, _results: Any) -> Mapping[str, Any]:
        return {name: node.id for name, node in self.nodes.items()}

    def holds(self, _result: Any) -> bool:
        return True

    def apply(self, _results: Any, _step: Any) -> Mapping[str, Any]:
        return ProvisionOutputs(
            cluster_id="c",
            nodes=self.nodes,
            vpc_id="v",
            subnet_id="s",
            security_group_id="g",
            images={},
        ).model_dump(mode="json")


def cluster(**changes: Any) -> ClusterSpec:
    aws = {"region": "us-west-2", "zone": "us-west-2a", **changes.pop("aws", {})}
    whole = {"name": "demo", "target": "aws", "aws": aws, "model": {"id": "org/m"}} | changes
    return ClusterSpec.model_validate(whole)


def crew_of(spec: ClusterSpec, fleet: Fleet, root: Path, **env: str) -> Crew:
    return Crew(
        spec=spec,
        root=root,
        packages=root / "packages",
        plays=Plays(fleet),
        remote=fleet,
        environment=env,
    )


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def memory() -> Memory:
    return Memory()


def up(
    made: Made, crew: Crew, memory: Memory, *, until: str = "model", clock: Clock | None = None
) -> tuple[str, ...]:
    before = memory.record.stages.get("configure")
    stages = (
        made,
        ConfigureStage(crew, before.result if before else None, clock=clock or Clock()),
        NodeModelStage(crew),
    )
    return pipeline.up(stages, memory.record, store=memory, progress=memory, until=until).done


# --- configure -------------------------------------------------------------------------------
def test_nodes_yml_runs_on_every_new_node(fleet: Fleet, memory: Memory, tmp_path: Path) -> None:
    spec = cluster(aws={"node_variables": {"efa_url": "http://mirror"}})
    assert up(Made(spec), crew_of(spec, fleet, tmp_path, HF_TOKEN="hf_x"), memory) == (
        "provision",
        "configure",
        "model",
    )
    (play,) = fleet.plays
    assert (play.playbook, play.limit) == ("nodes.yml", ("prefill-0", "decode-0", "router-0"))
    assert (play.variables, play.secrets) == ({"efa_url": "http://mirror"}, {"model_token": "hf_x"})
    assert [h.instance_id for h in play.inventory.hosts] == ["i-1", "i-2", "i-3"]


def test_a_second_run_does_nothing(fleet: Fleet, memory: Memory, tmp_path: Path) -> None:
    spec = cluster()
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    assert up(Made(spec), crew_of(spec, fleet, tmp_path), memory) == ()
    assert len(fleet.plays) == 1


def test_a_replaced_node_is_made_ready_alone(fleet: Fleet, memory: Memory, tmp_path: Path) -> None:
    spec = cluster()
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    made = Made(spec)
    new = {"id": "i-9", "private_ip": "10.0.0.9", "generation": 2}
    made.nodes["decode-0"] = made.nodes["decode-0"].model_copy(update=new)
    fleet.boots["decode-0"] = "boot-9"
    assert up(made, crew_of(spec, fleet, tmp_path), memory)[:2] == ("provision", "configure")
    assert fleet.plays[-1].limit == ("decode-0",)


def test_a_node_that_was_started_again_is_looked_at_again(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    fleet.boots["prefill-0"] = "boot-2"
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    assert fleet.plays[-1].limit == ("prefill-0",)
    assert up(Made(spec), crew_of(spec, fleet, tmp_path), memory) == ()


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"aws": {"node_variables": {"efa_url": "http://other"}}}, 3),
        ({"model": {"id": "org/other"}}, 2),
        ({"fleet": {"decode": {"engine_args": {"max-num-seqs": 8}}}}, 0),
        ({"router": {"port": 9000}}, 0),
    ],
)
def test_a_change_touches_the_nodes_that_it_is_about(
    fleet: Fleet, memory: Memory, tmp_path: Path, changes: dict[str, Any], limit: int
) -> None:
    up(Made(cluster()), crew_of(cluster(), fleet, tmp_path), memory)
    spec = cluster(**changes)
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    assert len(fleet.plays) == (2 if limit else 1)
    assert len(fleet.plays[-1].limit) == (limit or 3)


def test_nodes_that_boot_are_waited_for_and_told(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec, fleet.silent["decode-0"] = cluster(), 2
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    assert memory.line.said[0] == f"waiting for decode-0: {UNREACHABLE.message}"
    assert len(fleet.plays) == 1


def test_a_node_that_never_answers_is_an_error(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec, fleet.silent["decode-0"] = cluster(), 10**6
    with pytest.raises(UnreachableError) as caught:
        up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    assert caught.value.message == f"{UNREACHABLE.message} (after 20 min)"
    assert fleet.plays == []


def test_first_boots_are_over_before_anything_is_done(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory, until="configure")
    program = "! command -v cloud-init || timeout 900 cloud-init status --wait"
    assert fleet.commands == [
        (name, ("sh", "-c", program)) for name in ("prefill-0", "decode-0", "router-0")
    ]


def test_grafanas_password_comes_from_the_operators_shell(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster(monitoring={"enabled": True})
    crew = crew_of(spec, fleet, tmp_path, KVDEPLOY_GRAFANA_PASSWORD="of-ann")
    up(Made(spec), crew, memory)
    assert fleet.plays[0].secrets["monitoring_grafana_password"] == "of-ann"
    assert "of-ann" not in memory.record.model_dump_json()


# --- model -----------------------------------------------------------------------------------
def test_the_models_configuration_comes_from_a_node(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    up(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    known = memory.record.stages["model"].result
    assert known["config"] == CONFIG
    assert known["path"].startswith("/opt/kvdeploy/data/models/m-")
    assert fleet.commands[-1] == ("prefill-0", ("cat", f"{known['path']}/config.json"))


def test_a_model_that_cannot_be_read_is_an_error(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec, fleet.config = cluster(), "cut sho"
    with pytest.raises(FleetError, match=r"prefill-0 has no /opt/.*/config\.json that can be read"):
        up(Made(spec), crew_of(spec, fleet, tmp_path), memory)


# --- fleet -----------------------------------------------------------------------------------
def with_fleet(made: Made, crew: Crew, memory: Memory) -> NodeFleetStage:
    """The stage, as it is after its inputs were asked for."""
    up(made, crew, memory)
    stage = NodeFleetStage(crew)
    results: Results = {n: known.result for n, known in memory.record.stages.items()}
    stage.inputs(results)
    return stage


def test_the_fleet_depends_on_keys_but_does_not_hold_them(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster(router={"api_key_file": "keys"})
    (tmp_path / "keys").write_text("secret-of-ann\n")
    crew = crew_of(spec, fleet, tmp_path)
    up(Made(spec), crew, memory)
    results: Results = {n: known.result for n, known in memory.record.stages.items()}
    told = NodeFleetStage(crew).inputs(results)
    assert told["secrets"] == hashlib.sha256(b"secret-of-ann\n\n").hexdigest()
    assert "secret-of-ann" not in json.dumps(told)
    (tmp_path / "keys").write_text("another\n")
    assert NodeFleetStage(crew).inputs(results) != told


def test_a_fleet_with_a_restarted_engine_does_not_hold(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    stage = with_fleet(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    planned = stage.planned.plan.outputs({"prefill-0": "g0", "decode-0": "g1"})
    assert not stage.holds(planned.model_dump(mode="json"))


def test_a_fleet_with_a_silent_node_does_not_hold(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    stage = with_fleet(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    fleet.silent["router-0"] = 1
    planned = stage.planned.plan.outputs(fleet.generations)
    assert not stage.holds(planned.model_dump(mode="json"))


def test_the_fleet_is_asked_through_the_routers_node(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    stage = with_fleet(Made(spec), crew_of(spec, fleet, tmp_path), memory)
    with stage.reach(stage.planned.plan.outputs({})) as here:
        assert here.url == "http://127.0.0.1:40000"
        assert [e.url for e in here.router_config.engines] == [
            "http://127.0.0.1:40001",
            "http://127.0.0.1:40002",
        ]
        assert here.router_config.engines[0].side_channel_host == "10.0.0.1"


def test_a_fleet_with_a_certificate_is_asked_by_https_and_depends_on_it(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    (tmp_path / "router.crt").write_text("a certificate\n")
    (tmp_path / "router.key").write_text("its key\n")
    spec = cluster(router={"tls_cert_file": "router.crt", "tls_key_file": "router.key"})
    crew = crew_of(spec, fleet, tmp_path)
    assert crew.secrets()["router_tls_key"] == "its key\n"
    stage = with_fleet(Made(spec), crew, memory)
    known = stage.planned.plan.outputs({}, tls_cert_file=str(crew.tls_cert_file))
    with stage.reach(known) as here:
        assert (here.url, here.trust) == ("https://127.0.0.1:40000", str(tmp_path / "router.crt"))
        assert here.router_config.engines[0].url == "http://127.0.0.1:40001"
    results: Results = {n: done.result for n, done in memory.record.stages.items()}
    told = stage.inputs(results)
    (tmp_path / "router.crt").write_text("a renewed one\n")
    assert stage.inputs(results)["secrets"] != told["secrets"]
    assert "its key" not in json.dumps(told)


# --- units -----------------------------------------------------------------------------------
def test_a_fleet_that_did_not_start_can_be_looked_at(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    crew = crew_of(spec, fleet, tmp_path)
    up(Made(spec), crew, memory, until="configure")
    assert units_of(memory.record, crew) is None
    up(Made(spec), crew, memory)
    fleet.generations = {}
    units = units_of(memory.record, crew)
    assert units is not None
    assert {row["name"]: row["state"] for row in units.observe()} == dict.fromkeys(
        ("decode-0", "prefill-0", "router"), "absent"
    )


def test_units_know_their_nodes_and_how_they_are(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    crew = crew_of(spec, fleet, tmp_path)
    stage = with_fleet(Made(spec), crew, memory)
    outputs = stage.planned.plan.outputs(fleet.generations).model_dump(mode="json")
    units = units_of(
        memory.record.with_stage("fleet", StageRecord(digest="", result=outputs)), crew
    )
    assert units is not None
    assert {n: h.name for n, h in units.hosts.items()} == {
        "decode-0": "decode-0",
        "prefill-0": "prefill-0",
        "router": "router-0",
    }
    fleet.silent["decode-0"] = 1
    rows = {row["name"]: row for row in units.observe()}
    assert (rows["decode-0"]["state"], rows["decode-0"]["reason"]) == (
        "unreachable",
        UNREACHABLE.message,
    )
    assert (rows["prefill-0"]["state"], rows["prefill-0"]["generation"]) == ("absent", "g1")
    with pytest.raises(FleetError, match="nothing of this cluster is called 'decode-1'"):
        units.host("decode-1")


def test_an_engine_that_is_started_otherwise_leaves_every_other_node_alone(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    crew = crew_of(spec, fleet, tmp_path)
    up(Made(spec), crew, memory)
    units = units_of(memory.record, crew)
    assert units is not None
    (own,) = units.blueprint.plan.engines["decode-0"]
    other = own.model_copy(update={"env": {"X": "1"}})
    units.start([other], Line())
    play = fleet.plays[-1]
    (host,) = play.inventory.hosts
    assert (play.playbook, host.name) == ("fleet.yml", "decode-0")
    assert host.vars["engine_specs"] == [other.model_dump(mode="json")]
    assert play.inventory.group_vars == units.blueprint.inventory.group_vars
    untouched = units.host("decode-0").vars
    assert untouched["engine_specs"] == [own.model_dump(mode="json")]
    assert {**untouched, "engine_specs": 0} == {**host.vars, "engine_specs": 0}


def test_devices_of_every_gpu_node_are_asked_as_if_efa_were_expected(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster(runtime={"device": "cpu"})
    crew = crew_of(spec, fleet, tmp_path)
    up(Made(spec), crew, memory)
    units = units_of(memory.record, crew)
    assert units is not None
    efa = NodeEfa(units)
    assert (efa.mocked, efa.why_not) == (
        False,
        "engines compute on CPUs here, and their KV goes over TCP",
    )
    assert efa.look() == {"prefill-0": 0, "decode-0": 0}
    rung = efa.judge({"prefill-0": -30, "decode-0": 0}, {"prefill-0": 100})
    assert (rung.verdict, rung.evidence) == (
        Verdict.FAILED,
        {"efa_bytes": 30, "pushed_bytes": 100},
    )
    fleet.silent["decode-0"] = 1
    with pytest.raises(UnreachableError):
        efa.look()


@pytest.mark.loopback
@pytest.mark.real_process
def test_engines_on_nodes_are_started_anew(fleet: Fleet, memory: Memory, tmp_path: Path) -> None:
    spec = cluster()
    crew = crew_of(spec, fleet, tmp_path)
    stage = with_fleet(Made(spec), crew, memory)
    units = units_of(memory.record, crew)
    assert units is not None
    answers = iter([200, 503, 503, 200])
    with Router(answers) as url:
        here = stage.planned.plan.outputs({}).model_copy(update={"url": url})
        units.renew(["decode-0"], here, Line(), timeout_s=10)
        restart = ("sudo", "-n", "systemctl", "restart", "kvdeploy-engine@decode-0.service")
        assert fleet.commands[-1] == ("decode-0", restart)
        assert next(answers, None) is None, "it was waited until the router had it again"


def test_a_node_is_examined_by_its_own_name_or_its_engines(
    fleet: Fleet, memory: Memory, tmp_path: Path
) -> None:
    spec = cluster()
    crew = crew_of(spec, fleet, tmp_path)
    up(Made(spec), crew, memory)
    units = units_of(memory.record, crew)
    assert units is not None
    assert [(s.what, s.found, s.needed, s.verdict) for s in examine_node(units, "prefill-0")] == [
        ("GPUs", "0", "8", "missing"),
        ("EFA devices", "0", "16", "missing"),
        ("driver", "no NVIDIA driver answers", "the fabric manager's", "missing"),
        ("memlock", "no engine has a unit here", "unlimited", "missing"),
        ("huge pages", "0 huge pages of 2 MiB, of 5128", "5128", "missing"),
        ("prefill-0", "absent", "active", "missing"),
    ]
    assert [s.what for s in examine_node(units, "router")] == ["router"]


# --- a bench ---------------------------------------------------------------------------------
class Reachable(Fleet):
    """Every port of it is that of one server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._port = int(url.rpartition(":")[2])

    @contextmanager
    def way(
        self, through: Host, targets: Sequence[tuple[str, int]]
    ) -> Iterator[Mapping[tuple[str, int], int]]:
        if UNREACHABLE.message in self.silent:
            raise UNREACHABLE
        yield dict.fromkeys(targets, self._port)


@pytest.mark.loopback
@pytest.mark.real_process
def test_a_bench_makes_no_node_and_has_other_engines_started_by_fleet_yml(
    memory: Memory, tmp_path: Path
) -> None:
    spec, store = cluster(), Store(tmp_path, "demo")
    with Router(itertools.repeat(200)) as url:
        fleet = Reachable(url)
        crew = crew_of(spec, fleet, tmp_path)
        up(Made(spec), crew, memory)
        done: Results = {n: stage.result for n, stage in memory.record.stages.items()}
        pipeline.up(
            [NodeFleetStage(crew)], memory.record, store=memory, progress=memory, given=done
        )
        record = memory.record.model_copy(update={"spec": spec})
        known = Up(
            record=record,
            spec=spec,
            model=ModelOutputs.model_validate(record.stages["model"].result),
            fleet=FleetOutputs.model_validate(record.stages["fleet"].result),
            vocabulary=1,
        )
        app = App(ui=Ui(err=io.StringIO()), root=tmp_path)
        ground = NodeGround(app, store, known, lambda s: crew_of(s, fleet, tmp_path))
        assert (ground.is_whole(), ground.holds()) == (True, True)

        plays = len(fleet.plays)
        ground.bring(spec, prove=False)
        assert len(fleet.plays) == plays, "it is what runs already"
        pull = spec.model_copy(
            update={"connector": spec.connector.model_copy(update={"mode": "pull"})}
        )
        borrowed = ground.bring(pull, prove=False)
        assert borrowed.router_config.mode == "pull"
        assert store.read(target="aws").spec == spec, "what was asked for is not forgotten"
        ground.bring(spec, prove=False)
        assert [p.playbook for p in fleet.plays[plays:]] == ["fleet.yml", "fleet.yml"]

        told = ground.describe()
        assert told["nodes"]["decode-0"]["role"] == "decode"
        assert (told["device"], told["flags"].keys()) == ("cuda", {"decode-0", "prefill-0"})
        with ground.reach(known.fleet) as here:
            (note,) = ground.notes(here)
        assert note.startswith("clients asked from here, through SSH to the router's node")

        fleet.generations["decode-0"] = "g2"
        assert not ground.holds(), "an engine was started since"
        fleet.silent[UNREACHABLE.message] = 1
        assert not ground.is_whole()
