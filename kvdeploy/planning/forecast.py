"""What `up` will do to processes on nodes: what was brought up last, and what is wanted. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdeploy.planning.launch import ROUTER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import FleetOutputs


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that `up` will do behind Terraform. Names are sorted."""

    stages: tuple[str, ...] = ()
    """That have something to do, in their order."""
    configure: tuple[str, ...] = ()
    """Nodes that nodes.yml runs on."""
    start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    reload: tuple[str, ...] = ()
    """Processes that read their configuration again, and go on."""
    silent: tuple[str, ...] = ()
    """Nodes that do not answer now: what runs there is not known."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """What is to become of each."""

    start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    reload: tuple[str, ...] = ()

    @property
    def is_something(self) -> bool:
        return bool(self.start or self.restart or self.stop or self.reload)


def compare_processes(
    was: FleetOutputs | None,
    wanted: FleetOutputs,
    places: Mapping[str, str],
    *,
    running: Collection[str],
    new_nodes: Collection[str] = (),
) -> Processes:
    """What fleet.yml does to each process.

    Args:
        was: the fleet of last time; None: there was none.
        wanted: the fleet that is asked for.
        places: process -> the node that it is wanted on.
        running: names of the processes that run now.
        new_nodes: nodes that are made, or made anew, beforehand.
    """
    specs = _specs(wanted)
    old = _specs(was) if was else {}
    changed = {
        name
        for name, spec in specs.items()
        if places[name] in new_nodes
        or (was is not None and _made(old, was, name) != _made(specs, wanted, name))
    }
    start = {name for name in specs if name not in running}
    restart = changed - start
    reload = (
        was is not None
        and ROUTER not in start | restart
        and was.router_config != wanted.router_config
    )
    return Processes(
        start=tuple(sorted(start)),
        restart=tuple(sorted(restart)),
        stop=tuple(sorted(set(running) - specs.keys())),
        reload=(ROUTER,) if reload else (),
    )


def _specs(fleet: FleetOutputs) -> dict[str, LaunchSpec]:
    return {spec.name: spec for spec in (*fleet.engines, fleet.router)}


def _made(
    specs: Mapping[str, LaunchSpec], fleet: FleetOutputs, name: str
) -> tuple[LaunchSpec | None, str | None]:
    return specs.get(name), fleet.made_of.get("router" if name == ROUTER else "engine")
