"""What is started to be measured: scripted engines, kvdeploy's router, vllm-router.

Owns their processes, where they run, and the one shape in which both routers are asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scripted_engine import MODEL
from kvdeploy.model.routing import RouterConfig
from kvdeploy.router import legs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

PATH: legs.Endpoint = "/v1/completions"
READY_S = 120.0


@dataclass
class Cores:
    """Where things run. The router has a core of its own, the rest shares the others."""

    router: set[int] | None = None
    rest: set[int] | None = None


class Processes:
    """What was started, each with a log, and ended by `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, argv: Sequence[str], cores: set[int] | None) -> int:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,  # noqa: PLW1509
            )
        self._running.append(process)
        return process.pid

    def kill(self, pid: int) -> None:
        """At once, as a crash does."""
        process = next(p for p in self._running if p.pid == pid)
        self._running.remove(process)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


def find_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
        return found


def cpu_s(pid: int) -> float:
    """Of a process and of all below it."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    below = " ".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    return own + sum(cpu_s(int(child)) for child in below.split())


def wait_ok(url: str, what: str, log: Path | None = None) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    tail = log.read_text()[-2000:] if log and log.exists() else ""
    sys.exit(f"{what} was not ready within {READY_S:.0f} s: {url}\n{tail}")


@dataclass
class Scripted:
    """A scripted engine, which may be ended and started again."""

    role: str
    port: int
    side_port: int
    pid: int = 0


@dataclass
class Site:
    """The engines that are asked."""

    prefill_urls: list[str]
    decode_urls: list[str]
    model: str
    scripted: list[Scripted] = field(default_factory=list)
    """Those that were started here, prefill first."""

    @property
    def urls(self) -> list[str]:
        return self.prefill_urls + self.decode_urls

    def build_body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def build_job(site: Site, prompt: str, tokens: int) -> legs.Job:
    body = site.build_body(prompt, tokens)
    raw = json.dumps(body).encode()
    return legs.Job(endpoint=PATH, raw=raw, body=body, request_id=uuid.uuid4().hex, stream=True)


@dataclass
class Arm:
    """One way to the engines."""

    name: str
    url: str = ""
    """Of its router; empty is direct."""
    pid: int = 0

    def cpu_s(self) -> float:
        return cpu_s(self.pid) if self.pid else 0.0


def start_scripted(
    processes: Processes, options: argparse.Namespace, cores: Cores, *, each: int = 1
) -> Site:
    ports = find_ports(4 * each)
    engines = [
        Scripted(role, ports.pop(), ports.pop())
        for role in ("prefill", "decode")
        for _ in range(each)
    ]
    for engine in engines:
        start_engine(processes, options, cores, engine)
    urls = {
        role: [f"http://127.0.0.1:{e.port}" for e in engines if e.role == role]
        for role in ("prefill", "decode")
    }
    site = Site(urls["prefill"], urls["decode"], MODEL, engines)
    wait_engines(site)
    return site


def start_engine(
    processes: Processes, options: argparse.Namespace, cores: Cores, engine: Scripted
) -> None:
    """Under an id that it never had."""
    engine.pid = processes.start(
        f"{engine.role}-{engine.port}",
        [
            *(sys.executable, "-m", "benchmarks.scripted_engine", f"--role={engine.role}"),
            *(f"--port={engine.port}", f"--side-port={engine.side_port}"),
            f"--engine-id=scripted-{uuid.uuid4().hex[:8]}",
            *(f"--prefill-ms={options.prefill_ms}", f"--token-ms={options.token_ms}"),
        ],
        cores.rest,
    )


def wait_engines(site: Site) -> None:
    for url in site.urls:
        wait_ok(f"{url}/health", f"the engine at {url}")


def start_kvdeploy(
    processes: Processes, options: argparse.Namespace, site: Site, cores: Cores
) -> Arm:
    (port,) = find_ports(1)
    config: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "served_model": site.model,
        "engines": [
            {"name": f"{role}-{number}", "role": role, "url": url}
            for role, urls in (("prefill", site.prefill_urls), ("decode", site.decode_urls))
            for number, url in enumerate(urls)
        ],
    }
    if options.workers > 1:
        if "workers" not in RouterConfig.model_fields:
            sys.exit("this router has no `workers`")
        config["workers"] = options.workers
    path = processes.folder / f"router-{port}.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "kvdeploy.router", "--config", str(path)]
    pid = processes.start(f"kvdeploy-{port}", argv, cores.router)
    url = f"http://127.0.0.1:{port}"
    wait_ok(
        f"{url}/ready?complete=1", "kvdeploy's router", processes.folder / f"kvdeploy-{port}.log"
    )
    return Arm("kvdeploy", url, pid)


def start_vllm_router(
    processes: Processes, options: argparse.Namespace, site: Site, cores: Cores
) -> Arm:
    port, prometheus = find_ports(2)
    argv = [options.vllm_router, "--host=127.0.0.1", f"--port={port}"]
    argv += ["--vllm-pd-disaggregation", "--kv-connector=nixl", f"--prometheus-port={prometheus}"]
    for url in site.prefill_urls:
        argv += ["--prefill", url]
    for url in site.decode_urls:
        argv += ["--decode", url]
    argv += ["--worker-startup-check-interval=1", *options.vllm_router_arg]
    pid = processes.start(f"vllm-router-{port}", argv, cores.router)
    url = f"http://127.0.0.1:{port}"
    wait_ok(f"{url}/health", "vllm-router", processes.folder / f"vllm-router-{port}.log")
    return Arm("vllm-router", url, pid)


def starters(options: argparse.Namespace) -> Iterator[Callable[..., Arm]]:
    yield start_kvdeploy
    if options.vllm_router:
        yield start_vllm_router
