"""Stage `proof`: the fleet that was just started or repaired pushes, once over every pair."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvdeploy.errors import SmokeError
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.model.reports import SmokeReport
from kvdeploy.stages.smoke import Smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.stages.base import Results, Step

    Reach = Callable[[FleetOutputs], AbstractContextManager[FleetOutputs]]


class ProofStage:
    name = "proof"
    title = "prove one push over every pair"

    def __init__(self, spec: ClusterSpec, reach: Reach = nullcontext) -> None:
        """`reach` makes of the fleet one that can be asked from here, for a while."""
        self._spec, self._reach = spec, reach

    def inputs(self, results: Results) -> Mapping[str, Any]:
        return {"fleet": dict(results["fleet"])}

    def holds(self, result: Mapping[str, Any]) -> bool:
        return SmokeReport.model_validate(result).proven

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        fleet = FleetOutputs.model_validate(results["fleet"])
        model = ModelOutputs.model_validate(results["model"])
        with self._reach(fleet) as here:
            report = Smoke(self._spec, model, here, None, step).prove()
        raise_unless_proven(report)
        return report.model_dump(mode="json")


def raise_unless_proven(report: SmokeReport) -> None:
    """Say in one error why a climb proves nothing.

    Raises:
        SmokeError: a rung failed, or a pair was not seen to move KV.
    """
    if report.proven:
        return
    lines = [f"{r.rung} {r.subject}: {r.message}" for r in report.failed]
    lines += [f"no KV was seen to move over {pair}" for pair in report.unmoved]
    listing = "\n".join(lines)
    msg = f"not proven:\n{listing}"
    raise SmokeError(msg, hint="The fleet still runs: 'kvdeploy logs' shows what engines say.")
