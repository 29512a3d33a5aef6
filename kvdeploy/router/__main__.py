"""`kvdeploy-router --config FILE`: read the configuration, serve until told to stop.

The only place of the router that exits.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
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
from kvdeploy.router.service import DRAIN_S, Service

log = logging.getLogger("kvdeploy.router")


def read_config(path: Path) -> RouterConfig:
    """Raises SpecError with every problem of the file in one line."""
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
    return config


async def serve(path: Path) -> None:
    """Until SIGTERM or SIGINT; SIGHUP reads the configuration again. Raises KvdeployError."""
    config = read_config(path)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = Service(config, read_keys(config.api_key_file))
    service.reread = partial(reload, service, path)
    loop.add_signal_handler(signal.SIGHUP, service.reread)
    try:
        await service.start()
        # What is there now stays: a full collection need not walk it while tokens wait.
        gc.collect()
        gc.freeze()
        await stop.wait()
        log.info("stopping: no new connections, up to %s s for requests in flight", DRAIN_S)
    except OSError as e:
        taken = e.errno == errno.EADDRINUSE
        why = "the port is taken" if taken else (e.strerror or str(e))
        places = f"{config.host}:{config.port}"
        if config.admin_port is not None:
            places += f" and {HOST}:{config.admin_port}"
        message = f"the router cannot listen on {places}: {why}"
        hint = "see `ss -ltnp` for who listens there, or set another router port"
        raise FleetError(message, hint=hint) from e
    finally:
        await service.stop()


def reload(service: Service, path: Path) -> str:
    """What is wrong with the configuration: it then changes nothing. Nothing when it was read."""
    try:
        config = read_config(path)
        keys = read_keys(config.api_key_file)
    except KvdeployError as e:
        service.metrics.reloads.labels("refused").inc()
        log.error("not reloaded: %s", e.message)  # noqa: TRY400
        return e.message
    service.reload(config, keys)
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvdeploy-router",
        description="Route OpenAI requests to pairs of prefill and decode engines.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        uvloop.run(serve(options.config))
    except KvdeployError as e:
        log.error("%s%s", e.message, f" ({e.hint})" if e.hint else "")  # noqa: TRY400
        return e.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
