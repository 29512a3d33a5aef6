"""Which engine has seen the beginning of a prompt.

Owns how a beginning is named without a tokenizer, and a bounded memory of who was sent it. What
it says is a guess, good for a preference: engines forget without telling.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

CHARS_PER_TOKEN = 4
LONGEST = 128
"""KV blocks of a prompt that are named, at most."""
REMEMBERED = 16384
"""Beginnings that are kept."""


class Key(NamedTuple):
    """One beginning of a prompt."""

    digest: bytes
    tokens: int
    """Its length, estimated for text."""


class Place(NamedTuple):
    """A cache: that of one data parallel rank in one life of an engine."""

    engine: str
    rank: int | None
    epoch: int


def build_keys(prompt: object, block_size: int) -> tuple[Key, ...]:
    """Names of the prompt's first 1, 2, 4, ... whole blocks, the longest last.

    `prompt` is text, token ids or chat messages; of anything else nothing is known.
    """
    if isinstance(prompt, str):
        unit, data = block_size * CHARS_PER_TOKEN, _encode(prompt[: _chars(block_size)])
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        text = _join(prompt, _chars(block_size))
        unit, data = block_size * CHARS_PER_TOKEN, _encode(text)
    elif isinstance(prompt, list):
        try:
            unit, data = block_size, array("I", prompt[: block_size * LONGEST]).tobytes()
        except (TypeError, OverflowError):
            return ()
    else:
        return ()
    return tuple(_digest(data, unit * 4, block_size))


def _encode(text: str) -> bytes:
    """Four bytes a letter; JSON may hold halves of letters, which no other encoding takes."""
    return text.encode("utf-32-le", "surrogatepass")


def _digest(data: bytes, unit: int, block_size: int) -> Iterator[Key]:
    known = hashlib.blake2b(digest_size=12)
    done, blocks = 0, 1
    while blocks * unit <= len(data) and blocks <= LONGEST:
        known.update(data[done : blocks * unit])
        done = blocks * unit
        yield Key(known.digest(), blocks * block_size)
        blocks *= 2


def _chars(block_size: int) -> int:
    return block_size * CHARS_PER_TOKEN * LONGEST


def _join(messages: list[Any], limit: int) -> str:
    """Roles and texts of a conversation, as far as they are looked at."""
    parts: list[str] = []
    size = 0
    for message in messages:
        if size >= limit or not isinstance(message, dict):
            break
        content = message.get("content")
        texts = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            texts = [str(part.get("text", "")) for part in content if isinstance(part, dict)]
        parts += [f"\x00{message.get('role')}\x00", *(text[:limit] for text in texts)]
        size += sum(map(len, parts[-1 - len(texts) :]))
    return "".join(parts)[:limit]


class PrefixMemory:
    """Who was sent which beginnings, the latest first to be kept."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, dict[Place, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, keys: tuple[Key, ...], place: Place) -> None:
        for key in keys:
            places = self._seen.setdefault(key.digest, {})
            # An earlier life of the same cache has forgotten everything.
            for old in [p for p in places if p[:2] == place[:2] and p != place]:
                del places[old]
            places[place] = None
            self._seen.move_to_end(key.digest)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def cached_tokens(self, keys: tuple[Key, ...], place: Place) -> int:
        """The longest of the beginnings that was sent there."""
        for key in reversed(keys):
            if place in self._seen.get(key.digest, ()):
                return key.tokens
        return 0

    def places(self, keys: tuple[Key, ...], most: int) -> list[Place]:
        """Some that know the longest beginning that anybody knows."""
        for key in reversed(keys):
            if found := self._seen.get(key.digest):
                return list(found)[-most:]
        return []
