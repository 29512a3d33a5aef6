"""Takes secrets out of what is shown and logged, should a task forget `no_log`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STARS: Final = "***"


class Mask:
    """Replaces every text of `secrets`, at any depth, in any value."""

    def __init__(self, secrets: Mapping[str, Any]) -> None:
        words = {form for text in _texts(list(secrets.values())) for form in _forms(text)}
        self._words = sorted(words, key=len, reverse=True)  # a secret may begin as another does

    def __call__(self, value: Any) -> Any:  # noqa: ANN401
        match value:
            case str():
                for word in self._words:
                    value = value.replace(word, STARS)
                return value
            case dict():
                return {self(key): self(inner) for key, inner in value.items()}
            case list():
                return [self(inner) for inner in value]
            case _:
                return value


def _forms(text: str) -> Iterator[str]:
    """A text as it is, and as it looks within a text that JSON or Python wrote."""
    if text:
        yield from (text, json.dumps(text)[1:-1], repr(text)[1:-1])


def _texts(value: Any) -> Iterator[str]:  # noqa: ANN401
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)
        case _:
            pass
