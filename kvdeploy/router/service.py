"""The running router: its parts, put together and taken apart in order.

Owns what is alive between start and stop, and what a new configuration changes of it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from kvdeploy.router import tls as certificates
from kvdeploy.router.admin import HOST, AdminRoutes, build_admin
from kvdeploy.router.app import build_app
from kvdeploy.router.attempts import Attempts
from kvdeploy.router.background import Background
from kvdeploy.router.client import EngineClient
from kvdeploy.router.dispatch import Dispatcher
from kvdeploy.router.flight import Wires
from kvdeploy.router.health import Supervisor
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.protocol import Protocol
from kvdeploy.router.shared import admin_socket, read_held
from kvdeploy.router.table import Table
from kvdeploy.router.warmup import Warmer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.router.reading import Reading
    from kvdeploy.router.shared import Place

log = logging.getLogger(__name__)

DRAIN_S = 10.0
LEGS_S = 5.0


def _no_file() -> str:
    return "this router was not started from a file"


class Service:
    """Make one inside a running event loop."""

    def __init__(self, given: Reading, place: Place | None = None) -> None:
        config = self.config = given.config
        self.keys = given.keys
        self.digest = given.digest
        """Of the files that were last taken up."""
        self._tls = given.tls
        self._place = place
        self.draining = False
        self.admin_port = 0
        """As it is; 0 where there is none of its own."""
        self.metrics = Metrics(place.folder if place else None)
        self.client = EngineClient(connect_s=config.deadlines.connect_s)
        self.table = Table(config, self.metrics)
        self._background = Background(self.metrics)
        wires = Wires(self.client, self.table, self.metrics)
        dispatcher = Dispatcher(wires, self._background)
        self.attempts = Attempts(self.table, dispatcher, self.metrics)
        self._supervisor = Supervisor(self.client, self.table, Warmer(self.table, dispatcher))
        self._runner = web.AppRunner(
            build_app(self),
            handler_cancellation=True,
            shutdown_timeout=DRAIN_S,
        )
        self._listener: asyncio.Server | None = None
        admin = build_admin(AdminRoutes(self))
        self._admin = web.AppRunner(admin, access_log=None, shutdown_timeout=0.1)
        self.reread: Callable[[], str] = _no_file
        """Reads the configuration again: what was wrong with it, or nothing."""

    async def start(self) -> int:
        """Listen and begin to look at the engines; the port. Raises OSError."""
        await self._start_admin()
        await self._runner.setup()
        # Not a site of aiohttp's: that would make connections of its own kind.
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None  # noqa: S101  # it was made above
        self._listener = await loop.create_server(
            partial(Protocol, self._runner.server, self.metrics, loop),
            self.config.host,
            self.config.port,
            ssl=self._tls,
            reuse_port=self._place is not None or None,
            backlog=128,
        )
        self._supervisor.sync()
        port: int = self._listener.sockets[0].getsockname()[1]
        log.info(
            "listening host=%s port=%s tls=%s mode=%s policy=%s engines=%s",
            self.config.host,
            port,
            self._tls is not None,
            self.config.usual_mode,
            self.config.policy,
            ",".join(self.table.engines),
        )
        if self.admin_port:
            log.info("listening admin host=%s port=%s", HOST, self.admin_port)
        return port

    @property
    def worker(self) -> int:
        """Which of several this is; 0 when it is alone."""
        return self._place.slot if self._place else 0

    def is_complete(self) -> bool:
        """Whether every pair is ready for the other workers as well."""
        shared, place = self.metrics.shared, self._place
        return shared is None or place is None or shared.is_complete(place.workers)

    async def _start_admin(self) -> None:
        """Raises OSError."""
        port, place = self.config.admin_port, self._place
        if port is None:
            return
        await self._admin.setup()
        if place is None:
            await web.TCPSite(self._admin, HOST, port).start()
            self.admin_port = int(self._admin.addresses[0][1])
            return
        path = admin_socket(place.folder, place.slot)
        Path(path).unlink(missing_ok=True)
        await web.UnixSite(self._admin, path).start()
        self._hold_again(place)

    def _hold_again(self, place: Place) -> None:
        """What an operator told the workers before this one was there."""
        for name in read_held(place.folder) & self.table.engines.keys():
            self.table.hold(self.table.engines[name], held=True)

    def reload(self, given: Reading) -> None:
        """Take a new configuration up. Requests under way keep what they have begun with.

        Raises SpecError: the certificate cannot be used; nothing was changed then.
        """
        wanted = given.config
        kept = wanted.keep_from_start(self.config)
        if self._tls and kept.tls_cert_file and kept.tls_key_file:
            certificates.load(self._tls, kept.tls_cert_file, kept.tls_key_file)
        was, now = kept.at_start(), wanted.at_start()
        if waiting := [name for name in was if was[name] != now[name]]:
            log.warning("changed at the next start only: %s", ", ".join(waiting))
        self.config, self.keys, self.digest = kept, given.keys, given.digest
        self.table.reload(kept)
        if self._place is not None:
            self._hold_again(self._place)
        self._supervisor.sync()
        self.metrics.reloads.labels("done").inc()
        log.info("reloaded engines=%s", ",".join(self.table.engines))

    async def stop(self) -> None:
        """Finish what is in flight, within bounds."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        await self._admin.cleanup()
        await self._supervisor.stop()
        await self._background.drain(LEGS_S)
        await self.client.close()
