"""The lower rungs of the smoke ladder: what is under a fleet, from the cluster file to a WRITE
between two of its places.
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from typing import TYPE_CHECKING, Final, Protocol

from kvdeploy import probes
from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.adapters.local.supervisor import INHERITED
from kvdeploy.errors import FleetError
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.model.reports import RungReport, Verdict
from kvdeploy.planning.hardware import judge_this_machine
from kvdeploy.planning.identity import judge_spec
from kvdeploy.planning.launch import LOOPBACK
from kvdeploy.proc import Command
from kvdeploy.stages.writing import program, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import FleetOutputs, RuntimeOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Step


LOOK_S: Final = 30.0


class Ground(Protocol):
    """What is under a fleet."""

    def rungs(self, step: Step, nonce: str) -> Iterator[RungReport]:
        """Rungs 0 to 3, as they are climbed. `nonce` is of this climb alone.

        Raises:
            FleetError: a machine does not tell of itself.
            UnreachableError: a node does not answer.
        """

    def carried(self, pushed: Mapping[str, int]) -> Iterator[RungReport]:
        """What devices moved since `rungs` ended; `pushed` is bytes of KV by engine."""


class LocalGround:
    """All engines on one machine."""

    def __init__(
        self,
        spec: ClusterSpec,
        fleet: FleetOutputs,
        runtime: RuntimeOutputs,
        runner: Runner,
        *,
        now: ClusterSpec | None,
        source: str,
        log: Path,
    ) -> None:
        """`now` is the cluster file `source` as it is; `log` takes what programs complain of."""
        self._spec, self._fleet, self._runtime, self._runner = spec, fleet, runtime, runner
        self._now, self._source, self._log = now, source, log

    def rungs(self, step: Step, nonce: str) -> Iterator[RungReport]:
        step.update("this machine")
        engines = sorted(self._fleet.engines, key=lambda e: e.name)
        names = [e.name for e in engines]
        yield judge_spec(self._spec, names, now=self._now, source=self._source)
        yield from judge_this_machine(self._facts(), engines, device=self._runtime.device)
        message = "every engine is on this machine: there is no fabric between them"
        yield RungReport(
            rung="fabric",
            subject="this machine",
            verdict=Verdict.NOT_APPLICABLE,
            message=message,
        )
        prefill, decode = (
            next(e for e in engines if e.role == role) for role in ("prefill", "decode")
        )
        step.update(f"{prefill.name}/{decode.name}: NIXL WRITE")
        device = self._runtime.device
        yield from write(prefill, decode, self._begin, device=device, nonce=nonce, mocked=False)

    def carried(self, pushed: Mapping[str, int]) -> Iterator[RungReport]:  # noqa: ARG002
        yield from ()

    def _facts(self) -> NodeFacts:
        text = (resources.files(probes) / "node.py").read_text(encoding="utf-8")
        argv = (sys.executable, "-I", "-c", text, LOOPBACK)
        ran = self._runner.run(Command(argv=argv, timeout_s=LOOK_S))
        if ran.code:
            msg = f"this machine does not tell of itself: {ran.tail(1) or 'no answer'}"
            raise FleetError(msg, hint="A driver that hangs is one reason: try 'nvidia-smi'.")
        return NodeFacts.model_validate_json(ran.stdout.splitlines()[-1])

    def _begin(self, engine: LaunchSpec) -> Dialogue:
        inherited = {k: v for k in INHERITED if (v := os.environ.get(k)) is not None}
        argv = (engine.argv[0], "-c", program())
        return Dialogue(argv, env=inherited | engine.env, log=self._log)
