"""The whole path of `target: aws` once, from `kvdeploy up` to `down`: real Terraform against a
double of AWS, real playbooks over real SSH, real engines that push, and nothing left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest

from kvdeploy.model import layout
from kvdeploy.polling import wait_for
from tests.hostlab import net
from tests.rehearsal.conftest import ready_or_skip
from tests.rehearsal.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hostlab.guest import Host

pytestmark = [pytest.mark.real_process, pytest.mark.e2e]

NOTHING_S: Final = 15
"""How long an `up` may take that has nothing to do."""
FIRST_UP_S: Final = 580


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    ready_or_skip()
    with World(tmp_path_factory.mktemp("rehearsal")) as made:
        yield made


def said(world: World, *argv: str, code: int = 0, timeout_s: float = 120) -> Any:
    done = world.kvdeploy(*argv, "--json", timeout_s=timeout_s)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{world.trouble}"
    return json.loads(done.stdout)


def host_of(world: World, address: str) -> Host:
    return next(h for h in world.hosts.values() if h.address == address)


def followed(world: World) -> None:
    """`logs -f` of all processes says something of each, and leaves nothing behind after Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvdeploy", "logs", "-f", "-n", "3"],
        cwd=world.root,
        env=world.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        too_long = threading.Timer(60, run.kill)
        too_long.start()
        waiting = {"prefill-0", "decode-0", "router"}
        for line in run.stdout:
            waiting.discard(line.partition(" | ")[0])
            if not waiting:
                break
        too_long.cancel()
        assert waiting == set()
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
    assert [c.name() for c in children] == ["ssh"] * 3
    assert psutil.wait_procs(children, timeout=10)[1] == []


def assert_lower_rungs(rungs: list[dict[str, Any]]) -> None:
    """All of them were climbed, over SSH, and none that is about hardware counts as proof."""
    pair, gpu_nodes = "prefill-0/decode-0", ("decode-0", "prefill-0")
    found = {(r["rung"], r["subject"]): r for r in rungs}
    node = ("node", "node/driver", "node/memlock", "node/huge-pages", "fabric")
    mocked = {(rung, subject) for rung in node for subject in gpu_nodes}
    mocked |= {("fabric/rails", pair), ("spec", "account")}
    mocked |= {(f"write/{shape}", pair) for shape in ("small", "many", "large")}
    assert {key for key, r in found.items() if r["verdict"] == "mocked"} == mocked
    assert found["spec", "cluster file"]["verdict"] == "passed"

    driver = found["node/driver", "prefill-0"]["evidence"]
    assert driver["driver"] == driver["fabric_manager"] != ""
    assert found["node/memlock", "prefill-0"]["evidence"]["prefill-0"]["unit"] == "infinity"
    assert len(found["fabric", "decode-0"]["evidence"]["domains"]) == 16
    assert len(found["fabric/rails", pair]["evidence"]["microseconds"]) == 16
    large = found["write/large", pair]["evidence"]
    assert (large["wrote"]["bytes"], large["wrote"]["backend"]) == (2**26, "UCX")
    assert (large["found"]["pieces"], large["found"]["wrong"]) == (2**14, 0)


def killed_in_a_control(world: World, decode: Host) -> None:
    """`kill -9` of a smoke that has put other engines in their units: the next `up` cures it."""
    file = f"{layout.ETC}/engines/decode-0.json"
    assert "NixlPushConnector" in decode.must("cat", file)
    with subprocess.Popen(
        [sys.executable, "-m", "kvdeploy", "smoke", "--restart"],
        cwd=world.root,
        env=world.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        pulls = wait_for(
            lambda: "NixlConnector" in decode.must("cat", file) or None,
            timeout_s=120,
            interval_s=0.5,
        )
        run.kill()
    assert pulls
    assert said(world, "up", "--yes", timeout_s=300)["done"] == ["fleet", "proof"]
    assert "NixlPushConnector" in decode.must("cat", file)


def folder_of(world: World) -> Path:
    return world.root / ".kvdeploy/rehearsal"


def test_the_whole_path(world: World) -> None:
    up = said(world, "up", "--yes", timeout_s=FIRST_UP_S)
    assert up["done"] == ["provision", "configure", "model", "fleet", "proof"]
    addresses = {name: node["private_ip"] for name, node in up["nodes"].items()}
    assert {h.address for h in world.hosts.values()} == set(addresses.values())

    # The engines are where Terraform said, and run under systemd.
    prefill = host_of(world, addresses["prefill-0"])
    unit = "kvdeploy-engine@prefill-0.service"
    assert prefill.must("systemctl", "is-active", unit).strip() == "active"

    status = said(world, "status")
    assert (status["target"], status["whole"]) == ("rehearsal", True)
    assert {p["name"]: p["state"] for p in status["processes"]} == dict.fromkeys(
        ("prefill-0", "decode-0", "router"), "active"
    )

    began = time.monotonic()
    assert said(world, "up", "--yes")["done"] == []
    assert time.monotonic() - began < NOTHING_S

    smoke = said(world, "smoke", timeout_s=300)
    verdicts = {(r["rung"], r["subject"]): r["verdict"] for r in smoke["rungs"]}
    assert (smoke["target"], smoke["proven"]) == ("rehearsal", True)
    assert verdicts["pushed", "prefill-0/decode-0"] == "passed"
    assert verdicts["control", "prefill stopped"] == "passed"
    assert_lower_rungs(smoke["rungs"])
    assert verdicts["efa", "prefill-0"] == "not applicable"
    assert verdicts["control", "decode in pull mode"] == "not run"
    killed_in_a_control(world, host_of(world, addresses["decode-0"]))

    logs = world.kvdeploy("logs", "decode-0", "-n", "5")
    assert (logs.returncode, len(logs.stdout.splitlines())) == (0, 5), logs.stderr
    followed(world)
    shell = world.kvdeploy("shell", "router-0", "hostname", "-I")
    assert shell.stdout.split() == [addresses["router-0"]], shell.stderr

    # An engine that died comes back by itself under another id: it is looked at and proven again.
    before = {p["name"]: p["generation"] for p in said(world, "status")["processes"]}
    pid = prefill.must("systemctl", "show", "--value", "-p", "MainPID", unit).strip()
    prefill.must("kill", "-9", pid)
    again = said(world, "up", "--yes", timeout_s=300)
    assert again["done"] == ["fleet", "proof"]
    after = {p["name"]: p["generation"] for p in said(world, "status")["processes"]}
    assert {n for n in before if before[n] != after[n]} == {"prefill-0"}

    # `down` ends everything although a node does not answer any more.
    prefill.kill()
    down = said(world, "down", "--yes", timeout_s=300)
    assert down["left"] == []
    assert world.double.instances() == []
    left = {i: t for kind in world.double.resources().values() for i, t in kind.items()}
    assert [i for i, tags in left.items() if any("kvdeploy" in w for w in (i, *tags))] == []
    assert not (folder_of(world) / "id").exists()


def test_a_world_that_ended_leaves_nothing_here(world: World) -> None:
    place, double = world.lab.place, world.double.pid
    world.close()
    assert not place.record.exists()
    assert place.bridge not in {p.bridge for p in net.places()}
    assert net.started(double) is None
