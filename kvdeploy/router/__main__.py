"""`kvdeploy-router --config FILE`: read the configuration, serve until told to stop.

The only place of the router that exits.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from kvdeploy.errors import FleetError, KvdeployError
from kvdeploy.router.admin import HOST
from kvdeploy.router.crew import Crew
from kvdeploy.router.reading import Reading, read
from kvdeploy.router.service import DRAIN_S, Service
from kvdeploy.router.shared import Place, share_values

if TYPE_CHECKING:
    from kvdeploy.model.routing import RouterConfig

log = logging.getLogger("kvdeploy.router")


async def serve(path: Path, place: Place | None = None) -> None:
    """Until SIGTERM or SIGINT; SIGHUP reads the configuration again. Raises KvdeployError."""
    given = read_part(path, place)
    stop, orphaned = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = Service(given, place)
    service.reread = partial(reload, service, path, place)
    loop.add_signal_handler(signal.SIGHUP, service.reread)
    if place is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

        def lose_parent() -> None:
            """Their pipe has come to its end."""
            orphaned.set()
            stop.set()

        loop.add_reader(sys.stdin, lose_parent)
    try:
        await service.start()
        # What is there now stays: a full collection need not walk it while tokens wait.
        gc.collect()
        gc.freeze()
        await stop.wait()
        log.info("stopping: no new connections, up to %s s for requests in flight", DRAIN_S)
    except OSError as e:
        raise cannot_listen(given.config, e) from e
    finally:
        await service.stop()
        if place is not None and orphaned.is_set():
            shutil.rmtree(place.folder, ignore_errors=True)  # nobody else will


def read_part(path: Path, place: Place | None) -> Reading:
    """Raises SpecError."""
    given = read(path)
    return given.share(place) if place else given


def cannot_listen(config: RouterConfig, e: OSError) -> FleetError:
    taken = e.errno == errno.EADDRINUSE
    why = "the port is taken" if taken else (e.strerror or str(e))
    places = f"{config.host}:{config.port}"
    if config.admin_port is not None:
        places += f" and {HOST}:{config.admin_port}"
    message = f"the router cannot listen on {places}: {why}"
    hint = "see `ss -ltnp` for who listens there, or set another router port"
    return FleetError(message, hint=hint)


def reload(service: Service, path: Path, place: Place | None) -> str:
    """What is wrong with the configuration: it then changes nothing. Nothing when it was read."""
    try:
        service.reload(read_part(path, place))
    except KvdeployError as e:
        service.metrics.reloads.labels("refused").inc()
        log.error("not reloaded: %s", e.message)  # noqa: TRY400
        return e.message
    return ""


def run(path: Path, place: Place | None) -> int:
    """A router alone, a worker of several, or their parent. Raises KvdeployError."""
    if place is None:
        config = read(path).config
        if config.workers > 1:
            try:
                return asyncio.run(Crew(path, config).run())
            except OSError as e:
                raise cannot_listen(config, e) from e
    else:
        share_values(place.folder, place.slot)
    uvloop.run(serve(path, place))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvdeploy-router",
        description="Route OpenAI requests to pairs of prefill and decode engines.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    for name in ("--worker", "--workers", "--port"):  # between a parent and its workers
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    place = None
    if options.worker is not None:
        place = Place(
            slot=options.worker,
            workers=options.workers,
            port=options.port,
            folder=options.folder,
        )
    worker = f"worker={place.slot} " if place else ""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s %(name)s {worker}%(message)s",
    )
    try:
        return run(options.config, place)
    except KvdeployError as e:
        log.error("%s%s", e.message, f" ({e.hint})" if e.hint else "")  # noqa: TRY400
        return e.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
