"""Thresholds, tables, the page and comparisons, of samples made here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from kvdeploy.model.bench import BenchReport, Cell, Moved, Run, Sample
from kvdeploy.planning.bench import compare, notes, page, svg, table
from kvdeploy.planning.bench.assertions import ExpressionError, judge, parse_threshold
from kvdeploy.planning.bench.figures import find_groups
from kvdeploy.planning.bench.svg import find_step

if TYPE_CHECKING:
    from kvdeploy.model.routing import Mode


def cell(scenario: str = "unique", clients: int = 4) -> Cell:
    return Cell(scenario=scenario, input_tokens=512, output_tokens=3, concurrency=clients)


def run(mode: Mode, ttft_ms: float, of: Cell | None = None, count: int = 12) -> Run:
    sample = Sample(ttft_s=ttft_ms / 1e3, total_s=1.0, gaps_s=(0.01, 0.03), output_tokens=3)
    moved = Moved(kv_bytes=2**20 * count, transfers=count, descriptors=4 * count, post_s=0.012)
    return Run(
        mode=mode,
        cell=of or cell(),
        round=1,
        seconds=6.0,
        samples=(sample,) * count,
        moved=Moved() if mode == "aggregated" else moved,
    )


def report(*runs: Run, **changed: Any) -> BenchReport:
    modes = tuple(dict.fromkeys(r.mode for r in runs))
    fields: dict[str, Any] = {
        "cluster": "demo",
        "target": "local",
        "started_at": "2026-12-01T00:00:00+00:00",
        "seconds": 60.0,
        "modes": modes,
        "runs": runs,
        "environment": {"versions": {"vllm": "1"}},
        "options": {"seed": 0},
    }
    return BenchReport(**(fields | changed))


TWO = report(run("push", 100), run("aggregated", 300))


# --- thresholds ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft.p50.push <= ttft.p50.aggregated / 2", "100 is <= 150"),
        ("ttft.p50.push<ttft.p50.aggregated/4", "100 is not < 75"),
        ("ttft.p50.push - 30 * 2 + 1 == 41", "41 is == 41"),
        ("(ttft.p50.push - 30) * 2 > -1", "140 is > -1"),
        ("- ttft.p50.push >= -100", "-100 is >= -100"),
        ("100 / 2 / 5 <= rate.push * 5", "10 is <= 10"),
        ("errors.push == 0", "0 is == 0"),
        ("itl.mean.push + tpot.p90.push <= 40.0001", "40 is <= 40.0001"),
        ("bytes.push <= bytes.push.unique", "1.04858e+06 is <= 1.04858e+06"),
        ("ttft.p99.push <= 1", "cannot be judged: ttft.p99.push: 12 samples, and p99 takes 100"),
        (
            "transfer.aggregated <= 1",
            "cannot be judged: transfer.aggregated: nothing was answered or moved",
        ),
        ("ttft.p50.push / (1 - 1) <= 1", "cannot be judged: it divides by zero"),
        ("ttft.p50.pull <= 1", "cannot be judged: ttft.p50.pull was not measured"),
    ],
)
def test_a_threshold_is_judged_by_its_numbers(text: str, message: str) -> None:
    (found,) = judge(parse_threshold(text), find_groups(TWO))
    assert found.message == f"{text}: on unique 512/3 x4: {message}"
    assert found.held == (" is " in message and "not " not in message)


def test_a_threshold_has_to_hold_on_every_cell() -> None:
    one, other = cell(), cell("shared")
    groups = find_groups(report(run("push", 100, one), run("push", 300, other)))
    found = judge(parse_threshold("ttft.p50.push <= 200"), groups)
    assert [(j.cell, j.held) for j in found] == [(one, True), (other, False)]
    named = "ttft.p50.push.shared <= ttft.p50.push.unique * 3"
    (single,) = judge(parse_threshold(named), groups)
    assert (single.held, single.message) == (True, f"{named}: on {one}: 300 is <= 300")


def test_a_threshold_about_cells_that_were_not_measured_does_not_hold() -> None:
    (found,) = judge(parse_threshold("ttft.p50.push.turns <= 1"), find_groups(TWO))
    assert not found.held
    assert "no cell has all that it names" in found.message


def test_nothing_measured_is_nothing_held() -> None:
    (found,) = judge(parse_threshold("errors.push == 0"), [])
    assert not found.held
    assert found.message == "errors.push == 0: cannot be judged: nothing was measured"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ttfd.p50.push <= 1",
            "--assert: 'ttfd.p50.push': 'ttfd' is no metric here. Good are: ttft, tpot, itl, e2e, "
            "rate, tokens, errors, bytes, descriptors, transfer, post. Did you mean 'ttft'?",
        ),
        (
            "ttft.p95.push <= 1",
            "--assert: 'ttft.p95.push': 'p95' is no statistic here. Good are: p50, p90, p99, mean. "
            "Did you mean 'p99'?",
        ),
        (
            "rate.pull <= 1",
            "--assert: 'rate.pull': 'pull' is no mode here. Good are: push, push-sequential.",
        ),
        (
            "rate.push.turns <= 1",
            "--assert: 'rate.push.turns': 'turns' is no scenario here. Good are: unique.",
        ),
        ("rate.push.unique.x <= 1", "--assert: 'rate.push.unique.x' has a part too many: 'x'"),
        ("1 <= 2", "--assert '1 <= 2': it names nothing that a bench measures"),
        ("rate.push", "--assert 'rate.push': it ends where a comparison"),
        ("rate.push <= ", "--assert 'rate.push <= ': it ends where a number, a name or '(' should"),
        ("rate.push <= 1 2", "--assert 'rate.push <= 1 2': '2' stands where the end should be."),
        ("rate.push <= (1", "--assert 'rate.push <= (1': it ends where ')' should be."),
        ("rate.push = 1", "--assert 'rate.push = 1': '=' stands where"),
        ("os.system < 1", "--assert: 'os.system': 'os' is no metric here."),
        ("__import__ < 1", "--assert '__import__ < 1': '__import__' stands where"),
        ("", "--assert '': it ends where"),
        ("(" * 40 + "rate.push < 1", "--assert: over 32 brackets or signs within each other"),
        ("rate.push <" + " 1 +" * 200, "--assert: 811 letters; 500 are the most"),
    ],
)
def test_a_wrong_threshold_is_told_with_the_names_that_are_good(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as e:
        parse_threshold(text, modes=("push", "push-sequential"), scenarios=("unique",))
    assert str(e.value).startswith(message)


def test_a_minus_after_a_space_is_no_hyphen() -> None:
    text = "rate.push-sequential <= rate.push -1"
    (name, other) = parse_threshold(text).names
    assert (name.mode, other.mode) == ("push-sequential", "push")


# --- the table -------------------------------------------------------------------------------
def test_the_table_gives_what_the_samples_carry() -> None:
    assert list(table.build_rows(TWO)) == [
        (
            *("unique 512/3 x4", "push", "12", "0", "2.00"),
            *("100.0/100.0/-", "20.0/20.0/-", "10.0/30.0/-", "1.000", "4", "0.0", "1.00"),
        ),
        (
            *("unique 512/3 x4", "aggregated", "12", "0", "2.00"),
            *("300.0/300.0/-", "20.0/20.0/-", "10.0/30.0/-", "0.000", "0", "-", "-"),
        ),
    ]
    assert len(table.COLUMNS) == len(next(table.build_rows(TWO)))


def test_percentiles_that_are_not_given_are_named() -> None:
    assert table.too_few(TWO) == (
        "too few samples, so not given everywhere: itl p99, tpot p99, ttft p99 (p50 takes 5, p90 "
        "takes 10, p99 takes 100); ask for more --requests"
    )
    assert table.too_few(report(run("push", 1, count=100))) == ""


# --- the page --------------------------------------------------------------------------------
def test_the_page_needs_nothing_else_and_its_plots_are_well_formed() -> None:
    made = page.render(report(*TWO.runs, notes=("A <note>",), failed={"pull": "died & gone"}))
    without = made.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", without)
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", made)]
    titles = ["".join(t.text or "" for t in p if t.get("class") == "title") for p in plots]
    assert titles[:3] == [
        "Time to the first token",
        "Time a token after the first",
        "Between one token and the next",
    ]
    assert len(plots) == 8
    assert "A &lt;note&gt;" in made
    assert "pull did not come to its end: died &amp; gone" in made


def test_a_distribution_is_drawn_at_the_values_that_were_seen() -> None:
    made = page.render(TWO)
    (first, *_) = re.findall(r"<svg.*?</svg>", made)
    lines = re.findall(r'<polyline class="([\w-]+)" fill="none" points="([^"]*)"', first)
    at = {name: {float(p.split(",")[0]) for p in points.split()} for name, points in lines}
    (push,), (aggregated,) = at["push"], at["aggregated"]
    left, right = svg.LEFT, svg.WIDTH - svg.RIGHT
    assert (push - left) / (aggregated - left) == pytest.approx(1 / 3, abs=0.01)
    assert aggregated == pytest.approx(right)
    heights = [float(p.split(",")[1]) for p in lines[0][1].split()]
    assert (max(heights), min(heights)) == (svg.HEIGHT - svg.BOTTOM, svg.TOP)


def test_a_report_of_nothing_is_a_page_too() -> None:
    assert "died" in page.render(report(failed={"push": "died"}))


@pytest.mark.parametrize(
    ("most", "step"), [(6.0, 1.0), (300.0, 50.0), (0.05, 0.01), (1234.0, 250.0), (0.0, 1.0)]
)
def test_marks_are_at_round_numbers(most: float, step: float) -> None:
    assert find_step(most) == pytest.approx(step)


# --- comparing -------------------------------------------------------------------------------
def test_two_reports_are_compared_figure_by_figure() -> None:
    other = report(run("push", 150), environment={"versions": {"vllm": "2"}})
    rows = list(compare.build_rows(TWO, other))
    assert rows[0] == ("unique 512/3 x4", "push", "ttft p50 ms", "100", "150", "1.50")
    assert not any("p99" in row[2] for row in rows)
    assert {row[1] for row in rows} == {"push"}
    assert list(compare.find_differences(TWO, other)) == [
        "only in the first: aggregated on unique 512/3 x4",
        'differs: environment.versions.vllm: "1" and "2"',
    ]


def test_a_report_is_the_same_after_it_was_written_and_read() -> None:
    assert BenchReport.model_validate_json(TWO.model_dump_json()) == TWO


def test_the_slowest_hundredth_is_seen_as_well_as_the_quicker_half() -> None:
    drawn = svg.draw_shares("t", "ms", {"push": [float(n) for n in range(1, 1001)]})
    marks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)%', drawn)
    heights = [float(y) for y, _ in marks]
    assert [m for _, m in marks] == ["0", "50", "90", "99", "99.9"]
    steps = [round(heights[i] - heights[i + 1]) for i in (2, 3)]
    assert steps[0] == steps[1] > 40
    top = min(float(p.split(",")[1]) for p in re.findall(r'points="([^"]*)"', drawn)[0].split())
    assert round(top) == svg.TOP


# --- notes -----------------------------------------------------------------------------------
def scattered(mode: Mode, times: float) -> Run:
    plain = run(mode, 100, cell("fragmented"))
    assert plain.moved is not None
    moved = plain.moved.model_copy(update={"descriptors": round(plain.moved.descriptors * times)})
    return plain.model_copy(update={"moved": moved})


def told(of: BenchReport, planned: int = 0) -> list[str]:
    return list(notes.find_notes(of, planned=planned))


def test_a_bench_that_was_cut_says_how_far_it_came() -> None:
    cut = report(run("push", 100))
    assert told(cut, 2)[0] == "it did not come to its end: 1 of 2 runs were made"
    assert told(cut, 1) == [notes.COLD]
    gave_up = report(run("push", 100), failed={"pull": "died"})
    assert told(gave_up, 2) == [notes.COLD], "why is told already"


def test_fragmented_prompts_that_took_no_more_descriptors_are_told() -> None:
    found = report(run("push", 100), scattered("push", 1.0), scattered("pull", 2.0))
    assert (told(found))[1:] == [
        "push on fragmented 512/3 x4: blocks were not more scattered than with unique prompts "
        "(4 descriptors a request, and 4)",
        "pull on fragmented 512/3 x4: whether blocks were scattered cannot be told without "
        "--scenario unique",
    ]
    assert (told(report(run("push", 100), scattered("push", 1.5)))) == [notes.COLD]
    alone = report(run("aggregated", 100), scattered("aggregated", 1.0))
    assert (told(alone)) == [notes.COLD]


def test_what_a_bench_ran_on_is_told_where_it_makes_figures_others() -> None:
    shared = {"machine": {"shared_gpus": {"0": ["prefill-0", "decode-0"]}}, "device": "cpu"}
    found = report(run("push", 100, cell("cold", 1)), environment=shared)
    assert (told(found)) == [
        notes.CPU,
        "prefill-0 and decode-0 share GPU 0: they wait for each other, and KV does not leave it; "
        "with a GPU each all figures are others",
    ]


def test_a_large_figure_is_written_out() -> None:
    drawn = svg.draw_bars("Time", "ms", {"push": 17990.1, "pull": 0.34961})
    assert ">17990<" in drawn
    assert ">0.3496<" in drawn
