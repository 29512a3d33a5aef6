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
        return tuple(_digest(prompt, block_size * CHARS_PER_TOKEN, block_size))
    if not isinstance(prompt, list):
        return ()
    if prompt and isinstance(prompt[0], dict):
        text = _join(prompt, block_size * CHARS_PER_TOKEN * LONGEST)
        return tuple(_digest(text, block_size * CHARS_PER_TOKEN, block_size))
    try:
        tokens = array("I", prompt[: block_size * LONGEST])
    except (TypeError, OverflowError):
        return ()
    return tuple(_digest(tokens, block_size, block_size))


def _digest(prompt: str | array[int], unit: int, block_size: int) -> Iterator[Key]:
    """`unit` letters or tokens are a block."""
    known = hashlib.blake2b(digest_size=12)
    done, blocks = 0, 1
    while blocks * unit <= len(prompt) and blocks <= LONGEST:
        piece = prompt[done : blocks * unit]
        # JSON may hold halves of letters.
        known.update(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece)
        done = blocks * unit
        yield Key(known.digest(), blocks * block_size)
        blocks *= 2


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
