"""Everything that can be known to be wrong before anything is started. Changes nothing."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvdeploy.adapters.local import machine, runtime
from kvdeploy.errors import SpecError
from kvdeploy.model.facts import MachineFacts
from kvdeploy.model.listing import entries
from kvdeploy.planning.checks import check_machine, check_spec
from kvdeploy.router import tls
from kvdeploy.stages.model import BUILTIN, local_path
from kvdeploy.stages.runtime import named_python

if TYPE_CHECKING:
    from kvdeploy.adapters.local.processes import Processes
    from kvdeploy.model.outputs import Device
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def device_of(spec: ClusterSpec, gpus: int) -> Device:
    """What the engines will run on, on a machine with that many GPUs."""
    if spec.runtime.device != "auto":
        return spec.runtime.device
    return "cuda" if gpus else "cpu"


def find_problems(
    spec: ClusterSpec,
    processes: Processes,
    runner: Runner,
    root: Path,
    *,
    allow: frozenset[str] = frozenset(),
) -> list[Finding]:
    """Every finding about the cluster file and, for `target: local`, about this machine."""
    found = check_spec(spec, allow=allow)
    if spec.target == "local":
        facts = look(spec, processes, runner, root)
        found += check_machine(spec, facts, device=device_of(spec, facts.gpus), allow=allow)
    return sorted(found, key=lambda f: (-f.severity, f.path))


def look(spec: ClusterSpec, processes: Processes, runner: Runner, root: Path) -> MachineFacts:
    """Facts about this machine; what our own running fleet holds counts as free."""
    ours = {name: processes.observe(name) for name in processes.names()}
    held_gib = sum(machine.resident_gib(seen.pids) for seen in ours.values())
    gpus = machine.gpus(runner)
    tls_problem, tls_days_left = look_at_tls(spec, root)
    return MachineFacts(
        platform=sys.platform,
        cores=len(machine.cores()),
        memory_available_gib=machine.memory_available_gib() + held_gib,
        disk_free_gib=machine.disk_free_gib(runtime.cache_dir()),
        gpus=len(gpus),
        gpu_memory_gib=min(gpus, default=0.0),
        taken_ports=_taken(spec, {pid for seen in ours.values() for pid in seen.pids}),
        model_path_exists=_model_exists(spec, root),
        runtime_python_exists=_python_exists(spec, root),
        api_key_file_exists=has_keys(spec, root),
        tls_problem=tls_problem,
        tls_days_left=tls_days_left,
        has_libnuma=machine.can_load("libnuma.so.1"),
        runtime_built=runtime.is_whole(runtime.built_python(device_of(spec, len(gpus)))),
    )


def _taken(spec: ClusterSpec, ours: set[int]) -> dict[int, str]:
    port = spec.router.port
    if machine.port_is_free(port, spec.router.host):
        return {}
    holder = machine.port_holder(port)
    return {} if holder in ours else {port: machine.describe(holder)}


def _model_exists(spec: ClusterSpec, root: Path) -> bool | None:
    if spec.model.id.startswith(BUILTIN):
        return None
    path = local_path(spec.model.id, root)
    return None if path is None else (path / "config.json").exists()


def has_keys(spec: ClusterSpec, root: Path) -> bool | None:
    """Whether router.api_key_file holds any; None when it is not set."""
    named = spec.router.api_key_file
    if named is None:
        return None
    try:
        text = (root / Path(named).expanduser()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(entries(text))


def look_at_tls(spec: ClusterSpec, root: Path) -> tuple[str | None, float | None]:
    """What is wrong with the router's certificate, and the days until it ends; by a handshake."""
    named = spec.router.tls_files
    if named is None:
        return None, None
    cert, key = (str(root / Path(path).expanduser()) for path in named)
    try:
        context = tls.read_tls(cert, key)
        left_s = tls.find_expiry(context, cert) - time.time() if context else 0.0
    except SpecError as e:
        return e.message, None
    return None, left_s / 86400


def _python_exists(spec: ClusterSpec, root: Path) -> bool | None:
    named = spec.runtime.python
    return None if named is None else shutil.which(named_python(named, root)) is not None
