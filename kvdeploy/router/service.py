"""The running router: its parts, put together and taken apart in order.

Owns what is alive between start and stop. A new configuration means a new Table here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from kvdeploy.router.app import build_app
from kvdeploy.router.attempts import Attempts
from kvdeploy.router.background import Background
from kvdeploy.router.client import EngineClient
from kvdeploy.router.dispatch import Dispatcher
from kvdeploy.router.flight import Wires
from kvdeploy.router.health import Supervisor
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.table import Table
from kvdeploy.router.warmup import Warmer

if TYPE_CHECKING:
    from kvdeploy.model.routing import RouterConfig
    from kvdeploy.router.auth import Keys

log = logging.getLogger(__name__)

DRAIN_S = 10.0
LEGS_S = 5.0


class Service:
    """Make one inside a running event loop."""

    def __init__(self, config: RouterConfig, keys: Keys) -> None:
        self.config = config
        self.keys = keys
        self.draining = False
        self.metrics = Metrics()
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
            access_log=None,
            shutdown_timeout=DRAIN_S,
        )

    async def start(self) -> int:
        """Listen and begin to look at the engines; the port. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port)
        await site.start()
        self._supervisor.start()
        port: int = self._runner.addresses[0][1]
        log.info(
            "listening host=%s port=%s mode=%s policy=%s engines=%s",
            self.config.host,
            port,
            self.config.usual_mode,
            self.config.policy,
            ",".join(self.table.engines),
        )
        return port

    async def stop(self) -> None:
        """Finish what is in flight, within bounds."""
        self.draining = True
        await self._runner.cleanup()
        await self._supervisor.stop()
        await self._background.drain(LEGS_S)
        await self.client.close()
