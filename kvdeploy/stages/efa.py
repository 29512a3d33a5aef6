"""What the EFA devices of a cluster's nodes say of KV that was moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.model.outputs import NodeFacts
from kvdeploy.planning.hardware import judge_efa

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.reports import RungReport
    from kvdeploy.stages.nodes import Crew
    from kvdeploy.stages.units import Units


def why_not_efa(crew: Crew) -> str:
    """Why KV is not meant to go over EFA; '' when it is."""
    if crew.device == "cpu":
        return "engines compute on CPUs here, and their KV goes over TCP"
    if crew.spec.connector.backend == "UCX":
        return "connector.backend is UCX, which does not use EFA"
    return ""


class NodeEfa:
    """Judges as if EFA were expected, whether it is or not."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.mocked = units.crew.spec.kind == "rehearsal"
        """Whether devices are."""
        self.why_not = why_not_efa(units.crew)

    def look(self) -> dict[str, int]:
        """Bytes that the devices of each GPU node have counted.

        Raises:
            UnreachableError: one does not answer.
        """
        hosts = [h for h in self._units.blueprint.inventory.hosts if h.role != "router"]
        counted = {}
        for name, said in self._units.crew.remote.ask(hosts).items():
            if not isinstance(said, NodeFacts):
                raise said
            counted[name] = said.efa_bytes
        return counted

    def judge(self, before: Mapping[str, int], pushed: Mapping[str, int]) -> RungReport:
        """What was counted since `before`, beside what the engines of `pushed` say they moved."""
        now, hosts = self.look(), self._units.hosts
        nodes = {hosts[engine].name for engine in pushed}
        return judge_efa(
            ", ".join(sorted(pushed)),
            efa_bytes=sum(now[n] - before[n] for n in nodes),
            pushed_bytes=sum(pushed.values()),
            why_not="",
            mocked=self.mocked,
        )
