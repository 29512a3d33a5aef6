"""`kvdeploy smoke` around its climb: what is refused, and what is kept."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from kvdeploy.adapters.store import Store, write_text
from kvdeploy.cli.app import App, main
from kvdeploy.cli.restarting import Restarting
from kvdeploy.errors import FleetError
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.model.record import Record, StageRecord
from kvdeploy.model.routing import RouterConfig
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.ui import Ui
from tests.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.stages.base import Results, Stage, Step

SPEC = ClusterSpec.model_validate({"name": "demo"})


def launch(name: str, role: Any) -> LaunchSpec:
    return LaunchSpec(name=name, role=role, argv=("x",), ready=Readiness(url="x", timeout_s=1))


def outputs(mode: Any = "push") -> FleetOutputs:
    return FleetOutputs(
        url="http://127.0.0.1:1",
        engines=(launch("decode-0", "decode"),),
        router=launch("router", "router"),
        router_config=RouterConfig(
            host="127.0.0.1", port=1, served_model="tiny", mode=mode, engines=()
        ),
        generations={"decode-0": "g1"},
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of a cluster that was up, and whose processes are gone."""
    store = Store(tmp_path, "demo")
    write_text(tmp_path / "cluster.yaml", "name: demo\n")
    model = ModelOutputs(path="/m", served_name="tiny", config={})
    found: dict[str, Any] = {"model": model, "fleet": outputs()}
    stages = {
        name: StageRecord(digest=f"of {name}", result=value.model_dump(mode="json"))
        for name, value in found.items()
    }
    stages["proof"] = StageRecord(digest="of proof", result={})
    store.write(Record(cluster="demo", spec=SPEC, stages=stages))
    return store


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(argv, app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


# --- --junit ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "why"),
    [("cluster.yaml/smoke.xml", "its folder is a file"), (".", "Is a directory")],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_climb(
    store: Store, name: str, why: str
) -> None:
    code, err = run(store.root, "smoke", "--junit", name)
    assert (code, err) == (
        4,
        f"error: --junit: {store.root / name} cannot be written: {why}\n"
        "  try: Name a file in a folder that may be written to.\n",
    )
    assert not store.runs.exists()


def test_a_climb_that_does_not_end_leaves_no_green_report_of_another(store: Store) -> None:
    report = store.root / "smoke.xml"
    report.write_text("<testsuites tests='1' failures='0'/>")
    code, err = run(store.root, "smoke", "--junit", "smoke.xml")
    assert (code, "is not whole" in err) == (9, True)
    (error,) = ET.parse(report).getroot().iter("error")
    assert error.get("message") == "the climb did not come to its end"


# --- engines that are started otherwise ------------------------------------------------------
class World:
    """Stages `fleet` and `proof`, whatever starts engines, and the screen."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.breaks = ""

    def stages(self, spec: ClusterSpec) -> Sequence[Stage]:
        return (Done("fleet", spec, self), Done("proof", spec, self))

    def start(self, engines: Sequence[LaunchSpec], _step: Step) -> None:
        self.done.append(f"start {', '.join(e.name for e in engines)}")
        if self.breaks:
            raise FleetError(self.breaks)

    @contextmanager
    def step(self, _title: str) -> Iterator[Step]:
        yield Line()


class Done:
    title = "do it"

    def __init__(self, name: str, spec: ClusterSpec, world: World) -> None:
        self.name, self._spec, self._world = name, spec, world

    def inputs(self, results: Results) -> Mapping[str, Any]:
        assert "model" in results
        return {"mode": self._spec.connector.mode}

    def holds(self, _result: Mapping[str, Any]) -> bool:
        return True

    def apply(self, _results: Results, _step: Step) -> Mapping[str, Any]:
        mode = self._spec.connector.mode
        self._world.done.append(f"{self.name} {mode}")
        return outputs(mode).model_dump(mode="json") if self.name == "fleet" else {}


@pytest.fixture
def world() -> World:
    return World()


def restarting(store: Store, world: World) -> Restarting:
    return Restarting(
        App(ui=Ui(err=io.StringIO())),
        store,
        store.read(),
        SPEC,
        stages=world.stages,
        start=world.start,
    )


def digests(store: Store) -> dict[str, str]:
    return {name: stage.digest for name, stage in store.read().stages.items()}


def test_before_an_engine_is_touched_the_record_says_that_nothing_is_proven(
    store: Store, world: World
) -> None:
    world.breaks = "killed here"
    with pytest.raises(FleetError, match="killed here"):
        restarting(store, world).spoil([launch("decode-0", "decode")], Line())
    assert digests(store) == {"model": "of model", "fleet": ""}
    assert store.read().stages["fleet"].result == outputs().model_dump(mode="json")
    assert store.read().spec == SPEC


def test_what_is_restored_is_the_cluster_files_own_and_proven(store: Store, world: World) -> None:
    there = restarting(store, world)
    there.spoil([launch("decode-0", "decode")], Line())
    assert there.restore() == outputs()
    assert world.done == ["start decode-0", "fleet push", "proof push"]
    assert digests(store).keys() == {"model", "fleet", "proof"}
    assert digests(store)["fleet"] != ""


def test_a_fleet_that_pulls_is_brought_and_left_again(store: Store, world: World) -> None:
    there = restarting(store, world)
    assert there.serve_pull().router_config.mode == "pull"
    assert store.read().spec == SPEC, "a killed run must not make the cluster one that pulls"
    assert there.restore().router_config.mode == "push"
    assert world.done == ["fleet pull", "proof pull", "fleet push", "proof push"]
