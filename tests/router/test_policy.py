from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdeploy.router.health import Strikes
from kvdeploy.router.policy import (
    LOOKS,
    NO_ROOM,
    decode_cost,
    look_at,
    order_pairs,
    prefill_cost,
    rank,
)

tokens = st.integers(min_value=0, max_value=1_000_000)
shares = st.floats(min_value=0, max_value=1)


def decode(requests: int, **known: float) -> float:
    facts: dict[str, object] = {"prompt": 100, "cached": 0, "used_share": None}
    facts |= {"free_tokens": None, **known}
    return decode_cost(requests=requests, **facts)  # type: ignore[arg-type]


# --- prefill ---------------------------------------------------------------------------------
@given(tokens, tokens, tokens, tokens)
def test_a_cached_prefix_draws_a_prompt_exactly_as_far_as_it_saves_work(
    here: int, there: int, prompt: int, cached: int
) -> None:
    with_cache = prefill_cost(outstanding=here, prompt=prompt, cached=cached)
    without = prefill_cost(outstanding=there, prompt=prompt, cached=0)

    assert (with_cache < without) == (here - there < min(cached, prompt))


@given(tokens, tokens, tokens)
def test_a_prefill_that_has_more_to_do_is_never_cheaper(
    outstanding: int, more: int, prompt: int
) -> None:
    less = prefill_cost(outstanding=outstanding, prompt=prompt, cached=0)
    assert less <= prefill_cost(outstanding=outstanding + more, prompt=prompt, cached=0)


# --- decode ----------------------------------------------------------------------------------
def test_the_decode_with_the_fewest_requests_is_cheapest() -> None:
    assert decode(2) < decode(3)


def test_a_full_cache_weighs_more_than_a_few_requests_and_half_a_cache_nothing() -> None:
    assert decode(4, used_share=0.1) < decode(0, used_share=0.95)
    assert decode(1, used_share=0.5) == decode(1, used_share=0.0) == decode(1)


def test_a_decode_without_room_for_the_prompt_is_the_last_resort() -> None:
    assert decode(0, free_tokens=99) > decode(500, free_tokens=100)
    assert decode(0, free_tokens=99, cached=50) < NO_ROOM / 2, "what it has needs no room"


def test_a_prompt_that_decode_has_is_worth_a_request_and_no_more() -> None:
    assert decode(1, cached=80) < decode(1)
    assert decode(2, cached=100) == decode(1)


@given(st.integers(0, 10_000), shares, st.integers(1, 100_000), tokens)
def test_decodes_cost_grows_with_its_requests_and_its_fullness(
    requests: int, used: float, prompt: int, cached: int
) -> None:
    facts = {"prompt": prompt, "cached": cached}
    cost = decode(requests, used_share=used, **facts)
    assert cost < decode(requests + 1, used_share=used, **facts)
    assert cost <= decode(requests, used_share=1.0, **facts)


# --- looking ---------------------------------------------------------------------------------
@given(st.integers(0, 200), st.integers(0, 10_000))
def test_a_look_is_at_few_engines_and_at_none_twice(count: int, turn: int) -> None:
    seen = look_at(range(count), turn, random.Random(turn))

    assert len(seen) == len(set(seen)) == min(count, LOOKS)
    assert set(seen) <= set(range(count))


@given(st.integers(1, LOOKS))
def test_equals_of_a_small_fleet_take_turns(count: int) -> None:
    first = [look_at(range(count), turn, random.Random(0))[0] for turn in range(2 * count)]
    assert first == [*range(count), *range(count)]


def test_a_look_at_a_large_fleet_sees_everybody_in_time() -> None:
    rng = random.Random(7)
    assert {e for turn in range(200) for e in look_at(range(64), turn, rng)} == set(range(64))


@given(st.lists(st.floats(allow_nan=False), max_size=12))
def test_places_are_ranked_from_the_cheapest_on_and_equals_keep_their_order(
    costs: list[float],
) -> None:
    order = rank(costs)

    assert sorted(order) == list(range(len(costs)))
    assert order == sorted(order, key=lambda i: (costs[i], i))


def test_pairs_are_ordered_so_that_neighbours_share_no_engine() -> None:
    assert order_pairs(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y"), ("a", "y"), ("b", "x")]
    assert order_pairs(["a"], ["x", "y"]) == [("a", "x"), ("a", "y")]
    assert len(set(order_pairs(["a", "b", "c"], ["x", "y"]))) == 6


# --- looks at health -------------------------------------------------------------------------
def test_a_refused_connection_takes_an_engine_out_at_once() -> None:
    assert Strikes().count("refused")


@pytest.mark.parametrize(("looks", "out"), [
    (("sick", "ok", "sick", "sick"), [False, False, False, True]),
    (("slow", "slow", "slow"), [False, False, True]),
])  # fmt: skip
def test_a_sick_answer_must_come_twice_and_a_slow_one_thrice_in_a_row(
    looks: tuple[str, ...], out: list[bool]
) -> None:
    strikes = Strikes()
    assert [strikes.count(look) for look in looks] == out  # type: ignore[arg-type]
