"""Clusters that are up side by side on this host, each in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.stand import Cores, Processes, Site, find_ports, start_vllm_router
from kvdeploy.adapters.local.processes import Processes as Supervised
from kvdeploy.adapters.store import Store
from kvdeploy.model.catalog import CPU_BLOCK_TOKENS
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.planning.sizing import find_vocabulary
from kvdeploy.polling import wait_for
from kvdeploy.stages.bench_environment import describe_machine
from kvdeploy.stages.fleet import LocalFleetStage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from benchmarks.h200x2.arms import Arm
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Step

ROOT = Path(__file__).parents[2]
ALLOWED = ("--allow", "gpus-too-few", "--allow", "engine-env-taken")
"""Where engines share a GPU."""
UP_S = 900.0
GIB_LEFT = 4.0
"""Of a GPU's memory for each engine, beside weights and KV: context, graphs, activations."""
DECODE_OF_PAIR = 0.64
"""Of a pair's KV where both are on one GPU: decode holds prompts for as long as it answers."""


class UpError(Exception):
    """A cluster did not come up, or did not do what it was told."""


@dataclass
class Place:
    """What the engines of one host are given."""

    gpus: tuple[float, ...]
    """GiB of memory of each."""
    at_once: int
    """Clusters that are up together."""
    model: dict[str, Any]
    runtime: dict[str, Any]
    args: dict[str, Any]
    """Of all engines of all arms alike."""
    weights_gib: float = 0.0

    @property
    def shared(self) -> bool:
        """Whether both engines of a cluster are on one GPU."""
        return len(self.gpus) == 1

    def memory(self, role: str) -> tuple[float | None, dict[str, Any]]:
        """GiB of KV of an engine, and what vLLM is told of memory; nothing on CPUs."""
        if not self.gpus:
            return None, {}
        engines = self.at_once * (2 if self.shared else 1)
        each = 0.94 * min(self.gpus) / engines
        kv = each - self.weights_gib - GIB_LEFT
        if kv <= 0:
            msg = f"{engines} engines a GPU have no room for KV: fewer at once (--at-once)"
            raise UpError(msg)
        decode = DECODE_OF_PAIR if self.shared else 0.5
        kv *= 2 * (decode if role == "decode" else 1 - decode)
        return round(kv, 1), {"gpu-memory-utilization": round(each / min(self.gpus), 3)}


def build_cluster(arm: Arm, place: Place, port: int, name: str) -> dict[str, Any]:
    """The cluster file of an arm's engines."""
    fleets: dict[str, Any] = {}
    for role in ("prefill", "decode"):
        kv_gib, told = place.memory(role)
        args = {**told, **place.args, **arm.args, **(arm.decode_args if role == "decode" else {})}
        env = {"CUDA_VISIBLE_DEVICES": "0"} if place.shared else {}
        fleets[role] = {"kv_cache_gib": kv_gib, "engine_args": args, "env": {**env, **arm.env}}
    return {
        "name": name,
        "model": place.model,
        "fleet": fleets,
        "connector": _fit(arm.connector, place),
        "router": {"port": port, "mode_header": True, **arm.router},
        "runtime": place.runtime,
    }


@dataclass
class Cluster:
    """One set of engines with kvdeploy's router, and what is in front of it for stock."""

    arm: Arm
    place: Place
    folder: Path
    port: int
    router: dict[str, Any] = field(default_factory=dict)
    """As last told."""
    front: str = ""
    """Address of vllm-router."""
    under_way: subprocess.Popen[bytes] | None = None
    """The last `up`."""

    @property
    def name(self) -> str:
        return self.arm.engines

    @property
    def store(self) -> Store:
        return Store(self.folder, self.name)

    def begin(self) -> subprocess.Popen[bytes]:
        """`kvdeploy up`, under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = build_cluster(self.arm, self.place, self.port, self.name)
        document["router"] |= self.router
        (self.folder / "cluster.yaml").write_text(json.dumps(document, indent=1))
        allow = ALLOWED if self.place.shared else ()
        with (self.folder / "up.log").open("ab") as log:
            argv = (sys.executable, "-m", "kvdeploy", "up", *allow)
            self.under_way = subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log)
        return self.under_way

    def has_ports(self) -> bool:
        """Whether every process was given its ports: then the next cluster may look for its own."""
        return len(Supervised(self.store.processes).names()) >= 3

    def tell(self, router: Mapping[str, Any]) -> None:
        """Have the router work otherwise; engines go on. Raises UpError."""
        if self.router != router:
            self.router = dict(router)
            finish(self, self.begin())

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "kvdeploy", *argv)
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=UP_S
        )

    def outputs(self) -> FleetOutputs:
        """As clients of this arm reach it."""
        found = FleetOutputs.model_validate(self.store.read().stages["fleet"].result)
        return found.model_copy(update={"url": self.front}) if self.front else found

    def vocabulary(self) -> int:
        model = ModelOutputs.model_validate(self.store.read().stages["model"].result)
        return find_vocabulary(model.config)

    def renew(self, step: Step) -> None:
        """Decode anew, under an id that nobody knows."""
        record = self.store.read()
        assert record.spec is not None
        stage = LocalFleetStage(
            record.spec,
            Supervised(self.store.processes),
            root=self.folder,
            config_path=self.store.router_config,
        )
        stage.renew(FleetOutputs.model_validate(record.stages["fleet"].result), "decode", step)

    def describe(self, runner: Runner) -> dict[str, Any]:
        record = self.store.read()
        fleet = FleetOutputs.model_validate(record.stages["fleet"].result)
        return {
            "flags": {e.name: list(e.argv[3:]) for e in fleet.engines},
            "versions": record.stages["runtime"].result["versions"],
            "device": record.stages["runtime"].result["device"],
            "router": "vllm-router" if self.front else "kvdeploy",
            **describe_machine(fleet, runner),
        }


class Host:
    """Brings clusters up and down; `close` leaves nothing."""

    def __init__(self, folder: Path, place: Place, options: argparse.Namespace) -> None:
        self._folder, self.place, self._options = folder, place, options
        self.clusters: dict[str, Cluster] = {}
        self._routers = Processes(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.start_s: list[float] = []

    def bring(self, arms: Iterable[Arm]) -> None:
        """Exactly the engines of these arms. Raises UpError: what else came up stays."""
        wanted = {arm.engines: arm for arm in arms if arm.engines == arm.name}
        for name in [n for n in self.clusters if n not in wanted]:
            self._down(self.clusters.pop(name))
        began, under_way = time.monotonic(), []
        for name, arm in wanted.items():
            if name in self.clusters:
                continue
            (port,) = find_ports(1)
            cluster = Cluster(arm, self.place, self._folder / name, port)
            self.clusters[name] = cluster
            process = cluster.begin()
            under_way.append((cluster, process))
            wait_for(
                lambda c=cluster, p=process: c.has_ports() or p.poll() is not None or None,  # type: ignore[misc]
                timeout_s=UP_S,
            )
        failed = []
        for cluster, process in under_way:
            try:
                finish(cluster, process)
                self._face(cluster)
            except UpError as e:
                failed.append(str(e))
                self._down(self.clusters.pop(cluster.name))
        if under_way:
            self.start_s.append(time.monotonic() - began)
        if failed:
            raise UpError("; ".join(failed))

    def renew(self, cluster: Cluster, step: Step) -> None:
        """Its decode anew. A vllm-router before it as well: one that runs shuns for a minute what
        it has seen go.
        """
        cluster.renew(step)
        if cluster.front:
            self._routers.stop()
            self._face(cluster)

    def _face(self, cluster: Cluster) -> None:
        """Put vllm-router before a stock set-up."""
        if not (cluster.arm.stock and self._options.vllm_router):
            return
        config = FleetOutputs.model_validate(cluster.store.read().stages["fleet"].result)
        urls = {
            role: [e.url for e in config.router_config.engines if e.role == role]
            for role in ("prefill", "decode")
        }
        site = Site(urls["prefill"], urls["decode"], config.router_config.served_model)
        try:
            cluster.front = start_vllm_router(self._routers, self._options, site, Cores()).url
        except (OSError, SystemExit) as e:
            msg = f"vllm-router: {e}"
            raise UpError(msg) from e

    def _down(self, cluster: Cluster) -> None:
        if cluster.front:
            self._routers.stop()
        if cluster.under_way is not None and cluster.under_way.poll() is None:
            cluster.under_way.send_signal(signal.SIGINT)  # it holds the cluster until it ends
            cluster.under_way.wait(UP_S)
        done = cluster.run("down")
        if done.returncode:
            sys.stderr.write(f"{cluster.name}: down: {done.stderr[-500:]}\n")

    def close(self) -> None:
        self._routers.stop()
        for name in list(self.clusters):
            self._down(self.clusters.pop(name))


def _fit(connector: dict[str, Any], place: Place) -> dict[str, Any]:
    """On CPUs the smallest blocks are larger."""
    size = connector.get("block_size")
    if size is None or place.gpus:
        return connector
    return connector | {"block_size": max(size, CPU_BLOCK_TOKENS)}


def finish(cluster: Cluster, process: subprocess.Popen[bytes]) -> None:
    """Wait for an `up`. Raises UpError."""
    try:
        code = process.wait(UP_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        code = -1
    if code:
        tail = (cluster.folder / "up.log").read_text(errors="replace").splitlines()[-8:]
        msg = f"{cluster.name} did not come up ({code}): {' | '.join(tail)}"
        raise UpError(msg)


def search_path() -> str:
    """For programs of kvdeploy that run in other folders: it may not be installed here."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
