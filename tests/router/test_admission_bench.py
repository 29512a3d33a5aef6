"""The benchmark of admission, against scripted engines: what it asks, counts and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import admission
from tests.router.harness import run_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.harness import Fleet


def parse(fleet: Fleet, *more: str) -> list[str]:
    words = ["--model", "tiny", "--input", "20", "--shared", "0.5", "--output", "2"]
    words += ["--prefill-url", fleet.prefill.describe().url]
    words += ["--decode-url", fleet.decode.describe().url]
    words += ["--seconds-each", "0.6", "--warm-up-s", "0.1", "--seed", "7", *more]
    return words


@pytest.mark.loopback
@pytest.mark.real_process
async def test_each_limit_is_measured_under_each_load(tmp_path: Path) -> None:
    async with run_fleet(warm=False) as fleet:
        options = admission.parse_options(
            parse(fleet, "--limits", "2,auto", "--concurrency", "1,3")
        )
        cells = await admission.measure(options, tmp_path)
        legs = [leg for leg in fleet.prefill.clients if "min_tokens" not in leg.body]
        prompts = [leg.body["prompt"] for leg in legs]

    assert [(cell["limit"], cell["concurrency"]) for cell in cells] == [
        ("2", 1), ("2", 3), ("auto", 1), ("auto", 3),
    ]  # fmt: skip
    assert all(cell["requests"] > 0 and not cell["errors"] for cell in cells)
    assert [cell["limit_seen"]["mean"] for cell in cells[:2]] == [2, 2]
    assert cells[3]["limit_seen"]["least"] >= 1
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert admission.compare(cells)["3"]["best_fixed"] == "2"


@pytest.mark.loopback
async def test_errors_are_counted_and_are_no_samples(tmp_path: Path) -> None:
    async with run_fleet() as fleet:
        fleet.prefill.fail = 400
        fleet.decode.fail = 400
        words = parse(fleet, "--url", fleet.url, "--concurrency", "2")
        (cell,) = await admission.measure(admission.parse_options(words), tmp_path)

    assert (cell["requests"], cell["limit"]) == (0, "given")
    assert sum(cell["errors"].values()) > 0
    assert admission.render_cell(cell).split()[2] == "-"


def test_percentiles_are_nearest_ranks() -> None:
    seconds = [n / 1000 for n in range(1, 101)]
    assert [admission.find_percentile(seconds, p) for p in (50, 90, 99)] == [50, 90, 99]
    assert admission.find_percentile([0.002], 99) == 2


@pytest.mark.parametrize("words", [["--limits", "0"], ["--limits", "x"], ["--shared", "2"]])
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        admission.parse_options(["--model", "m", "--url", "http://x", *words])
    assert refused.value.code == 2
    assert words[0] in capsys.readouterr().err
