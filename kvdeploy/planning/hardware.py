"""What nodes show of their hardware, as rungs of the smoke ladder. Pure.

In a rehearsal hardware is mocked: what would pass is `mocked` there, and never `passed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import HUGE_PAGES
from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import Device, NodeFacts

HUGE_PAGES_FROM: Final = 16
"""EFA devices of a node for which huge pages are reserved."""
WITHOUT_LIMIT: Final = frozenset({"infinity", "unlimited"})


def huge_pages_of(profile: InstanceProfile | None) -> int:
    """Pages of 2 MiB that a node of a type reserves."""
    devices = profile.efa_devices if profile else 0
    return HUGE_PAGES if devices >= HUGE_PAGES_FROM else 0


def judge_node(
    node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool
) -> Iterator[RungReport]:
    """Every rung about one GPU node by itself."""
    yield judge_devices(node, seen, profile, mocked=mocked)
    yield judge_driver(node, seen, profile, mocked=mocked)
    yield judge_memlock(node, seen, profile, mocked=mocked)
    yield judge_huge_pages(node, seen, profile, mocked=mocked)


def judge_devices(
    node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool
) -> RungReport:
    """That a GPU node has all its GPUs and EFA devices."""
    found = f"{seen.gpus} GPUs, {seen.efa_devices} EFA devices"
    evidence: dict[str, object] = {"gpus": seen.gpus, "efa_devices": seen.efa_devices}
    if (seen.gpus, seen.efa_devices) == (profile.gpus, profile.efa_devices):
        return good("node", node, found, evidence, mocked=mocked)
    message = f"{found}; {profile.name} has {profile.gpus} and {profile.efa_devices}"
    return failed("node", node, message, evidence)


def judge_driver(
    node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool
) -> RungReport:
    """That the driver answers, and that the fabric manager is of just its version."""
    evidence: dict[str, object] = {"driver": seen.driver, "fabric_manager": seen.fabric_manager}
    if not seen.driver:
        return failed("node/driver", node, "no NVIDIA driver answers", evidence)
    if not profile.nvswitch:
        message = f"driver {seen.driver}; {profile.name} has no NVSwitches to manage"
        return good("node/driver", node, message, evidence, mocked=mocked)
    if seen.fabric_manager == seen.driver:
        message = f"driver and fabric manager are {seen.driver}"
        return good("node/driver", node, message, evidence, mocked=mocked)
    manager = seen.fabric_manager or "not there"
    message = f"driver {seen.driver}, and the fabric manager is {manager}: they must be the same"
    return failed("node/driver", node, message, evidence)


def judge_memlock(
    node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool
) -> RungReport:
    """That engines may lock all the memory that EFA devices are to reach.

    Where devices are mocked, the machine under them limits processes: the units' word counts.
    """
    limits = {
        name: (unit.get("LimitMEMLOCK", ""), seen.memlock.get(name, ""))
        for name, unit in seen.units.items()
        if name != "router"
    }
    evidence: dict[str, object] = {
        name: {"unit": unit, "process": process} for name, (unit, process) in limits.items()
    }
    if not profile.efa_devices:
        message = f"{profile.name} has no EFA, which would want memory locked"
        return _not_applicable("node/memlock", node, message, evidence)
    if not limits:
        return failed("node/memlock", node, "no engine has a unit here", evidence)
    for name, (unit, process) in sorted(limits.items()):
        if unit not in WITHOUT_LIMIT:
            message = (
                f"the unit of {name} may lock {unit or 'an unknown number of'} bytes of memory"
            )
            return failed("node/memlock", node, message, evidence)
        if process not in WITHOUT_LIMIT and not mocked:
            message = f"{name} may lock {process or 'an unknown number of'} bytes of memory"
            return failed("node/memlock", node, message, evidence)
    message = f"{', '.join(sorted(limits))} may lock all memory"
    return good("node/memlock", node, message, evidence, mocked=mocked)


def judge_huge_pages(
    node: str, seen: NodeFacts, profile: InstanceProfile, *, mocked: bool
) -> RungReport:
    """That huge pages are reserved for a node with many EFA devices."""
    wanted = huge_pages_of(profile)
    evidence: dict[str, object] = {"huge_pages": seen.huge_pages, "wanted": wanted}
    if not wanted:
        message = f"{profile.name} needs none for {profile.efa_devices} EFA devices"
        return _not_applicable("node/huge-pages", node, message, evidence)
    message = f"{seen.huge_pages} huge pages of 2 MiB"
    if seen.huge_pages >= wanted:
        return good("node/huge-pages", node, message, evidence, mocked=mocked)
    return failed("node/huge-pages", node, f"{message}, of {wanted}", evidence)


def judge_this_machine(
    seen: NodeFacts, engines: Sequence[LaunchSpec], *, device: Device
) -> Iterator[RungReport]:
    """What a machine with all engines on it shows of what they compute on."""
    here, names = "this machine", "CUDA_VISIBLE_DEVICES"
    evidence: dict[str, object] = {"gpus": seen.gpus, "driver": seen.driver}
    memlock = "EFA alone wants memory locked, and there is none between processes of one machine"
    if device == "cpu":
        message = "engines compute on this machine's CPUs"
        yield _not_applicable("node", here, message, evidence | {"cores": list(seen.cores)})
    else:
        dealt = {gpu for e in engines for gpu in e.env.get(names, "").split(",") if gpu}
        evidence["dealt"] = sorted(dealt)
        if dealt and seen.gpus >= len(dealt) and seen.driver:
            message = f"{len(dealt)} of {seen.gpus} GPUs are dealt to engines, driver {seen.driver}"
            yield good("node", here, message, evidence, mocked=False)
        else:
            message = f"engines were dealt {len(dealt)} GPUs, and the driver shows {seen.gpus}"
            yield failed("node", here, message, evidence)
    yield _not_applicable("node/memlock", here, memlock, {})


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
    evidence: dict[str, object] = {"efa_bytes": efa_bytes, "pushed_bytes": pushed_bytes}
    if why_not:
        return _not_applicable("efa", subject, why_not, evidence)
    if pushed_bytes and efa_bytes >= pushed_bytes:
        message = f"{efa_bytes:,} bytes went over EFA"
        return good("efa", subject, message, evidence, mocked=mocked)
    message = f"{efa_bytes:,} bytes went over EFA, and {pushed_bytes:,} bytes of KV were moved"
    return failed("efa", subject, message, evidence)


# --- what all rungs about hardware share -------------------------------------------------------
def good(
    rung: str, subject: str, message: str, evidence: dict[str, object], *, mocked: bool
) -> RungReport:
    """Passed; mocked where the hardware is."""
    if mocked:
        message = f"{message}; mocked: this shows nothing of hardware"
    verdict = Verdict.MOCKED if mocked else Verdict.PASSED
    return RungReport(
        rung=rung, subject=subject, verdict=verdict, message=message, evidence=evidence
    )


def failed(rung: str, subject: str, message: str, evidence: dict[str, object]) -> RungReport:
    return RungReport(
        rung=rung, subject=subject, verdict=Verdict.FAILED, message=message, evidence=evidence
    )


def _not_applicable(
    rung: str, subject: str, message: str, evidence: dict[str, object]
) -> RungReport:
    verdict = Verdict.NOT_APPLICABLE
    return RungReport(
        rung=rung, subject=subject, verdict=verdict, message=message, evidence=evidence
    )
