"""All that a router is told by files, read at its start and at every hangup.

Owns what makes a configuration wrong, and the name of what was read: whoever wrote the files can
ask the router whether it has taken them up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kvdeploy.errors import SpecError
from kvdeploy.model.routing import MODES, RouterConfig
from kvdeploy.router.auth import Keys, read_keys
from kvdeploy.router.tls import read_tls

if TYPE_CHECKING:
    import ssl

    from kvdeploy.router.shared import Place


@dataclass(frozen=True, kw_only=True)
class Reading:
    config: RouterConfig
    keys: Keys
    tls: ssl.SSLContext | None
    digest: str = ""
    """Of the content of every file."""

    def share(self, place: Place) -> Reading:
        """The part of one of several workers."""
        part = self.config.share(place.workers).model_copy(update={"port": place.port})
        return replace(self, config=part)


def read(path: Path) -> Reading:
    """Raises SpecError: one of the files cannot be used."""
    config = read_config(path)
    keys = read_keys(config.api_key_file)
    tls = read_tls(config.tls_cert_file, config.tls_key_file)
    files = (str(path), config.api_key_file, config.tls_cert_file, config.tls_key_file)
    digest = hashlib.sha256()
    for content in (Path(file).read_bytes() for file in files if file is not None):
        digest.update(hashlib.sha256(content).digest())
    return Reading(config=config, keys=keys, tls=tls, digest=digest.hexdigest()[:16])


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
    if config.is_open and not config.allow_anonymous:
        message = (
            f"{path}: host: {config.host} is reached from other machines, and no API keys are "
            "asked for"
        )
        raise SpecError(message, hint="set api_key_file, listen on 127.0.0.1, or allow_anonymous")
    return config
