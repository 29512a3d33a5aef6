"""What one engine has counted since it started, as far as proofs of transfers need it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Sums over all ranks of one server. What the engine does not export is 0 here: ask
    `present`, or a metric that was renamed reads as "nothing happened".

    Later minus earlier is what happened between: counters are subtracted, gauges are later's.
    """

    # --- counters: the writer's side (prefill in push, decode in pull) ---
    pushed_bytes: int = 0
    transfers: int = 0
    descriptors: int = 0
    transfer_s: float = 0.0
    """Time of all transfers, one after the other, with the wait for the engine to look at them."""
    post_s: float = 0.0
    """Time that handing them to the fabric took."""
    failed_transfers: int = 0
    """Since vLLM 0.32 failed handshakes and notifications are counted here as well."""
    failed_notifications: int = 0
    kv_expired: int = 0
    """Requests whose blocks prefill gave up because nobody renewed the lease."""
    late_notifications: int = 0
    """Transfers reported as done after their blocks had been given up: a risk of wrong tokens."""
    # --- counters: every engine ---
    prompt_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens by where their KV came from: 'local_compute', 'local_cache_hit',
    'external_kv_transfer'. They are counted when the prefill is done, never for a hung request."""
    # --- gauges ---
    kv_cache_usage: float = 0.0
    """0 to 1; the fullest rank's."""
    running: int = 0
    waiting: int = 0
    """Requests, the deferred ones included."""
    deferred: int = 0
    """Waiting for something other than room, as a KV transfer."""

    present: frozenset[str] = frozenset()
    """Names of the fields that the engine exports."""

    @property
    def has_nixl(self) -> bool:
        """Whether the engine exports what was pushed at all."""
        return {"pushed_bytes", "transfers"} <= self.present

    @property
    def external_tokens(self) -> int:
        """Prompt tokens whose KV another engine sent."""
        return self.prompt_tokens_by_source.get("external_kv_transfer", 0)

    @property
    def local_tokens(self) -> int:
        """Prompt tokens that the engine computed itself."""
        return self.prompt_tokens_by_source.get("local_compute", 0)

    def __sub__(self, earlier: EngineCounters) -> EngineCounters:
        return self._combined(earlier, -1)

    def __add__(self, other: EngineCounters) -> EngineCounters:
        """Two engines' counters in one; gauges are the first's."""
        return self._combined(other, 1)

    def _combined(self, other: EngineCounters, sign: int) -> EngineCounters:
        mine, theirs = self.prompt_tokens_by_source, other.prompt_tokens_by_source
        return replace(
            self,
            pushed_bytes=self.pushed_bytes + sign * other.pushed_bytes,
            transfers=self.transfers + sign * other.transfers,
            descriptors=self.descriptors + sign * other.descriptors,
            transfer_s=self.transfer_s + sign * other.transfer_s,
            post_s=self.post_s + sign * other.post_s,
            failed_transfers=self.failed_transfers + sign * other.failed_transfers,
            failed_notifications=self.failed_notifications + sign * other.failed_notifications,
            kv_expired=self.kv_expired + sign * other.kv_expired,
            late_notifications=self.late_notifications + sign * other.late_notifications,
            prompt_tokens_by_source={
                source: mine.get(source, 0) + sign * theirs.get(source, 0)
                for source in sorted(mine.keys() | theirs.keys())
            },
            present=self.present if sign < 0 else self.present & other.present,
        )
