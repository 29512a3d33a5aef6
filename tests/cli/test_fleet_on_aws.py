"""The commands about a running fleet, where there is none to be asked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import App, main
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs
from kvdeploy.model.record import Record
from kvdeploy.model.routing import Connector, Engine, RouterConfig
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path

AWS = ClusterSpec.model_validate(
    {"name": "demo", "target": "aws", "aws": {"region": "us-west-2", "zone": "us-west-2a"}}
)


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(argv, app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


@pytest.fixture
def provisioned(tmp_path: Path) -> Path:
    """A cluster whose nodes were never configured."""
    store = Store(tmp_path, "demo")
    store.terraform.mkdir(parents=True)
    store.write(Record(cluster="demo", target="aws", spec=AWS))
    (tmp_path / "cluster.yaml").write_text(
        "name: demo\ntarget: aws\naws: {region: us-west-2, zone: us-west-2a}\n"
    )
    return tmp_path


def test_a_shell_wants_nodes_that_are_configured(provisioned: Path) -> None:
    assert run(provisioned, "shell", "decode-0") == (
        9,
        "error: cluster 'demo' has no nodes that are configured\n  try: Run 'kvdeploy up' first.\n",
    )


def test_a_fleet_that_was_started_otherwise_is_asked_over_the_ways_that_are_there() -> None:
    other = fleet_at("https://10.0.0.3:8000", "http://10.0.0.2:18100", mode="pull")
    ways = {"decode-0": "http://127.0.0.1:4001"}
    reached = other.asked_over("http://127.0.0.1:4000", ways)
    assert reached.url == "http://127.0.0.1:4000"
    (engine,) = reached.router_config.engines
    assert (engine.url, engine.side_channel_host) == ("http://127.0.0.1:4001", "10.0.0.2")
    assert reached.router_config.mode == "pull"
    assert reached.generations == other.generations


def fleet_at(url: str, engine_url: str, *, mode: Connector) -> FleetOutputs:
    engine = Engine(name="decode-0", role="decode", url=engine_url, side_channel_host="10.0.0.2")
    ready = Readiness(url=url, timeout_s=1)
    return FleetOutputs(
        url=url,
        engines=(),
        router=LaunchSpec(name="router", role="router", argv=("x",), ready=ready),
        router_config=RouterConfig(
            host="10.0.0.3", port=8000, served_model="m", mode=mode, engines=(engine,)
        ),
        generations={"decode-0": mode},
    )


def test_so_does_a_look_at_one(provisioned: Path) -> None:
    assert run(provisioned, "doctor", "--node", "decode-0")[0] == 9


def test_logs_say_where_earlier_ones_are(
    provisioned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(provisioned, "logs", "decode-0")[0] == 0
    runs = Store(provisioned, "demo").runs
    assert capsys.readouterr().err == f"demo: no fleet is up; earlier runs are in {runs}\n"
    assert run(provisioned, "logs", "decode-0", "--supervisor")[0] == 2


def test_smoke_wants_a_fleet(provisioned: Path) -> None:
    code, said = run(provisioned, "smoke")
    assert code == 9
    assert said.startswith("error: cluster 'demo' is not up: there is nothing to prove\n")


def test_so_does_a_bench(provisioned: Path) -> None:
    assert run(provisioned, "bench", "--quick") == (
        9,
        "error: cluster 'demo' is not up: there is nothing to measure\n"
        "  try: Run 'kvdeploy up' first.\n",
    )


def test_a_local_cluster_has_no_nodes(tmp_path: Path) -> None:
    assert run(tmp_path, "shell", "decode-0") == (
        4,
        "error: cluster 'local' has no nodes: its processes run on this machine\n"
        "  try: 'kvdeploy status' names them.\n",
    )
    assert run(tmp_path, "doctor", "--node", "decode-0")[0] == 2
