"""The rule of `prefill_at_once: auto` in a simulation: not a measurement of real engines."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.admission_sim import LIMITS, MEASURED, WORKLOADS, Costs, Simulation, simulate

SEEDS = (1, 2)
TWO_GPUS, ONE_GPU = Costs(), Costs(beside=2.2)


def find_p50(
    workload: str, clients: int, limit: object, *, costs: Costs = TWO_GPUS, seconds: float = 30
) -> float:
    assert limit in LIMITS
    seen = [
        simulate(workload, clients, limit, seed=seed, seconds=seconds, costs=costs)
        for seed in SEEDS
    ]
    return statistics.mean(result.percentile(50) for result in seen)


def compare_auto(
    workload: str, clients: int, costs: Costs = TWO_GPUS, seconds: float = 30
) -> float:
    """Its TTFT p50 over that of the best fixed limit."""
    fixed = (
        find_p50(workload, clients, limit, costs=costs, seconds=seconds)
        for limit in LIMITS
        if limit != "auto" and (limit is None or limit <= clients)
    )
    return find_p50(workload, clients, "auto", costs=costs, seconds=seconds) / min(fixed)


@pytest.mark.parametrize("workload", ["shared", "unshared", "short", "long-answers"])
@pytest.mark.parametrize("clients", [4, 16, 48])
def test_auto_is_within_a_tenth_of_the_best_fixed_limit(workload: str, clients: int) -> None:
    assert compare_auto(workload, clients) <= 1.1


@pytest.mark.parametrize("clients", [4, 16])
def test_auto_is_within_a_tenth_where_engines_share_a_gpu(clients: int) -> None:
    """Prompts wait there at every limit."""
    assert compare_auto("shared", clients, ONE_GPU, seconds=60) <= 1.1


def test_a_wrong_fixed_limit_costs_a_factor() -> None:
    """What the rule is for: one number that is best under one load is bad under another."""
    p50 = {(n, k): find_p50("shared", n, k) for n in (4, 16, 48) for k in (1, 2, 4, 16, None)}
    assert p50[4, None] > 1.8 * p50[4, 1]
    assert p50[16, 1] > 3 * p50[16, 2]
    assert p50[16, None] > 4 * p50[16, 2]
    assert p50[48, 2] > 1.8 * p50[48, 16]


@pytest.mark.parametrize(("clients", "limit"), [k for k in MEASURED if k != (16, 2)])
def test_the_simulation_is_near_what_was_measured_on_gpus(clients: int, limit: int | None) -> None:
    """Within a third; two at once for 16 clients is much better in the simulation."""
    ratio = find_p50("shared", clients, limit) / MEASURED[clients, limit]
    assert 2 / 3 < ratio < 4 / 3


def test_the_limit_follows_a_load_that_changes() -> None:
    simulation = Simulation(WORKLOADS["shared"], "auto", seconds=60, seed=1, costs=Costs())
    for at, clients in ((0, 4), (15, 48), (35, 4)):
        simulation.set_clients(at, clients)
    limits = {}
    for at in (14, 34, 59):
        simulation.run(until=at)
        limits[at] = simulation.limit
    assert limits[14] == 1
    assert limits[34] >= 8
    assert limits[59] == 1
