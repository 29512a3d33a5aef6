"""What checks and proofs found. They yield values; only the caller decides to stop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from pydantic import Field

from kvdeploy.model.base import Stored


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
    """A whole climb. Proven: nothing failed, and at least one rung passed."""

    cluster: str
    target: str
    started_at: str
    """UTC, ISO 8601."""
    seconds: float
    rungs: tuple[RungReport, ...]

    @property
    def failed(self) -> tuple[RungReport, ...]:
        return tuple(r for r in self.rungs if r.verdict is Verdict.FAILED)

    @property
    def proven(self) -> bool:
        return not self.failed and any(r.verdict is Verdict.PASSED for r in self.rungs)
