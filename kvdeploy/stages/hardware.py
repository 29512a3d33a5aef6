"""The rungs of smoke about nodes: their devices, and whether KV really went over EFA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.planning.hardware import judge_efa, judge_node
from kvdeploy.stages.efa import why_not_efa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.reports import RungReport
    from kvdeploy.stages.units import Units


class NodeHardware:
    def __init__(self, units: Units) -> None:
        self._units = units
        self._mocked = units.crew.spec.kind == "rehearsal"

    def look(self) -> dict[str, NodeFacts]:
        """What every GPU node says.

        Raises:
            UnreachableError: one does not answer.
        """
        hosts = [h for h in self._units.blueprint.inventory.hosts if h.role != "router"]
        found = {}
        for name, said in self._units.crew.remote.ask(hosts).items():
            if not isinstance(said, NodeFacts):
                raise said
            found[name] = said
        return found

    def judge(
        self, before: Mapping[str, NodeFacts], pushed: Mapping[str, int]
    ) -> Iterator[RungReport]:
        """Rungs, after a climb that began with `before`; `pushed` is bytes by engine."""
        after, aws = self.look(), self._units.crew.spec.aws
        if aws is None or (profile := INSTANCES.get(aws.instance_type)) is None:
            return
        for node, seen in sorted(after.items()):
            yield judge_node(node, seen, profile, mocked=self._mocked)
        hosts = self._units.hosts
        nodes = {hosts[engine].name for engine in pushed}
        yield judge_efa(
            ", ".join(sorted(pushed)),
            efa_bytes=sum(after[n].efa_bytes - before[n].efa_bytes for n in nodes),
            pushed_bytes=sum(pushed.values()),
            why_not=why_not_efa(self._units.crew),
            mocked=self._mocked,
        )
