"""API keys: read once, compared in constant time. Never logs or keeps a key in the clear."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from kvdeploy.errors import SpecError
from kvdeploy.model.listing import HASHED, entries


class Keys:
    """The accepted keys; none at all means that every request is welcome.

    An entry is a key, or `sha256:` and the hash of one in 64 hexadecimal digits.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, authorization: str | None) -> bool:
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def read_keys(path: str | None) -> Keys:
    """One entry a line; blank lines and # comments do not count. Raises SpecError."""
    if path is None:
        return Keys([])
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        message = f"the API key file {path} cannot be read: {e}"
        raise SpecError(message, hint="give the router a readable file, one key a line") from e
    keys = entries(text)
    if not keys:
        message = f"the API key file {path} holds no key"
        raise SpecError(message, hint="put one key a line into it, or drop api_key_file")
    for number, key in enumerate(keys, start=1):
        if key.startswith(HASHED) and not re.fullmatch(HASHED + "[0-9a-f]{64}", key):
            message = f"the API key file {path}: key {number} begins with {HASHED} and is no hash"
            raise SpecError(message, hint="printf %s KEY | sha256sum makes the 64 digits")
    return Keys(keys)


def _digest(key: str) -> bytes:
    if key.startswith(HASHED):
        return bytes.fromhex(key.removeprefix(HASHED))
    return hashlib.sha256(key.encode()).digest()
