"""Stage `fleet` on this machine: engines and router as supervised processes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy import __version__
from kvdeploy.adapters import http
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.store import write_text
from kvdeploy.errors import FleetError, SpecError
from kvdeploy.model.catalog import ENGINE_PORT_BASE, SIDE_CHANNEL_PORT_BASE
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.planning import launch
from kvdeploy.polling import wait_for
from kvdeploy.router import reading
from kvdeploy.stages.asking import pairs_ready, wait_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.adapters.local.processes import Observed, Processes
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.launch import EnginePlace
    from kvdeploy.stages.base import Results, Step

RELOAD_TIMEOUT_S: Final = 10.0
LOG_PREFIX: Final = re.compile(r"^(\(.*?\) )?([A-Z]+ )?[\d-]+ [\d:.]+ (\[.*?\] )?")
"""What vLLM puts before each line: process, level, time, place in the source."""


class LocalFleetStage:
    name = "fleet"
    title = "start the fleet"

    def __init__(
        self, spec: ClusterSpec, processes: Processes, *, root: Path, config_path: Path
    ) -> None:
        self._spec, self._processes = spec, processes
        self._root, self._config_path = root, config_path

    def inputs(self, results: Results) -> Mapping[str, Any]:
        return {
            "kvdeploy": __version__,  # another one may start the same fleet in another way
            "spec": self._spec.model_dump(include={"name", "fleet", "connector", "router"}),
            "model": self._spec.model.model_dump(exclude={"id", "revision"}),
            "runtime": dict(results["runtime"]),
            "weights": dict(results["model"]),
        }

    def holds(self, result: Mapping[str, Any]) -> bool:
        fleet = FleetOutputs.model_validate(result)
        if not self.is_whole(fleet):
            return False
        # Restarted since: look at it, and prove it, again.
        return fleet.generations == self._generations(fleet)

    def is_whole(self, fleet: FleetOutputs) -> bool:
        """Whether exactly these processes run, all are ready, and every pair is warm."""
        wanted = (*fleet.engines, fleet.router)
        if {s.name for s in wanted} != set(self._processes.names()):
            return False
        for spec in wanted:
            seen = self._processes.observe(spec.name)
            if not self._processes.runs(spec) or seen.phase != "ready":
                return False
        return self._is_told(fleet) and pairs_ready(fleet)

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        plan = self._plan(results)
        started: list[str] = []
        try:
            wanted = (*plan.engines, plan.router)
            write_text(self._config_path, plan.router_config.model_dump_json(indent=2) + "\n")
            if self._processes.runs(plan.router):
                self._tell_router(plan, step)  # before engines go that it may still use
            for stray in sorted(set(self._processes.names()) - {s.name for s in wanted}):
                step.update(f"stopping {stray}, which is no longer asked for")
                self._processes.forget(stray)
            for spec in wanted:
                if self._processes.observe(spec.name).frozen:
                    step.update(f"thawing {spec.name}")  # a smoke was killed in its control
                    self._processes.resume(spec.name)
                if not self._processes.runs(spec):
                    step.update(f"starting {spec.name}")
                    started.append(spec.name)
                    self._processes.start(spec)
            self.wait_ready(wanted, step)
            self._tell_router(plan, step)
            self._wait_pairs(plan, step)
        except BaseException:
            # Nothing half-started is left; what ran before this run still runs.
            for name in started:
                with suppress(FleetError):  # the first error is the one to tell
                    self._processes.stop(name)
            raise
        return plan.model_copy(update={"generations": self._generations(plan)}).model_dump()

    def renew(self, fleet: FleetOutputs, role: str, step: Step) -> None:
        """Start every engine of a role anew, and wait until the router has it again.

        Raises:
            FleetError: one does not come back.
        """
        for spec in fleet.engines:
            if spec.role == role:
                step.update(f"starting {spec.name} anew")
                self._processes.start(spec)
        self.wait_ready((*fleet.engines, fleet.router), step)
        self._wait_pairs(fleet, step)

    def _plan(self, results: Results) -> FleetOutputs:
        spec = self._spec
        runtime = RuntimeOutputs.model_validate(results["runtime"])
        model = ModelOutputs.model_validate(results["model"])
        slots = launch.engine_slots(spec)
        engines = tuple(
            launch.build_engine(spec, slot, place, runtime, model)
            for slot, place in zip(slots, self._places(slots), strict=True)
        )
        keys, tls = spec.router.api_key_file, spec.router.tls_files
        config = launch.build_router_config(
            spec,
            engines,
            model,
            api_key_file=self._find(keys) if keys else None,
            tls=(self._find(tls[0]), self._find(tls[1])) if tls else None,
        )
        pythonpath = os.environ.get("PYTHONPATH")
        router = launch.build_router(
            config,
            python=sys.executable,
            config_path=str(self._config_path),
            version=__version__,
            env={"PYTHONPATH": pythonpath} if pythonpath else {},
        )
        return FleetOutputs(
            url=launch.router_url(config),
            engines=engines,
            router=router,
            router_config=config,
            generations={},
        )

    def _find(self, named: str) -> str:
        """A file that the cluster file names."""
        return str(self._root / Path(named).expanduser())

    def _places(self, slots: Sequence[launch.EngineSlot]) -> list[EnginePlace]:
        """Ports, cores and GPUs. An engine that ran keeps its ports while it can."""
        cpus = launch.divide_cores(len(slots), machine.cores())
        gpus = launch.divide_gpus(slots)
        known = {slot.name: self._kept_ports(slot) for slot in slots}
        taken = {p for ports in known.values() for p in ports or ()} | self._spec.router.ports
        taken |= self._processes.ports_of_others()
        places = []
        for i, slot in enumerate(slots):
            ports = known[slot.name]
            if ports is None:
                port = next(machine.free_ports(ENGINE_PORT_BASE, avoid=taken))
                side = self._free_range(slot.fleet.data_parallel, taken | {port})
                ports = (port, *range(side, side + slot.fleet.data_parallel))
                taken |= set(ports)
            places.append(
                launch.EnginePlace(
                    port=ports[0], side_channel_port=ports[1], cpus=cpus[i], gpus=gpus[i]
                )
            )
        return places

    def _kept_ports(self, slot: launch.EngineSlot) -> tuple[int, ...] | None:
        spec = self._processes.spec(slot.name)
        if spec is None or len(spec.ports) != 1 + slot.fleet.data_parallel:
            return None
        if self._spec.router.ports & {*spec.ports}:
            return None
        alive = bool(self._processes.observe(slot.name).pids)
        if alive or all(machine.port_is_free(p) for p in spec.ports):
            return spec.ports
        return None

    @staticmethod
    def _free_range(length: int, taken: set[int]) -> int:
        """First port of `length` free ones in a row."""
        run: list[int] = []
        for port in machine.free_ports(SIDE_CHANNEL_PORT_BASE, avoid=taken):
            run = [*run, port] if run and port == run[-1] + 1 else [port]
            if len(run) == length:
                return run[0]
        msg = f"no {length} free ports in a row above {SIDE_CHANNEL_PORT_BASE}"
        raise FleetError(msg, hint="'kvdeploy doctor' shows what listens here.")

    def wait_ready(self, specs: Sequence[LaunchSpec], step: Step) -> None:
        """Until all are. Raises FleetError, with the last lines of one that is not."""

        def look() -> bool | None:
            waiting = []
            for spec in specs:
                seen = self._processes.observe(spec.name)
                if seen.phase in ("failed", "dead", "stopped", "absent"):
                    raise self._sick(spec.name, seen)
                if seen.phase != "ready":
                    waiting.append(spec.name)
            if not waiting:
                return True
            step.update(f"waiting for {', '.join(waiting)}: {self._last_word(waiting[0])}")
            return None

        timeout_s = max(s.ready.timeout_s for s in specs) + 60
        if wait_for(look, timeout_s=timeout_s, interval_s=0.3) is None:
            late = next(s.name for s in specs if self._processes.observe(s.name).phase != "ready")
            raise self._sick(late, self._processes.observe(late))

    def _is_told(self, fleet: FleetOutputs) -> bool:
        """Whether the router has read its files as they are now."""
        try:
            wanted = reading.read(self._config_path).digest
        except SpecError:
            return False  # it cannot have read them; its log says what is wrong
        seen = http.get(f"{fleet.url}/health", timeout_s=5, trust=fleet.trust)
        return isinstance(seen.body, dict) and seen.body.get("configuration") == wanted

    def _tell_router(self, fleet: FleetOutputs, step: Step) -> None:
        """Have a router that runs read its files again: no request is dropped for that."""
        if self._processes.observe(launch.ROUTER).phase != "ready" or self._is_told(fleet):
            return
        step.update("the router reads its configuration again")
        self._processes.hang_up(launch.ROUTER)
        told = wait_for(lambda: True if self._is_told(fleet) else None, timeout_s=RELOAD_TIMEOUT_S)
        if told is None:
            log = self._processes.log(launch.ROUTER)
            msg = (
                f"the router did not take its configuration up within {RELOAD_TIMEOUT_S:.0f} s\n"
                f"last lines of {log}:\n{tail(log)}"
            )
            raise FleetError(msg, hint="'kvdeploy down', then 'kvdeploy up' starts anew.", log=log)

    def _wait_pairs(self, fleet: FleetOutputs, step: Step) -> None:
        if missing := wait_pairs(fleet, step):
            log = self._processes.log(launch.ROUTER)
            msg = f"{missing}\nlast lines of {log}:\n{tail(log)}"
            raise FleetError(msg, hint="'kvdeploy logs NAME' shows the engines' side.", log=log)

    def _sick(self, name: str, seen: Observed) -> FleetError:
        log = self._processes.log(name)
        why = (seen.state.reason if seen.state else "") or f"is {seen.phase}"
        msg = f"{name} {why}\nlast lines of its log:\n{tail(log)}"
        return FleetError(
            msg, hint=f"The whole log: {log}. Then 'kvdeploy up' can be run again.", log=log
        )

    def _last_word(self, name: str) -> str:
        line = LOG_PREFIX.sub("", tail(self._processes.log(name), 1))
        return line[:80] or "no output yet"

    def _generations(self, fleet: FleetOutputs) -> dict[str, str]:
        seen = {s.name: self._processes.observe(s.name).state for s in fleet.engines}
        return {name: state.generation for name, state in seen.items() if state}


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log, as far as the last 64 KiB hold them."""
    try:
        with path.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 65536))
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
