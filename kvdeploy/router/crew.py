"""Several router processes behind one port: begun, replaced, told and ended together.

Owns the workers' lives and the port's name. Serves no request itself and knows nothing of engines:
each worker is a whole router, and they share nothing but the port and a folder of counters.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from kvdeploy.errors import FleetError, SpecError
from kvdeploy.router.admin import HOST
from kvdeploy.router.foreman import Foreman
from kvdeploy.router.shared import Shared, forget_worker

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.model.routing import RouterConfig

log = logging.getLogger("kvdeploy.router")

FATAL: Final = {SpecError.exit_code, FleetError.exit_code}
"""How a worker ends that cannot begin at all; the next would end alike."""
GRACE_S: Final = 18.0
"""For workers to finish what they have begun: a little longer than they give it themselves."""
QUICK_S: Final = 5.0
MAX_PAUSE_S: Final = 10.0


class Crew:
    """The parent of all workers."""

    def __init__(self, path: Path, config: RouterConfig) -> None:
        self._path = path
        self._count = config.workers
        self._folder = tempfile.mkdtemp(prefix="kvdeploy-router-")
        self._alive: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._code = 0
        self._host, self._port = config.host, config.port
        self._reserved: list[socket.socket] = []
        self._admin_port = config.admin_port

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or until no worker can begin; the exit code. Raises OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._tell, signal.SIGHUP)
        foreman = Foreman(self._folder, self._count)
        try:
            self._reserve()
            log.info("listening host=%s port=%s workers=%s", self._host, self._port, self._count)
            if self._admin_port is not None:
                port = await foreman.start(self._admin_port)
                log.info("listening admin host=%s port=%s", HOST, port)
            keepers = [asyncio.create_task(self._keep(slot)) for slot in range(self._count)]
            watch = asyncio.create_task(self._watch_warmth())
            await self._stopping.wait()
            log.info("stopping %s workers, up to %s s", len(self._alive), GRACE_S)
            watch.cancel()
            self._tell(signal.SIGTERM)
            _, late = await asyncio.wait(keepers, timeout=GRACE_S)
            if late:
                self._tell(signal.SIGKILL)
                await asyncio.wait(late)
        finally:
            await foreman.stop()
            for held in self._reserved:
                held.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._code

    def _reserve(self) -> None:
        """Hold the port's name without listening, so that only our workers can listen there.

        The name is taken without SO_REUSEPORT, which finds any other holder, and shared only then.
        Raises OSError.
        """
        found = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            held = socket.socket(family, kind, protocol)
            self._reserved.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind(address)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port = self._reserved[0].getsockname()[1]

    async def _keep(self, slot: int) -> None:
        """One worker after another in this place, until told to stop."""
        loop = asyncio.get_running_loop()
        quick = 0
        while not self._stopping.is_set():
            began, is_first = loop.time(), slot not in self._alive
            try:
                worker = self._alive[slot] = await self._begin(slot)
            except OSError as e:
                log.error("worker=%s cannot be begun: %s", slot, e)  # noqa: TRY400
                await self._pause(MAX_PAUSE_S)
                continue
            code = await worker.wait()
            forget_worker(self._folder, slot)
            if self._stopping.is_set():
                return
            if is_first and code in FATAL:
                self._code = code
                self._stopping.set()
                return
            quick = quick + 1 if loop.time() - began < QUICK_S else 0
            pause_s = min(MAX_PAUSE_S, 0.25 * 2**quick) if quick else 0.0
            log.error("worker=%s %s; another in %s s", slot, _explain(code), pause_s)
            await self._pause(pause_s)

    async def _begin(self, slot: int) -> asyncio.subprocess.Process:
        # It hears a hangup once it can: until then that would be its end.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvdeploy.router", "--config", str(self._path),
                "--worker", str(slot), "--workers", str(self._count),
                "--port", str(self._port), "--folder", self._folder,
                stdin=asyncio.subprocess.PIPE,  # its end tells the worker that we are gone
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _tell(self, number: signal.Signals) -> None:
        for worker in self._alive.values():
            if worker.returncode is None:
                worker.send_signal(number)

    async def _watch_warmth(self) -> None:
        """Say when the whole crew is ready, and when it no longer is."""
        shared, was = Shared(self._folder), False
        while True:
            now = shared.is_complete(self._count)
            if now != was:
                words = "every pair is warm in each" if now else "not every pair is warm in each"
                log.info("%s: %s of %s workers", "ready" if now else "unready", words, self._count)
            was = now
            await asyncio.sleep(0.5)


def _explain(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
