from __future__ import annotations

from kvdeploy.router.health import Strikes
from kvdeploy.router.policy import PairLoad, choose_pair, order_pairs

IDLE = [PairLoad("a/x", 0, 0), PairLoad("b/y", 0, 0), PairLoad("a/y", 0, 0)]


def test_idle_pairs_take_turns_under_either_policy() -> None:
    for policy in ("least-loaded", "round-robin"):
        chosen = [choose_pair(policy, IDLE, turn) for turn in range(4)]
        assert chosen == ["a/x", "b/y", "a/y", "a/x"]


def test_the_prefill_with_the_fewest_outstanding_tokens_is_preferred() -> None:
    loads = [PairLoad("a/x", 900, 0), PairLoad("b/x", 20, 0), PairLoad("a/y", 900, 0)]

    assert [choose_pair("least-loaded", loads, turn) for turn in range(3)] == ["b/x"] * 3


def test_among_equal_prefills_the_emptier_decode_is_preferred() -> None:
    loads = [PairLoad("a/x", 5, 3), PairLoad("a/y", 5, 2)]

    assert choose_pair("least-loaded", loads, 0) == "a/y"


def test_round_robin_does_not_look_at_loads() -> None:
    loads = [PairLoad("a/x", 900, 9), PairLoad("b/x", 0, 0)]

    assert choose_pair("round-robin", loads, 0) == "a/x"


def test_nothing_ready_is_nothing_chosen() -> None:
    assert choose_pair("least-loaded", [], 7) is None


def test_pairs_are_ordered_so_that_neighbours_share_no_engine() -> None:
    assert order_pairs(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y"), ("a", "y"), ("b", "x")]
    assert order_pairs(["a"], ["x", "y"]) == [("a", "x"), ("a", "y")]
    assert len(set(order_pairs(["a", "b", "c"], ["x", "y"]))) == 6


def test_a_refused_connection_takes_an_engine_out_at_once() -> None:
    assert Strikes().count("refused")


def test_a_sick_answer_must_come_twice_in_a_row() -> None:
    strikes = Strikes()

    assert [strikes.count(look) for look in ("sick", "ok", "sick", "sick")] == [
        False,
        False,
        False,
        True,
    ]


def test_a_slow_answer_is_not_death_until_the_third() -> None:
    strikes = Strikes()

    assert [strikes.count("slow") for _ in range(3)] == [False, False, True]
