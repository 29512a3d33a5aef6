"""The rungs of smoke about nodes: their devices, and whether KV really went over EFA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.planning.hardware import judge_efa, judge_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.reports import RungReport
    from kvdeploy.stages.units import Units


class NodeHardware:
    def __init__(self, units: Units) -> None:
        self._units = units
        self.mocked = units.crew.spec.kind == "rehearsal"

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
            yield judge_node(node, seen, profile, mocked=self.mocked)
        yield self.judge_efa(before, pushed, expected=False, after=after)

    def judge_efa(
        self,
        before: Mapping[str, NodeFacts],
        pushed: Mapping[str, int],
        *,
        expected: bool,
        after: Mapping[str, NodeFacts] | None = None,
    ) -> RungReport:
        """Whether KV went over EFA; `expected`: judged so although it was not meant to."""
        now, hosts = after or self.look(), self._units.hosts
        nodes = {hosts[engine].name for engine in pushed}
        return judge_efa(
            ", ".join(sorted(pushed)),
            efa_bytes=sum(now[n].efa_bytes - before[n].efa_bytes for n in nodes),
            pushed_bytes=sum(pushed.values()),
            why_not="" if expected else self.why_not_efa,
            mocked=self.mocked,
        )

    @property
    def why_not_efa(self) -> str:
        """Why KV is not meant to go over EFA; '' when it is."""
        crew = self._units.crew
        if crew.device == "cpu":
            return "engines compute on CPUs here, and their KV goes over TCP"
        if crew.spec.connector.backend == "UCX":
            return "connector.backend is UCX, which does not use EFA"
        return ""
