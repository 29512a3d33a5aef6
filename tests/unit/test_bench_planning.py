"""What a bench asks, in what order, and which figures its samples carry."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvdeploy.model.bench import SCENARIOS, Cell, Moved, Run, Sample
from kvdeploy.planning.bench import figures, matrix, prompts
from kvdeploy.planning.bench.figures import Group, TooFewError, find_statistic
from kvdeploy.planning.bench.matrix import Wishes, build_cells

if TYPE_CHECKING:
    from kvdeploy.model.routing import Mode

VOCABULARY = 32_000
BLOCK = 16


def cell(scenario: str = "unique", tokens: int = 400, output: int = 16, clients: int = 3) -> Cell:
    return Cell(scenario=scenario, input_tokens=tokens, output_tokens=output, concurrency=clients)


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))


def ask(scripts: list[prompts.Script], turns: int, answer: list[int]) -> list[list[int]]:
    return [script.next(answer) for _ in range(turns) for script in scripts]


def scripts(of: Cell, mark: str = "m", seed: int = 0) -> list[prompts.Script]:
    return prompts.build_scripts(of, seed=seed, mark=mark, vocabulary=VOCABULARY)


# --- prompts ---------------------------------------------------------------------------------
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_prompt_of_another_run_begins_alike(scenario: str) -> None:
    """Not even for the block that is the smallest unit of a cache: the mark is within it."""
    of = cell(scenario)
    asked = [ask(scripts(of, mark), 4, [5] * 16) for mark in ("push 1", "push 2")]
    shared = max(common(a, b) for a in asked[0] for b in asked[1])
    assert shared < BLOCK


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_and_mark_make_the_same_prompts_and_another_seed_others(
    scenario: str,
) -> None:
    of = cell(scenario)
    one, same, other = (ask(scripts(of, seed=s), 4, [5] * 16) for s in (0, 0, 1))
    assert one == same
    assert one != other


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_are_ordinary_ones_and_no_prompt_is_longer_than_is_told(scenario: str) -> None:
    of = cell(scenario)
    made = scripts(of)
    asked = [p for s in made for p in s.warm_up()] + ask(made, 9, [4000] * of.output_tokens)
    assert {min(itertools.chain(*asked)) >= 3200, max(itertools.chain(*asked)) < 28800} == {True}
    assert max(map(len, asked)) <= prompts.longest_prompt(of) <= 400


@pytest.mark.parametrize("scenario", ["unique", "fragmented", "long"])
def test_unique_prompts_share_no_block(scenario: str) -> None:
    asked = ask(scripts(cell(scenario)), 5, [])
    assert max(common(a, b) for a, b in itertools.combinations(asked, 2)) < BLOCK
    assert {len(p) for p in asked} == {400}


def test_nine_tenths_of_shared_prompts_are_the_same() -> None:
    made = scripts(cell("shared"))
    asked = [*made[0].warm_up(), *ask(made, 5, [])]
    alike = {common(a, b) for a, b in itertools.combinations(asked, 2)}
    assert min(alike) == 360
    assert max(alike) < 370
    assert {len(p) for p in asked} == {400}


def test_repeated_prompts_were_all_asked_in_the_warm_up() -> None:
    for script in scripts(cell("repeat")):
        warm = script.warm_up()
        asked = [script.next([]) for _ in range(6)]
        assert all(p in warm for p in asked)
        assert len({tuple(p) for p in asked}) == prompts.REPEATED


def test_a_turn_is_the_last_prompt_its_answer_and_more() -> None:
    (script,) = scripts(cell("turns", clients=1))
    conversation = [script.next([])]
    for turn in range(1, prompts.TURNS):
        answer = [4000 + turn] * 16
        conversation.append(script.next(answer))
        before = conversation[-2] + answer
        assert conversation[-1][: len(before)] == before
        assert len(conversation[-1]) > len(before)
    assert common(script.next([1] * 16), conversation[0]) < BLOCK


def test_fragmented_is_warmed_up_by_prompts_of_many_lengths() -> None:
    lengths = [len(p) for s in scripts(cell("fragmented")) for p in s.warm_up()]
    assert len(set(lengths)) > 6


# --- the matrix ------------------------------------------------------------------------------
def test_cells_are_all_that_was_asked_for_and_long_is_as_long_as_the_model() -> None:
    wishes = Wishes(scenarios=("unique", "long"), input_tokens=(100, 200), concurrency=(1, 4))
    cells = build_cells(wishes, max_length=2048, device="cpu")
    assert [str(c) for c in cells] == [
        "unique 100/16 x1",
        "unique 100/16 x4",
        "unique 200/16 x1",
        "unique 200/16 x4",
        "long 2032/16 x1",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("max_length", [64, 2048, 40960])
def test_defaults_fit_any_model(max_length: int, device: str) -> None:
    wishes = Wishes(scenarios=("unique", "shared", "repeat", "fragmented", "long"))
    found = build_cells(wishes, max_length=max_length, device="cpu" if device == "cpu" else "cuda")
    assert all(c.input_tokens + c.output_tokens <= max_length for c in found)


def test_lengths_that_do_not_fit_are_all_told() -> None:
    wishes = Wishes(scenarios=("unique",), input_tokens=(5, 100, 4000), output_tokens=(64,))
    with pytest.raises(ValueError, match="too few") as e:
        build_cells(wishes, max_length=2048, device="cpu")
    assert str(e.value).splitlines() == [
        "5 input tokens are too few: take 18 or more",
        "unique 4000/64 x1: prompt and answer come to 4000 + 64 tokens, and model.max_length is "
        "2048: take less, or --scenario without unique",
        "unique 4000/64 x4: prompt and answer come to 4000 + 64 tokens, and model.max_length is "
        "2048: take less, or --scenario without unique",
    ]


def ordered(*modes: Mode, rounds: int = 2) -> list[tuple[str, list[str]]]:
    cells = (cell("unique"), cell("shared"))
    return [
        (connector, [f"{p.mode} {p.cell.scenario} {p.round}" for p in planned])
        for connector, planned in matrix.order(modes, cells, rounds, "push")
    ]


def test_modes_of_the_same_engines_take_turns_on_every_cell() -> None:
    assert ordered("push", "aggregated") == [
        (
            "push",
            [
                *("push unique 1", "aggregated unique 1", "push unique 2", "aggregated unique 2"),
                *("push shared 1", "aggregated shared 1", "push shared 2", "aggregated shared 2"),
            ],
        )
    ]


def test_engines_are_started_anew_as_seldom_as_can_be() -> None:
    found = ordered("push", "pull")
    assert found == [
        ("push", ["push unique 1", "push shared 1"]),
        ("pull", ["pull unique 1", "pull shared 1", "pull unique 2", "pull shared 2"]),
        ("push", ["push unique 2", "push shared 2"]),
    ]
    assert [connector for connector, _ in ordered("pull")] == ["pull"]


def test_modes_that_other_engines_are_needed_for() -> None:
    assert matrix.default_modes("push", restart=False) == ("push", "push-sequential", "aggregated")
    assert matrix.default_modes("pull", restart=False) == ("pull", "aggregated")
    assert "pull" in matrix.default_modes("push", restart=True)
    assert matrix.needs_restart(("push", "pull", "aggregated"), "push") == ("pull",)
    assert matrix.needs_restart(("push", "aggregated"), "pull") == ("push",)


def test_what_leaves_engines_changed_comes_last_and_cold_pairs_are_asked_one_by_one() -> None:
    wishes = Wishes(scenarios=("cold", "fragmented", "unique"), concurrency=(4,))
    cells = build_cells(wishes, max_length=2048, device="cpu")
    assert [str(c) for c in cells] == [
        "unique 512/16 x4",
        "fragmented 512/16 x4",
        "cold 512/16 x1",
    ]
    blocks = list(matrix.order(("push", "pull", "aggregated"), cells, 2, "push"))
    told = [
        (connector, [f"{p.mode} {p.cell.scenario} {p.round}" for p in planned])
        for connector, planned in blocks
    ]
    assert told[1] == (
        "pull",
        [
            *("pull unique 1", "pull unique 2", "pull fragmented 1", "pull fragmented 2"),
            *("pull cold 1", "pull cold 2"),
        ],
    )
    assert not any("aggregated cold" in run for _, runs in told for run in runs)


def test_what_moved_in_two_runs_is_added_up() -> None:
    one = Moved(kv_bytes=1, transfers=2, post_s=0.5, prompt_tokens={"d": {"x": 1}})
    other = Moved(kv_bytes=10, descriptors=4, post_s=0.5, prompt_tokens={"d": {"x": 2, "y": 5}})
    assert one + other == Moved(
        kv_bytes=11,
        transfers=2,
        descriptors=4,
        post_s=1.0,
        prompt_tokens={"d": {"x": 3, "y": 5}},
    )


# --- figures ---------------------------------------------------------------------------------
def test_percentiles_are_the_nearest_rank() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    found = [find_statistic(values, s) for s in figures.STATISTICS]
    assert found == [50.0, 90.0, 99.0, 50.5]


@pytest.mark.parametrize(
    ("statistic", "enough"), [("p50", 5), ("p90", 10), ("p99", 100), ("mean", 1)]
)
def test_a_percentile_of_too_few_samples_is_not_given(statistic: str, enough: int) -> None:
    assert find_statistic([1.0] * enough, statistic) == 1.0
    with pytest.raises(TooFewError) as e:
        find_statistic([1.0] * (enough - 1), statistic)
    assert str(e.value) == f"{enough - 1} samples, and {statistic} takes {enough}"


def test_what_a_group_tells_is_of_whole_answers_alone() -> None:
    good = Sample(ttft_s=0.1, total_s=0.4, gaps_s=(0.1, 0.2), output_tokens=3)
    bad = Sample(error="hung")
    moved = Moved(kv_bytes=3000, transfers=2, descriptors=8, transfer_s=0.5, post_s=0.01)
    runs = tuple(
        Run(mode="push", cell=cell(), round=n, seconds=2.0, samples=(good, bad), moved=moved)
        for n in (1, 2)
    )
    group = Group(mode="push", cell=cell(), runs=runs)
    assert group.values("ttft") == [100.0, 100.0]
    assert group.values("itl") == [100.0, 200.0, 100.0, 200.0]
    assert group.values("tpot") == pytest.approx([150.0, 150.0])
    found = {metric: group.find(metric) for metric in figures.SUMS}
    assert found == {
        "rate": 0.5,
        "tokens": 1.5,
        "errors": 2.0,
        "bytes": 3000.0,
        "descriptors": 8.0,
        "transfer": 250.0,
        "post": 5.0,
    }


def test_nothing_answered_is_no_figure() -> None:
    run = Run(
        mode="push",
        cell=cell(),
        round=1,
        seconds=1.0,
        samples=(Sample(error="x"),),
        moved=Moved(),
    )
    group = Group(mode="push", cell=cell(), runs=(run,))
    assert group.find("rate") == 0.0
    for metric in ("bytes", "transfer"):
        with pytest.raises(TooFewError, match="nothing was answered or moved"):
            group.find(metric)


def test_what_moved_is_not_given_when_it_was_not_read_after_every_run() -> None:
    good = Sample(ttft_s=0.1, total_s=0.4, gaps_s=(0.1, 0.2), output_tokens=3)
    runs = tuple(
        Run(mode="push", cell=cell(), round=n, seconds=2.0, samples=(good,), moved=moved)
        for n, moved in ((1, Moved(kv_bytes=8, transfers=1)), (2, None))
    )
    group = Group(mode="push", cell=cell(), runs=runs)
    assert group.find("rate") == 0.5
    for metric in ("bytes", "post"):
        with pytest.raises(TooFewError, match="counters could not be read"):
            group.find(metric)
