"""The choice of engines, over a table that is warm."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest

from kvdeploy.router.choose import Chooser
from kvdeploy.router.gauges import KvGauges
from kvdeploy.router.legs import Job
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.prefix import build_keys
from kvdeploy.router.table import Table
from tests.router.harness import build_config, run_fleet
from tests.router.scripted import Fabric, ScriptedEngine

BLOCK = 128


def build_table(prefills: int, decodes: int, dp_size: int = 1, **changes: Any) -> Table:
    fabric = Fabric()
    names = [("prefill", i) for i in range(prefills)] + [("decode", i) for i in range(decodes)]
    engines = [ScriptedEngine(f"{r}-{i}", r, fabric, dp_size=dp_size) for r, i in names]
    table = Table(build_config(engines, **changes), Metrics())
    for engine in table.engines.values():
        engine.up = True
    for pair in table.pairs.values():
        pair.warmed = pair.epochs
    table.refresh()
    return table


def build_chooser(table: Table) -> Chooser:
    return Chooser(table, Metrics(), random.Random(1))


def job(text: str = "", tokens: int = 100) -> Job:
    return Job(
        endpoint="/v1/completions",
        raw=b"",
        body={},
        request_id="r",
        prompt_tokens=tokens,
        prefix=build_keys(text, BLOCK),
    )


def anyone(*_: object) -> bool:
    return True


def choose(chooser: Chooser, what: Job, times: int = 1) -> list[str]:
    routes = [chooser.choose(what, anyone) for _ in range(times)]
    return [route.name if route else "" for route in routes]


def test_nothing_ready_is_nothing_chosen() -> None:
    table = build_table(1, 1)
    table.eject(table.engines["decode-0"], "gone")
    assert build_chooser(table).choose(job(), anyone) is None


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 2), (1, 3), (3, 2), (4, 4)])
def test_idle_pairs_take_turns(policy: str, prefills: int, decodes: int) -> None:
    table = build_table(prefills, decodes, policy=policy)
    used = Counter(choose(build_chooser(table), job(), 2 * prefills * decodes))
    assert used == dict.fromkeys(table.pairs, 2)


def test_the_prefill_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    table = build_table(3, 1)
    for name, load in (("prefill-0", 900), ("prefill-1", 20), ("prefill-2", 300)):
        table.engines[name].prompt_tokens = load
    assert choose(build_chooser(table), job(), 3) == ["prefill-1/decode-0"] * 3


def test_the_decode_with_the_fewest_requests_is_chosen() -> None:
    table = build_table(1, 3)
    for name, load in (("decode-0", 3), ("decode-1", 4), ("decode-2", 2)):
        table.engines[name].requests = load
    assert choose(build_chooser(table), job(), 3) == ["prefill-0/decode-2"] * 3


def test_a_decode_whose_cache_is_full_is_passed_over() -> None:
    table = build_table(1, 2)
    table.engines["decode-0"].kv = KvGauges(used_share=0.99, blocks=100, busy=9)
    table.engines["decode-1"].requests = 5
    assert choose(build_chooser(table), job()) == ["prefill-0/decode-1"]


def test_round_robin_does_not_look_at_loads() -> None:
    table = build_table(2, 1, policy="round-robin")
    table.engines["prefill-0"].prompt_tokens = 900
    assert choose(build_chooser(table), job(), 2) == ["prefill-0/decode-0", "prefill-1/decode-0"]


def test_a_shared_beginning_stays_where_it_was_until_that_engine_has_too_much_to_do() -> None:
    table = build_table(2, 2)
    chooser = build_chooser(table)
    shared = job("s" * 4 * BLOCK * 8, tokens=BLOCK * 8)
    [first] = choose(chooser, shared)
    assert choose(chooser, shared, 5) == [first] * 5

    prefill, decode = first.split("/")
    table.engines[prefill].prompt_tokens = BLOCK * 8 + 1
    [moved] = choose(chooser, shared)
    assert moved.split("/")[0] != prefill
    assert moved.split("/")[1] == decode


def test_the_beginning_also_chooses_the_data_parallel_rank() -> None:
    table = build_table(1, 1, dp_size=4)
    chooser = build_chooser(table)
    shared = job("s" * 4 * BLOCK * 8, tokens=BLOCK * 8)
    routes = [chooser.choose(what, anyone) for what in (shared, job(), shared, shared)]
    ranks = [(r.prefill_rank, r.decode_rank) for r in routes if r]

    assert ranks == [(0, 0), (1, 1), (0, 0), (0, 0)]


def test_what_is_not_allowed_is_not_chosen_even_when_all_that_was_looked_at_is_not() -> None:
    table = build_table(64, 64)
    only = ("prefill-63", "decode-63")
    route = build_chooser(table).choose(job(), lambda p, d: (p.name, d.name) == only)
    assert route
    assert route.name == "/".join(only)


def test_in_a_large_fleet_a_known_beginning_is_among_those_looked_at() -> None:
    chooser = build_chooser(build_table(64, 64))
    shared = job("s" * 4 * BLOCK * 8, tokens=BLOCK * 8)
    assert len(set(choose(chooser, shared, 20))) == 1


def test_a_large_fleet_is_used_evenly() -> None:
    table = build_table(64, 64)
    chooser = build_chooser(table)
    for _ in range(64 * 4):
        route = chooser.choose(job(), anyone)
        assert route
        route.prefill.prompt_tokens += 100
        route.decode.requests += 1
    assert max(e.prompt_tokens for e in table.open_prefills) <= 600
    assert max(e.requests for e in table.partners(table.open_prefills[0])) <= 6


def count_calls(prefills: int, decodes: int) -> int:
    """Python and built-in calls of a choice: what it costs, without a clock."""
    chooser = build_chooser(build_table(prefills, decodes))
    chooser.choose(job("s" * 4 * BLOCK * 8), anyone)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        chooser.choose(job("t" * 4 * BLOCK * 8), anyone)
    finally:
        sys.setprofile(None)
    return calls


def test_a_choice_among_64_x_64_costs_what_one_among_8_x_8_does() -> None:
    assert count_calls(64, 64) < 2 * count_calls(8, 8)


@pytest.mark.loopback
async def test_choices_are_counted_by_engine_and_cause() -> None:
    async with run_fleet(2, 1, block_size=4) as fleet:
        for _ in range(2):
            assert (await fleet.post(prompt="p" * 64))[0] == 200
        name = 'kvdeploy_router_choices_total{by="%s",engine="%s"}'
        assert await fleet.metric(name % ("load", "prefill-0")) == 1
        assert await fleet.metric(name % ("prefix", "prefill-0")) == 1
        assert await fleet.metric(name % ("load", "prefill-1")) == 0
        assert await fleet.metric(name % ("prefix", "decode-0")) == 1
