"""What a playbook did, host by host."""

from __future__ import annotations

from pydantic import Field

from kvdeploy.model.base import Stored


class HostReport(Stored):
    """One host; the numbers are of tasks."""

    name: str
    ok: int = 0
    """Changed ones among them."""
    changed: int = 0
    skipped: int = 0
    failed: int = 0
    unreachable: bool = False
    role_seconds: dict[str, float] = Field(default_factory=dict)
    """Role -> how long its tasks took on this host; '' for tasks outside of roles."""


class PlayReport(Stored):
    playbook: str
    seconds: float
    hosts: tuple[HostReport, ...]

    @property
    def changed(self) -> int:
        """Tasks that changed something, on all hosts: 0 when everything was as it should be."""
        return sum(host.changed for host in self.hosts)
