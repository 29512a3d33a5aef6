"""The steps of an instance: pending, running, shutting-down, terminated."""

from __future__ import annotations

from typing import Any

from tests.double.network import release, unmap
from tests.double.world import WORLD


def boot(instance: Any) -> None:
    """pending, and running once the time to boot has passed."""
    instance._state.name, instance._state.code = "pending", 0

    def run() -> None:
        if instance.state == "pending":
            instance._state.name, instance._state.code = "running", 16

    WORLD.later(WORLD.boot_s, run)


def terminate(instance: Any, seconds: float) -> None:
    """shutting-down, and terminated once `seconds` have passed."""
    if instance.state in {"shutting-down", "terminated"}:
        return
    instance._state.name, instance._state.code = "shutting-down", 32
    WORLD.later(seconds, lambda: _end(instance))


def _end(instance: Any) -> None:
    backend, reason = instance.ec2_backend, instance.state_reason
    nics = list(instance.nics.values())
    for eni in nics:
        unmap(backend, eni)
    kept = [eni for eni in nics if not eni.delete_on_termination]
    instance.terminate()
    for eni in kept:
        release(eni)
    instance.nics, instance._subnet_id = {}, None
    if reason.code:
        instance.state_reason = reason
