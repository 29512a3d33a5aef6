"""A real fleet for faults: two prefill and two decode engines and a router, supervised as by `up`.

Owns where each of them lives, a network namespace of its own, and how they are looked at and hurt.
What is started is what `kvdeploy up` starts; only addresses and limits differ.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from typing import TYPE_CHECKING

from benchmarks.faults.net import INTERFACE
from kvdeploy.adapters import specfile
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.model.launch import RestartPolicy
from kvdeploy.planning.launch import LOOPBACK, EnginePlace, divide_cores
from kvdeploy.proc import LocalRunner
from kvdeploy.router.gauges import KvGauges, parse_kv
from kvdeploy.stages.fleet import LocalFleetStage
from kvdeploy.stages.model import ModelStage
from kvdeploy.stages.runtime import RuntimeStage
from kvdeploy.ui import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.faults.net import Net
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.launch import EngineSlot
    from kvdeploy.stages.base import Results

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ENGINES = (*PREFILLS, *DECODES)
MEMBERS = (*ENGINES, "router")
TOTAL_S = 40.0
LEASE_S = 10.0
CLUSTER = f"""
name: faults
router:
  allow_anonymous: true
  port: 8000
  deadlines:
    {{connect_s: 3, prefill_s: 10, first_token_s: 10, inter_token_s: 10, total_s: {TOTAL_S}}}
connector: {{block_size: 32, lease_s: {LEASE_S}}}
fleet:
  prefill: {{count: 2}}
  decode: {{count: 2, kv_cache_gib: 0.0625}}
"""
"""Deadlines that a row lives to see, and a KV cache of 512 blocks that it can fill."""
RESTART = RestartPolicy(max_restarts=1000, window_s=0.1)
"""The benchmark kills more than a supervisor would put up with."""


class Fleet:
    def __init__(self, folder: Path, net: Net) -> None:
        self.net = net
        (folder / "cluster.yaml").write_text(CLUSTER)
        self._spec = specfile.load(
            folder / "cluster.yaml", overlays=[f"router.host={self.address('router')}"]
        ).spec
        self._folder = folder
        self.processes = Processes(folder / "processes")

    def address(self, name: str) -> str:
        return self.net.address(name)

    def up(self) -> None:
        """Until every pair is warm. Raises KvdeployError."""
        step, runner = Step("up"), LocalRunner()
        results: Results = {}
        for stage in (
            RuntimeStage(self._spec, runner, "cpu", self._folder),
            ModelStage(self._spec, runner, self._folder),
            _Spread(self, self._spec, self.processes, self._folder),
        ):
            results[stage.name] = stage.apply(results, step)

    def down(self) -> None:
        for name in self.processes.names():
            self.processes.stop(name)

    def url(self, name: str) -> str:
        spec = self.processes.spec(name)
        assert spec is not None
        return f"http://{self.address(name)}:{spec.ports[0]}"

    def look(self, name: str) -> KvGauges:
        """How full an engine is. Raises OSError."""
        found = parse_kv(fetch(f"{self.url(name)}/metrics"))
        assert found is not None, f"{name} does not tell how full it is"
        return found

    def pid(self, name: str) -> int:
        state = self.processes.observe(name).state
        assert state is not None
        assert state.pid is not None, f"{name} does not run"
        return state.pid

    def generation(self, name: str) -> str:
        state = self.processes.observe(name).state
        return state.generation if state else ""

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def restart(self, name: str) -> None:
        """As an operator does: it is asked to end, and comes back with a new generation."""
        os.kill(self.pid(name), signal.SIGTERM)

    def freeze(self, name: str, seconds: float) -> None:
        self.processes.pause(name)
        try:
            time.sleep(seconds)
        finally:
            self.processes.resume(name)

    def is_running(self) -> bool:
        """Whether every process answers its supervisor."""
        return all(self.processes.observe(name).phase == "ready" for name in MEMBERS)


class _Spread(LocalFleetStage):
    """The stage that `up` uses, with places of ours."""

    def __init__(self, fleet: Fleet, spec: ClusterSpec, processes: Processes, folder: Path) -> None:
        super().__init__(spec, processes, root=folder, config_path=folder / "router.json")
        self._fleet = fleet

    def _places(self, slots: Sequence[EngineSlot]) -> list[EnginePlace]:
        found = super()._places(slots)
        net = self._fleet.net
        cpus = divide_cores(len(slots), machine.cores())
        return [
            EnginePlace(
                host=net.address(slot.name),
                interface=INTERFACE,
                port=place.port,
                side_channel_port=place.side_channel_port,
                cpus=cpus[i],
            )
            for i, (slot, place) in enumerate(zip(slots, found, strict=True))
        ]

    def _plan(self, results: Results) -> FleetOutputs:
        plan = super()._plan(results)
        engines = tuple(self._settle(spec) for spec in plan.engines)
        return plan.model_copy(update={"engines": engines, "router": self._settle(plan.router)})

    def _settle(self, spec: LaunchSpec) -> LaunchSpec:
        """Into its namespace; its supervisor stays in the hub and looks at its ports there."""
        argv = (*self._fleet.net.enter(spec.name), *spec.argv)
        return spec.model_copy(update={"argv": argv, "host": LOOPBACK, "restart": RESTART})


def fetch(url: str, timeout_s: float = 5) -> str:
    """Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        text: str = answer.read().decode()
    return text


def wait(until: Callable[[], bool], timeout_s: float, every_s: float = 0.5) -> float | None:
    """Seconds that it took, or None."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if until():
            return round(time.monotonic() - began, 1)
        time.sleep(every_s)
    return None
