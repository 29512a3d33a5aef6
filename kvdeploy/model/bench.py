"""What a bench measured: every request, and what engines counted meanwhile."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from kvdeploy.model.base import Stored
from kvdeploy.model.routing import Mode

MODES: Final[tuple[Mode, ...]] = ("push", "push-sequential", "pull", "aggregated")

SCENARIOS: Final = {
    "unique": "no two prompts have anything in common",
    "shared": "nine tenths of every prompt are the same",
    "repeat": "decode holds the whole prompt already",
    "turns": "conversations: each prompt is the last one, its answer, and more",
    "fragmented": "unique, after requests of many lengths have scattered decode's free blocks",
    "long": "unique, as long as the model takes, one at a time",
    "cold": "unique, the first between two engines that never met: decode is started for each",
}
SCHEMA: Final = 1


class Cell(Stored):
    """One point of the matrix."""

    scenario: str
    input_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.scenario} {self.input_tokens}/{self.output_tokens} x{self.concurrency}"


class Sample(Stored):
    """One request as its client saw it. Seconds."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Between one event with tokens and the next."""
    output_tokens: int = 0
    error: str = ""
    """'' for an answer that is whole; nothing else of the sample counts when it is not."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for an answer of one."""
        if self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)


class Moved(Stored):
    """What the fleet's engines counted during one run, warm-up left out."""

    kv_bytes: int = 0
    transfers: int = 0
    descriptors: int = 0
    transfer_s: float = 0.0
    post_s: float = 0.0
    failed: int = 0
    """Transfers and notifications that failed, and leases that ran out."""
    prompt_tokens: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By engine, and by where their KV came from."""

    def __add__(self, other: Moved) -> Moved:
        mine, theirs = self.prompt_tokens, other.prompt_tokens
        return Moved(
            kv_bytes=self.kv_bytes + other.kv_bytes,
            transfers=self.transfers + other.transfers,
            descriptors=self.descriptors + other.descriptors,
            transfer_s=self.transfer_s + other.transfer_s,
            post_s=self.post_s + other.post_s,
            failed=self.failed + other.failed,
            prompt_tokens={
                name: _sum(mine.get(name, {}), theirs.get(name, {}))
                for name in sorted(mine.keys() | theirs.keys())
            },
        )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {k: one.get(k, 0) + other.get(k, 0) for k in sorted(one.keys() | other.keys())}


class Run(Stored):
    """One mode on one cell, once."""

    mode: Mode
    cell: Cell
    round: int
    seconds: float
    """From the first request that counts to the end of the last."""
    samples: tuple[Sample, ...]
    moved: Moved | None = None
    """None when the engines' counters could not be read after it."""

    @property
    def good(self) -> tuple[Sample, ...]:
        return tuple(s for s in self.samples if not s.error)


class BenchReport(Stored):
    schema_version: int = SCHEMA
    cluster: str
    target: str
    started_at: str
    """UTC, ISO 8601."""
    seconds: float
    modes: tuple[Mode, ...]
    runs: tuple[Run, ...]
    environment: dict[str, Any]
    """Versions, processors, topology, flags."""
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What a reader has to know of these figures, and what was left out, as sentences."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Modes that did not come to their end, and why."""
