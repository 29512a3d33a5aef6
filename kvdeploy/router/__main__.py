"""`kvdeploy-router --config FILE`: read the configuration, serve until told to stop.

The only place of the router that exits.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop
from pydantic import ValidationError

from kvdeploy.errors import FleetError, KvdeployError, SpecError
from kvdeploy.model.routing import MODES, RouterConfig
from kvdeploy.router.admin import HOST
from kvdeploy.router.auth import read_keys
from kvdeploy.router.crew import Crew
from kvdeploy.router.service import DRAIN_S, Service
from kvdeploy.router.shared import Place, share_values
from kvdeploy.router.tls import read_tls

log = logging.getLogger("kvdeploy.router")


def read_config(path: Path, place: Place | None = None) -> RouterConfig:
    """For a worker: its part. Raises SpecError with every problem of the file in one line."""
    hint = "the router reads the JSON that `kvdeploy up` writes; write it again"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        message = f"{path} cannot be read: {e}"
        raise SpecError(message, hint=hint) from e
    try:
        config = RouterConfig.model_validate_json(text)
    except ValidationError as e:
        problems = "; ".join(
            f"{'.'.join(map(str, p['loc'])) or 'file'}: {p['msg']}" for p in e.errors()
        )
        message = f"{path} is not a router configuration: {problems}"
        raise SpecError(message, hint=hint) from e
    if config.usual_mode not in MODES[config.mode]:
        message = (
            f"{path}: dispatch: engines with the {config.mode} connector cannot do "
            f"{config.usual_mode}; they can {', '.join(MODES[config.mode])}"
        )
        raise SpecError(message, hint=hint)
    names = [engine.name for engine in config.engines]
    if len(set(names)) != len(names):
        message = f"{path}: engines.name: each engine needs a name of its own, got {names}"
        raise SpecError(message, hint=hint)
    for role in ("prefill", "decode"):
        if not any(engine.role == role for engine in config.engines):
            message = f"{path}: engines: there is no {role} engine"
            raise SpecError(message, hint=hint)
    if config.is_open and not config.allow_anonymous:
        message = (
            f"{path}: host: {config.host} is reached from other machines, and no API keys are "
            "asked for"
        )
        raise SpecError(message, hint="set api_key_file, listen on 127.0.0.1, or allow_anonymous")
    if config.workers > 1 and config.admin_port is not None:
        message = f"{path}: admin_port: /admin speaks of one process, and there are several workers"
        raise SpecError(message, hint="leave admin_port out, or set workers to 1")
    if place is not None:
        config = config.share(place.workers).model_copy(update={"port": place.port})
    return config


async def serve(path: Path, place: Place | None = None) -> None:
    """Until SIGTERM or SIGINT; SIGHUP reads the configuration again. Raises KvdeployError."""
    config = read_config(path, place)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tls = read_tls(config.tls_cert_file, config.tls_key_file)
    service = Service(config, read_keys(config.api_key_file), tls, place)
    service.reread = partial(reload, service, path, place)
    loop.add_signal_handler(signal.SIGHUP, service.reread)
    if place is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        loop.add_reader(sys.stdin, stop.set)  # at its end there is no parent any more
    try:
        await service.start()
        await stop.wait()
        log.info("stopping: no new connections, up to %s s for requests in flight", DRAIN_S)
    except OSError as e:
        raise cannot_listen(config, e) from e
    finally:
        await service.stop()


def cannot_listen(config: RouterConfig, e: OSError) -> FleetError:
    taken = e.errno == errno.EADDRINUSE
    why = "the port is taken" if taken else (e.strerror or str(e))
    places = f"{config.host}:{config.port}"
    if config.admin_port is not None:
        places += f" and {HOST}:{config.admin_port}"
    message = f"the router cannot listen on {places}: {why}"
    hint = "see `ss -ltnp` for who listens there, or set another router port"
    return FleetError(message, hint=hint)


def reload(service: Service, path: Path, place: Place | None = None) -> str:
    """What is wrong with the configuration: it then changes nothing. Nothing when it was read."""
    try:
        config = read_config(path, place)
        keys = read_keys(config.api_key_file)
        read_tls(config.tls_cert_file, config.tls_key_file)
        service.reload(config, keys)
    except KvdeployError as e:
        service.metrics.reloads.labels("refused").inc()
        log.error("not reloaded: %s", e.message)  # noqa: TRY400
        return e.message
    return ""


def run(path: Path, place: Place | None) -> int:
    """A router alone, a worker of several, or their parent. Raises KvdeployError."""
    if place is None:
        config = read_config(path)
        read_keys(config.api_key_file)
        read_tls(config.tls_cert_file, config.tls_key_file)
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
