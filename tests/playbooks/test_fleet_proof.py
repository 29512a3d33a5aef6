"""The real vLLM and NIXL under the real units: prefill on one host, decode on another, the router
on a third, KV pushed over the bridge between them, and kvdeploy's own proof as the judge.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.adapters.http import get
from kvdeploy.adapters.local import runtime
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.model import layout
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.model.reports import PUSHED
from kvdeploy.polling import wait_for
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.proof import raise_unless_proven
from kvdeploy.stages.smoke import Smoke
from tests.playbooks.fleets import WHEELS_AT, Fleet, prepare, shown, state, wheelhouse

if TYPE_CHECKING:
    from kvdeploy.model.reports import SmokeReport
    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs

pytestmark = pytest.mark.e2e

ROLES: Final[dict[str, Any]] = {
    "prefill-0": "prefill",
    "decode-0": "decode",
    "router-0": "router",
}
SITE_AT: Final = "/opt/vllm-site"
MODEL_AT: Final = "/opt/model"
GUEST_PYTHON: Final = (3, 11)
RUNTIME: Final = f"""
set -e
home={layout.ROOT}/runtimes/real
site=$home/lib/python{GUEST_PYTHON[0]}.{GUEST_PYTHON[1]}/site-packages
mkdir -p $home/bin $site
ln -s /usr/bin/python3 $home/bin/python
printf 'home = /usr/bin\\ninclude-system-site-packages = false\\n' >$home/pyvenv.cfg
echo 'import site; site.addsitedir("{SITE_AT}")' >$site/bound.pth
cat >$site/tiles.pth
ln -sfn runtimes/real {layout.RUNTIME}
"""
"""A virtual environment of the host's own Python around the packages of this machine's runtime."""
PAIRS_S: Final = 120
START_S: Final = 600
"""An engine's own bound; half a minute on two idle cores."""


class Quiet:
    def update(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def fleet(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    if sys.version_info[:2] != GUEST_PYTHON:
        pytest.skip(f"this Python's runtime cannot be lent to hosts with Python {GUEST_PYTHON}")
    built = Path(runtime.build("cpu", LocalRunner(), lambda _: None).python)
    site = next(built.parent.parent.glob("lib/python*/site-packages"))
    folder = ensure_tiny_model(runtime.cache_dir() / "models", seed=0)
    binds = {site: Path(SITE_AT), folder: Path(MODEL_AT), wheelhouse(): Path(WHEELS_AT)}
    lab = labs(*ROLES, hardware="none", binds=binds).lab
    tiles = (resources.files("kvdeploy.probes") / "tiles.pth").read_text()
    for host in lab.hosts:
        prepare(host)
        assert host.run("bash", "-c", RUNTIME, input_text=tiles).returncode == 0
    fleet = Fleet(
        lab=lab,
        folder=tmp_path_factory.mktemp("proof"),
        roles=ROLES,
        spec={
            "model": {"id": "builtin:tiny"},
            "router": {"host": "0.0.0.0", "api_key_file": "keys"},
        },
        model=ModelOutputs(
            path=MODEL_AT,
            served_name="tiny",
            config=json.loads((folder / "config.json").read_text()),
            dtype="float32",
        ),
        cores={"prefill-0": (0,), "decode-0": (1,)},
        api_keys=("key-of-ann",),
    )
    # Its environment is made while the cores are idle: engines keep them busy.
    fleet.run("fleet.yml", "router")
    return fleet


def received(host: Host) -> int:
    """Bytes that have come over its network interface."""
    return int(host.read("/sys/class/net/eth0/statistics/rx_bytes"))


def prove(fleet: Fleet) -> SmokeReport:
    """One push over the pair, judged as `kvdeploy up` judges it."""
    url = f"{fleet.plan.url}/ready?complete=1"
    ready = wait_for(lambda: get(url, timeout_s=5).status == 200 or None, timeout_s=PAIRS_S)
    assert ready, get(url, timeout_s=5).body
    keys = fleet.folder / "keys"
    keys.write_text("\n".join(fleet.api_keys))
    outputs = fleet.plan.outputs({}, api_key_file=str(keys))
    report = Smoke(fleet.cluster, fleet.model, outputs, None, Quiet()).prove()
    raise_unless_proven(report)
    return report


def test_kv_is_pushed_between_hosts_and_a_killed_engine_comes_back_and_stop_leaves_nothing(
    fleet: Fleet,
) -> None:
    prefill, decode, _router = fleet.lab.hosts
    fleet.run("fleet.yml")
    before = received(decode)
    report = prove(fleet)
    (pushed,) = [rung for rung in report.rungs if rung.rung == PUSHED]
    moved = int(pushed.message.split()[0].replace(",", ""))
    assert received(decode) - before > moved > 0

    # Each engine is where it was put, all its threads.
    for host, core in ((prefill, "0"), (decode, "1")):
        unit = f"kvdeploy-engine@{host.name}.service"
        group = shown(host, unit, "ControlGroup")
        lists = host.must(
            "bash",
            "-c",
            f"for p in $(cat '/sys/fs/cgroup{group}/cgroup.procs'); do "
            "grep -h Cpus_allowed_list /proc/$p/task/*/status; done",
        )
        assert {line.split()[1] for line in lists.splitlines()} == {core}, host.name

    # Killed, it comes back under another id, and the router finds it by itself.
    unit = "kvdeploy-engine@decode-0.service"
    generation = decode.read("/run/kvdeploy/decode-0.generation")
    decode.must("kill", "-9", shown(decode, unit, "MainPID"))

    def back() -> bool | None:
        found = decode.run("cat", "/run/kvdeploy/decode-0.generation").stdout
        return (found not in ("", generation) and state(decode, unit) == "active") or None

    assert wait_for(back, timeout_s=START_S, interval_s=0.5)
    prove(fleet)

    fleet.run("stop.yml")
    for host in fleet.lab.hosts:
        names = host.must("ps", "-e", "-o", "comm=").split()
        assert not [n for n in names if "VLLM" in n or n.startswith("python")], host.name
