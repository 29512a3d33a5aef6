"""What `plan` says that `up` would do on nodes; benchmarks/rehearsal.py sees whether it does."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.errors import CheckError
from kvdeploy.forecast import foresee
from kvdeploy.model.infra import Action
from kvdeploy.model.record import StageRecord
from kvdeploy.pipeline import digest_of
from kvdeploy.planning.forecast import Forecast
from kvdeploy.planning.launch import engine_slots
from kvdeploy.stages.nodefleet import NodeFleetStage
from tests.unit.test_node_stages import Fleet, Made, Memory, cluster, crew_of, up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.model.inventory import Host
    from kvdeploy.model.spec import ClusterSpec

pytestmark = pytest.mark.real_process  # a router on loopback

LATER = ("configure", "model", "fleet", "proof")


class World:
    """A cluster that is up, and its forecast for another file."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root, self.fleet, self.memory = root, Fleet(), Memory()
        spec = small(**changes)
        for slot in engine_slots(spec):
            self.fleet.boots[slot.name], self.fleet.generations[slot.name] = "boot-1", "g1"
        crew = crew_of(spec, self.fleet, root)
        up(Made(spec), crew, self.memory)
        record = self.memory.record
        results: dict[str, Any] = {n: s.result for n, s in record.stages.items()}
        stage = NodeFleetStage(crew)
        digest = digest_of(stage.inputs(results))
        engines = {n: g for n, g in self.fleet.generations.items() if n != "router"}
        outputs = stage.outputs().model_copy(update={"generations": engines})
        known = StageRecord(digest=digest, result=outputs.model_dump(mode="json"))
        self.record = record.with_stage("fleet", known).with_stage("proof", known)

    def ahead(self, **changes: Any) -> Forecast:
        told = {key: Action(act) for key, act in changes.pop("instances", {}).items()}
        crew = crew_of(small(**changes), self.fleet, self.root)
        return foresee(self.record, crew, told, provision=bool(told))


def small(**changes: Any) -> ClusterSpec:
    aws = {"instance_type": "p5.4xlarge"} | changes.pop("aws", {})
    return cluster(aws=aws, **changes)


class Ready(BaseHTTPRequestHandler):
    """A router that says that every pair is warm."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(autouse=True)
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Behind every way through a node."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        @contextmanager
        def way(
            _fleet: Fleet, _through: Host, targets: Sequence[tuple[str, int]]
        ) -> Iterator[Mapping[tuple[str, int], int]]:
            yield dict.fromkeys(targets, server.server_port)

        monkeypatch.setattr(Fleet, "way", way)
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_before_there_is_anything_everything_is_made(tmp_path: Path) -> None:
    memory = Memory()
    crew = crew_of(small(), Fleet(), tmp_path)
    assert foresee(memory.record, crew, {}, provision=True) == Forecast(
        stages=("provision", *LATER),
        configure=("decode-0", "prefill-0", "router-0"),
        start=("decode-0", "prefill-0", "router"),
    )


def test_nodes_without_a_fleet_are_made_ready_and_all_of_it_started(tmp_path: Path) -> None:
    memory, fleet = Memory(), Fleet()
    crew = crew_of(small(), fleet, tmp_path)
    up(Made(small()), crew, memory, until="provision")
    everything = Forecast(
        stages=LATER,
        configure=("decode-0", "prefill-0", "router-0"),
        start=("decode-0", "prefill-0", "router"),
    )
    assert foresee(memory.record, crew, {}, provision=False) == everything
    fleet.generations = {}
    up(Made(small()), crew, memory)
    assert foresee(memory.record, crew, {}, provision=False) == Forecast(
        stages=("fleet", "proof"), start=("decode-0", "prefill-0", "router")
    )


def test_what_is_up_is_left_alone(world: World) -> None:
    assert world.ahead() == Forecast()


def test_one_decode_more_touches_no_other_engine(world: World) -> None:
    assert world.ahead(
        fleet={"decode": {"count": 2}}, instances={"decode-1": "create"}
    ) == Forecast(
        stages=("provision", *LATER),
        configure=("decode-1",),
        start=("decode-1",),
        reload=("router",),
    )


def test_one_decode_less_ends_that_engine_alone(tmp_path: Path) -> None:
    world = World(tmp_path, fleet={"decode": {"count": 2}})
    assert world.ahead(instances={"decode-1": "destroy"}) == Forecast(
        stages=("provision", *LATER), stop=("decode-1",), reload=("router",)
    )


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        (
            {"connector": {"block_size": 32}},
            Forecast(
                stages=("fleet", "proof"), restart=("decode-0", "prefill-0"), reload=("router",)
            ),
        ),
        (
            {"router": {"queue_size": 7}},
            Forecast(stages=("fleet", "proof"), reload=("router",)),
        ),
        (
            {"router": {"port": 9000}},
            Forecast(stages=("fleet", "proof"), restart=("router",)),
        ),
        (
            {"model": {"id": "org/other", "served_name": "m"}},
            Forecast(
                stages=LATER, configure=("decode-0", "prefill-0"), restart=("decode-0", "prefill-0")
            ),
        ),
        (
            {"aws": {"node_variables": {"efa_url": "http://other"}}},
            Forecast(stages=LATER, configure=("decode-0", "prefill-0", "router-0")),
        ),
    ],
)
def test_a_change_is_told_with_all_it_does_and_no_more(
    tmp_path: Path, changes: dict[str, Any], ahead: Forecast
) -> None:
    world = World(tmp_path, model={"id": "org/m", "served_name": "m"})
    told = {"model": {"id": "org/m", "served_name": "m"}} | changes
    assert world.ahead(**told) == ahead


def test_another_pin_makes_environments_anew_and_restarts_engines(tmp_path: Path) -> None:
    lock = tmp_path / "mine.txt"
    lock.write_text("vllm==0.32.0\nnixl==1.3.2\n")
    told = {"aws": {"node_variables": {"vllm_lock": "mine.txt"}}}
    world = World(tmp_path, **told)
    lock.write_text("# of today\nvllm==0.32.0\nnixl==1.3.2\n")
    assert world.ahead(**told).restart == ()
    lock.write_text("vllm==0.32.0\nnixl==1.3.3\n")  # the same name, another content
    ahead = world.ahead(**told)
    assert ahead.restart == ("decode-0", "prefill-0")
    assert ahead.configure == ("decode-0", "prefill-0")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    crew = crew_of(small(aws={"node_variables": {"vllm_lock": "none"}}), Fleet(), tmp_path)
    with pytest.raises(CheckError) as caught:
        crew.files()
    assert caught.value.message == (
        f"aws.node_variables.vllm_lock: there is no file {tmp_path / 'none'}"
    )


def test_a_node_made_anew_restarts_what_runs_on_it(world: World) -> None:
    assert world.ahead(instances={"decode-0": "replace"}) == Forecast(
        stages=("provision", *LATER),
        configure=("decode-0",),
        restart=("decode-0",),
        reload=("router",),
    )


def test_the_routers_node_made_anew_touches_no_engine(tmp_path: Path) -> None:
    told = {"router": {"host": "0.0.0.0", "allow_anonymous": True}}
    assert World(tmp_path, **told).ahead(instances={"router-0": "replace"}, **told) == Forecast(
        stages=("provision", *LATER), configure=("router-0",), restart=("router",)
    )


def test_an_engine_that_ended_is_started_and_one_that_came_back_looked_at(world: World) -> None:
    world.fleet.generations["prefill-0"] = "g2"
    assert world.ahead() == Forecast(stages=("fleet", "proof"))
    del world.fleet.generations["decode-0"]
    assert world.ahead() == Forecast(stages=("fleet", "proof"), start=("decode-0",))


def test_a_node_that_was_started_again_is_made_ready_again(world: World) -> None:
    world.fleet.boots["decode-0"] = "boot-2"
    world.fleet.generations["decode-0"] = "g2"
    assert world.ahead() == Forecast(stages=LATER, configure=("decode-0",))


def test_what_does_not_answer_is_told_as_not_known(world: World) -> None:
    world.fleet.silent["decode-0"] = 2
    ahead = world.ahead()
    assert (ahead.silent, ahead.start, ahead.restart) == (("decode-0",), (), ())
    assert ahead.configure == ("decode-0",)


def test_other_keys_are_read_by_the_router_that_runs(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    told = {"router": {"api_key_file": "keys"}}
    world = World(tmp_path, **told)
    (tmp_path / "keys").write_text("two\n")
    assert world.ahead(**told) == Forecast(stages=("fleet",), reload=("router",))
