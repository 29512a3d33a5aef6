from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdeploy.router.prefix import LONGEST, Place, PrefixMemory, build_keys

HERE, THERE = Place("prefill-0", None, 1), Place("prefill-1", None, 1)
BLOCK = 4


def text(blocks: float, letter: str = "a") -> str:
    return letter * int(blocks * BLOCK * 4)


@pytest.mark.parametrize(("prompt", "lengths"), [
    (text(0.9), []),
    (text(1), [4]),
    (text(7.5), [4, 8, 16]),
    (text(8), [4, 8, 16, 32]),
    (text(3000), [4, 8, 16, 32, 64, 128, 256, BLOCK * LONGEST]),
    ([7] * 9, [4, 8]),
    ([7] * 3, []),
    ([[1, 2], [3]], []),
    (["one", "two"], []),
    ([1, -1, 2, 3, 4], []),
    ([2**70] * 8, []),
    ([True, None, 1.5, 3], []),
    (None, []),
    ([{"role": "user", "content": text(2)}], [4, 8]),
    ([{"role": "user", "content": [{"type": "text", "text": text(2)}, {"type": "image_url"}, 7]}],
     [4, 8]),
    ([{"content": None}, "x", 7], []),
    ([{"role": "user", "content": "\ud800" * 99}], [4, 8, 16]),
    ("\ud800" * 20, [4]),
])  # fmt: skip
def test_a_prompt_is_named_by_its_whole_leading_blocks(prompt: Any, lengths: list[int]) -> None:
    assert [key.tokens for key in build_keys(prompt, BLOCK)] == lengths


@given(st.integers(0, 40), st.text(max_size=40), st.text(max_size=40))
def test_prompts_share_the_names_of_what_they_share_and_no_more(
    blocks: int, one: str, other: str
) -> None:
    first, second = text(blocks) + "1" + one, text(blocks) + "2" + other
    shared = {*build_keys(first, BLOCK)} & {*build_keys(second, BLOCK)}

    assert {key.tokens for key in shared} == {4 * 2**i for i in range(9) if 2**i <= blocks}


def test_the_roles_of_messages_count() -> None:
    keys = {build_keys([{"role": r, "content": text(2)}], BLOCK)[0] for r in ("user", "system")}
    assert len(keys) == 2


def test_the_longest_beginning_that_a_place_was_sent_is_found() -> None:
    memory = PrefixMemory()
    memory.note(build_keys(text(4), BLOCK), HERE)
    keys = build_keys(text(2) + text(2, "b"), BLOCK)

    assert memory.cached_tokens(keys, HERE) == 8
    assert memory.cached_tokens(keys, THERE) == 0
    assert memory.cached_tokens((), HERE) == 0
    assert memory.places(keys, 2) == [HERE]


def test_an_engine_that_began_a_new_life_has_forgotten() -> None:
    memory = PrefixMemory()
    keys = build_keys(text(4), BLOCK)
    reborn = HERE._replace(epoch=2)
    memory.note(keys, HERE)
    assert memory.cached_tokens(keys, reborn) == 0
    memory.note(keys, reborn)
    assert memory.places(keys, 9) == [reborn]


def test_the_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    memory = PrefixMemory(limit=3)
    kept, dropped = build_keys(text(1, "k"), BLOCK), build_keys(text(1, "d"), BLOCK)
    for keys in (dropped, kept, build_keys(text(1, "e"), BLOCK), kept):
        memory.note(keys, HERE)
    for letter in "fg":
        memory.note(build_keys(text(1, letter), BLOCK), HERE)

    assert len(memory) == 3
    assert memory.cached_tokens(kept, HERE) == 4
    assert memory.cached_tokens(dropped, HERE) == 0
