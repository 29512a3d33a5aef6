"""The prompts of each scenario, as token ids. Pure: the same seed and mark make the same prompts.

A run's mark is the beginning of its prompts, so that no cache holds them from another run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.model.bench import Cell

MARK_TOKENS: Final = 4
SHARED_PART: Final = 0.9
REPEATED: Final = 2
"""Prompts that each client of `repeat` asks in turn."""
TURNS: Final = 4
LEAST_NEW: Final = 8
"""Tokens that a turn adds to the answer before it, at least."""
SCATTERING: Final = 4
"""Warm-up requests of a client of `fragmented`."""


class Script(Protocol):
    """What one client asks, one prompt after another."""

    def warm_up(self) -> list[list[int]]:
        """Asked first; does not count."""

    def next(self, answer: Sequence[int]) -> list[int]:
        """The next prompt, after the `answer` to the last."""


class Words:
    """Tokens from the middle of a vocabulary: special ones are at its ends."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # nothing secret
        self._range = range(vocabulary // 10, vocabulary * 9 // 10)

    def pick(self, count: int) -> list[int]:
        return self._random.choices(self._range, k=count)

    def between(self, least: int, most: int) -> int:
        return self._random.randint(least, most)


class Unique:
    def __init__(self, words: Words, mark: list[int], cell: Cell) -> None:
        self._words, self._mark, self._cell = words, mark, cell

    def warm_up(self) -> list[list[int]]:
        return [self.next(())]

    def next(self, answer: Sequence[int]) -> list[int]:  # noqa: ARG002
        # The mark alone is the same for all of a run; a whole block never is.
        return self._words.pick(MARK_TOKENS) + self._mark + self._words.pick(self._rest)

    @property
    def _rest(self) -> int:
        return self._cell.input_tokens - 2 * MARK_TOKENS


class Shared:
    def __init__(self, words: Words, beginning: list[int], cell: Cell) -> None:
        self._words, self._beginning, self._cell = words, beginning, cell

    def warm_up(self) -> list[list[int]]:
        return [self.next(())]

    def next(self, answer: Sequence[int]) -> list[int]:  # noqa: ARG002
        rest = self._cell.input_tokens - len(self._beginning)
        return self._beginning + self._words.pick(rest)


class Repeat:
    def __init__(self, words: Words, mark: list[int], cell: Cell) -> None:
        unique = Unique(words, mark, cell)
        self._prompts = [unique.next(()) for _ in range(REPEATED)]
        self._turn = 0

    def warm_up(self) -> list[list[int]]:
        return self._prompts

    def next(self, answer: Sequence[int]) -> list[int]:  # noqa: ARG002
        self._turn += 1
        return self._prompts[self._turn % REPEATED]


class Turns:
    """Where the engine does not tell the tokens of its answer, others stand for them."""

    def __init__(self, words: Words, mark: list[int], cell: Cell) -> None:
        self._words, self._mark, self._cell = words, mark, cell
        self._prompt: list[int] = []
        self._turn = 0

    def warm_up(self) -> list[list[int]]:
        return [self._begin()]

    def next(self, answer: Sequence[int]) -> list[int]:
        at = self._turn % TURNS
        self._turn += 1
        if at == 0:
            self._prompt = self._begin()
        else:
            first = self._cell.input_tokens // 2
            grow = (self._cell.input_tokens - first) // (TURNS - 1) - self._cell.output_tokens
            said = list(answer) or self._words.pick(self._cell.output_tokens)
            self._prompt = self._prompt + said + self._words.pick(max(LEAST_NEW, grow))
        return self._prompt

    def _begin(self) -> list[int]:
        rest = self._cell.input_tokens // 2 - 2 * MARK_TOKENS
        return self._words.pick(MARK_TOKENS) + self._mark + self._words.pick(rest)


class Fragmented(Unique):
    def warm_up(self) -> list[list[int]]:
        least = 2 * MARK_TOKENS + 1
        lengths = (self._words.between(least, self._cell.input_tokens) for _ in range(SCATTERING))
        return [self.next(())[:length] for length in lengths]


def longest_prompt(cell: Cell) -> int:
    """Tokens of the longest prompt that a script of the cell makes."""
    if cell.scenario != "turns":
        return cell.input_tokens
    first = cell.input_tokens // 2
    grow = (cell.input_tokens - first) // (TURNS - 1)
    return first + (TURNS - 1) * max(grow, cell.output_tokens + LEAST_NEW)


LEAST_INPUT: Final = 2 * (2 * MARK_TOKENS + 1)
"""Of a cell: the shortest that every scenario makes prompts of."""


def build_scripts(cell: Cell, *, seed: int, mark: str, vocabulary: int) -> list[Script]:
    """One script for each client of a run. `mark` tells the run from every other."""
    marked = Words(mark, vocabulary).pick(MARK_TOKENS)
    shared = round(cell.input_tokens * SHARED_PART) - MARK_TOKENS
    beginning = marked + Words(f"{seed} {cell} shared", vocabulary).pick(max(0, shared))
    scripts: list[Script] = []
    for client in range(cell.concurrency):
        words = Words(f"{seed} {cell} {client}", vocabulary)
        match cell.scenario:
            case "shared":
                scripts.append(Shared(words, beginning, cell))
            case "repeat":
                scripts.append(Repeat(words, marked, cell))
            case "turns":
                scripts.append(Turns(words, marked, cell))
            case "fragmented":
                scripts.append(Fragmented(words, marked, cell))
            case _:
                scripts.append(Unique(words, marked, cell))
    return scripts
