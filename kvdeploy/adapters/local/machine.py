"""Facts about the machine at hand. Looks; changes nothing."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvdeploy.proc import Command, Runner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GIB = 2**30


def cores() -> tuple[int, ...]:
    """Cores this process may use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def memory_available_gib() -> float:
    """Memory that can be had without swapping."""
    return float(psutil.virtual_memory().available) / GIB


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def disk_free_gib(path: Path) -> float:
    """Free space where `path` is or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / GIB


def gpus(runner: Runner) -> tuple[float, ...]:
    """Memory in GiB of each NVIDIA GPU, by index; empty where there is none."""
    return tuple(float(mib) / 1024 for mib in _ask_gpus(runner, "memory.total"))


def gpu_names(runner: Runner) -> tuple[str, ...]:
    """Of each NVIDIA GPU, with its driver, by index."""
    return _ask_gpus(runner, "name,driver_version")


def _ask_gpus(runner: Runner, query: str) -> tuple[str, ...]:
    """A line a GPU; empty where there is none, or nobody to ask."""
    if shutil.which("nvidia-smi") is None:
        return ()
    argv = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    outcome = runner.run(Command(argv=argv, timeout_s=30))
    if outcome.code != 0:
        return ()
    return tuple(line for line in outcome.stdout.splitlines() if line.strip())


def cpu_name() -> str:
    """As Linux has it; '' elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "")


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> int | None:
    """The process that listens on `port`, as far as we may see."""
    try:
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port:
                return c.pid
    except psutil.Error:
        pass
    return None


def describe(pid: int | None) -> str:
    """A process in words."""
    if pid is None:
        return "another process"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def free_ports(base: int, *, avoid: Iterable[int] = (), host: str = "127.0.0.1") -> Iterator[int]:
    """Free ports from `base` upwards."""
    taken = set(avoid)
    for port in range(base, 65536):
        if port not in taken and port_is_free(port, host):
            yield port


def session_members(leader: int, *, since: float | None = None) -> list[int]:
    """Processes of the session that `leader` began, itself included if it lives.

    `since` (Unix time) guards against a number that the kernel has given to somebody else:
    processes older than that are left out.
    """
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != leader:
                continue
            process = psutil.Process(pid)
            if has_ended(process):
                continue
            if since is None or process.create_time() >= since - 2:
                members.append(pid)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing of the process runs any more, buried or not.

    The kernel calls a process a zombie as soon as its first thread is gone. While another thread
    lives the process still holds its memory, ports and devices.
    """
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def is_frozen(pids: Iterable[int]) -> bool:
    """Whether any of the processes was stopped by a signal."""
    for pid in pids:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return True
        except psutil.Error:
            continue
    return False


def resident_gib(pids: Iterable[int]) -> float:
    """Resident memory of processes; a page that several of them share counts for each."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total / GIB


def move_to_cores(pids: Iterable[int], numbers: Iterable[int]) -> None:
    """Bind every thread of `pids` to the cores `numbers`. Linux only; elsewhere does nothing."""
    if not hasattr(os, "sched_setaffinity"):
        return
    wanted = set(numbers)
    for pid in pids:
        try:
            threads = [int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, wanted)
            except (ProcessLookupError, PermissionError, OSError):
                continue
