"""What checks and proofs found. They yield values; only the caller decides to stop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from pydantic import Field

from kvdeploy.model.base import Stored

PUSHED = "pushed"
"""The rung without which nothing is proven: KV bytes moved from prefill to decode."""


class Severity(IntEnum):
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a check saw."""

    check: str
    """The check's id, e.g. 'router-port-taken'; `--allow ID` goes on although it objects."""
    severity: Severity
    path: str
    """Where in the cluster file, e.g. 'fleet.decode.tensor_parallel'; '' when nowhere."""
    message: str
    hint: str = ""


class Verdict(StrEnum):
    """How one rung of the smoke ladder ended. Only PASSED counts as proof."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"
    """It could be, and was not asked for."""
    MOCKED = "mocked"
    """Would have passed, on hardware that is not real: a rehearsal."""


class RungReport(Stored):
    """One rung: what was asked, what was seen, what that means."""

    rung: str
    """e.g. 'bytes'."""
    subject: str
    """Who it is about: 'prefill-0/decode-0', 'router', 'fleet'."""
    verdict: Verdict
    message: str
    evidence: dict[str, object] = Field(default_factory=dict)
    seconds: float = 0.0


class SmokeReport(Stored):
    """A whole climb of the ladder.

    Proven means: nothing failed, and every pair was seen to move KV. A rung that was not
    applicable proves nothing.
    """

    cluster: str
    target: str
    started_at: str
    """UTC, ISO 8601."""
    seconds: float
    pairs: tuple[str, ...]
    """Every prefill/decode pair of the fleet."""
    rungs: tuple[RungReport, ...]

    @property
    def failed(self) -> tuple[RungReport, ...]:
        return tuple(r for r in self.rungs if r.verdict is Verdict.FAILED)

    @property
    def unmoved(self) -> tuple[str, ...]:
        """Pairs without a passed `pushed` rung."""
        moved = {r.subject for r in self.rungs if r.rung == PUSHED and r.verdict is Verdict.PASSED}
        return tuple(p for p in self.pairs if p not in moved)

    @property
    def proven(self) -> bool:
        return bool(self.pairs) and not self.failed and not self.unmoved
