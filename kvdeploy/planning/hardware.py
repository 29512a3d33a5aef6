"""What nodes show of their hardware, as rungs of the smoke ladder. Pure.

In a rehearsal hardware is mocked: what would pass is `mocked` there, and never `passed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.outputs import NodeFacts


def judge_node(node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool) -> RungReport:
    """That a GPU node has all its GPUs and EFA devices."""
    found = f"{seen.gpus} GPUs, {seen.efa_devices} EFA devices"
    whole = (seen.gpus, seen.efa_devices) == (profile.gpus, profile.efa_devices)
    if whole:
        verdict, message = _good(found, mocked=mocked)
    else:
        verdict = Verdict.FAILED
        message = f"{found}; {profile.name} has {profile.gpus} and {profile.efa_devices}"
    return RungReport(
        rung="node",
        subject=node,
        verdict=verdict,
        message=message,
        evidence={"gpus": seen.gpus, "efa_devices": seen.efa_devices},
    )


def judge_efa(
    subject: str, *, efa_bytes: int, pushed_bytes: int, why_not: str, mocked: bool
) -> RungReport:
    """That KV went over EFA, and not over the plain network interface.

    Args:
        subject: who it is about.
        efa_bytes: that the devices of those who push have counted.
        pushed_bytes: that NIXL has counted in the same time.
        why_not: why it was never meant to go over EFA; '' when it was.
        mocked: whether the devices are.
    """
    if why_not:
        verdict, message = Verdict.NOT_APPLICABLE, why_not
    elif pushed_bytes and efa_bytes >= pushed_bytes:
        verdict, message = _good(f"{efa_bytes:,} bytes went over EFA", mocked=mocked)
    else:
        verdict = Verdict.FAILED
        message = f"{efa_bytes:,} bytes went over EFA, and {pushed_bytes:,} bytes of KV were moved"
    return RungReport(
        rung="efa",
        subject=subject,
        verdict=verdict,
        message=message,
        evidence={"efa_bytes": efa_bytes, "pushed_bytes": pushed_bytes},
    )


def _good(message: str, *, mocked: bool) -> tuple[Verdict, str]:
    if mocked:
        return Verdict.MOCKED, f"{message}, all of them mocked: this shows nothing of hardware"
    return Verdict.PASSED, message
