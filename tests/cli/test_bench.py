"""How `bench` refuses, before anything is measured; and `bench compare`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.adapters import specfile
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import App, main
from kvdeploy.cli.bench import conclude
from kvdeploy.errors import BenchError, FleetError, KvdeployError
from kvdeploy.model.bench import BenchReport, Cell, Run, Sample
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.record import Record, StageRecord
from kvdeploy.model.routing import Engine, RouterConfig
from kvdeploy.planning.bench.assertions import parse_threshold
from kvdeploy.ui import Ui


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(("bench", *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of a cluster that was brought up, and whose processes have gone since."""
    store = Store(tmp_path, "demo")
    url = "http://127.0.0.1:1"
    engines = (
        Engine(name="prefill-0", role="prefill", url=url),
        Engine(name="decode-0", role="decode", url=url),
    )
    ready = Readiness(url=url, timeout_s=1)
    fleet = FleetOutputs(
        url=url,
        engines=(),
        router=LaunchSpec(name="router", role="router", argv=("x",), ports=(1,), ready=ready),
        router_config=RouterConfig(host="127.0.0.1", port=1, served_model="tiny", engines=engines),
        generations={},
    )
    results = {
        "runtime": RuntimeOutputs(python="python", device="cpu", built=True, versions={}),
        "model": ModelOutputs(path="/m", served_name="tiny", config={"vocab_size": 300}),
        "fleet": fleet,
    }
    stages = {n: StageRecord(digest="d", result=r.model_dump()) for n, r in results.items()}
    (tmp_path / "cluster.yaml").write_text("name: demo\n")
    spec = specfile.load(tmp_path / "cluster.yaml").spec
    store.write(Record(cluster="demo", spec=spec, stages=stages))
    return store


def test_nothing_is_up(tmp_path: Path) -> None:
    assert run(tmp_path) == (
        9,
        "error: cluster 'local' is not up: there is nothing to measure\n"
        "  try: Run 'kvdeploy up' first.\n",
    )


def test_a_fleet_that_is_not_whole_is_not_measured(store: Store) -> None:
    code, said = run(store.root)
    assert (code, said) == (
        9,
        "error: cluster 'demo' is not whole: 'kvdeploy status' shows what is missing\n"
        "  try: 'kvdeploy up' repairs it.\n",
    )


def test_cold_pairs_take_the_word_that_engines_may_be_started_anew(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store.root, "--scenario", "cold", "--mode", "push")[0] == 2
    assert (
        "cold pairs take decode engines that are started anew for each sample: that takes "
        "--restart, and what they serve meanwhile is cut."
    ) in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ("--mode", "pul"),
            "'pul' is none of push, push-sequential, pull, aggregated. Did you mean",
        ),
        (("--scenario", "uniqe"), "Did you mean 'unique'?"),
        (("--input", "1k"), "'1k' is not whole numbers above 0 with commas between, as 1024,4096"),
        (("--concurrency", "0"), "'0' is not whole numbers above 0"),
        (
            ("--mode", "push,pull"),
            "pull cannot be served by engines with the push connector, which do push, "
            "push-sequential, aggregated. With --restart engines are started anew for it, and the "
            "cluster's own again afterwards: what they serve meanwhile is cut.",
        ),
        (
            ("--input", "2048", "--output", "8", "--scenario", "unique", "--concurrency", "1"),
            "unique 2048/8 x1: prompt and answer come to 2048 + 8 tokens, and model.max_length is "
            "2048",
        ),
        (
            ("--assert", "ttft.p50.pull <= 1"),
            "--assert: 'ttft.p50.pull': 'pull' is no mode here. Good are: push, push-sequential, "
            "aggregated.",
        ),
        (("--assert", "ttft.p50.push"), "it ends where a comparison (<= >= == < >) should be."),
        (("--quick", "--assert", "rate.push.turns > 1"), "Good are: unique, shared."),
        (("--rounds", "0"), "0 is not in the range"),
    ],
)
def test_wrong_usage_is_told_with_what_is_good(
    argv: tuple[str, ...], said: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store.root, *argv)[0] == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not store.runs.exists()


def report(ttft_s: float, **environment: Any) -> BenchReport:
    cell = Cell(scenario="unique", input_tokens=512, output_tokens=1, concurrency=1)
    samples = (Sample(ttft_s=ttft_s, total_s=ttft_s, output_tokens=1),) * 5
    return BenchReport(
        cluster="demo",
        target="local",
        started_at="now",
        seconds=1.0,
        modes=("push",),
        runs=(Run(mode="push", cell=cell, round=1, seconds=1.0, samples=samples),),
        environment=environment,
        options={},
    )


# --- what a bench ends with ------------------------------------------------------------------
def concluded(of: BenchReport, *thresholds: str) -> tuple[KvdeployError | None, str]:
    err = io.StringIO()
    app = App(ui=Ui(err=err))
    try:
        conclude(app, of, [parse_threshold(t) for t in thresholds], Path("kept.json"))
    except KvdeployError as e:
        return e, err.getvalue()
    return None, err.getvalue()


def test_thresholds_that_hold_are_told() -> None:
    assert concluded(report(0.1), "ttft.p50.push <= 100", "errors.push == 0") == (
        None,
        "holds: ttft.p50.push <= 100: on unique 512/1 x1: 100 is <= 100\n"
        "holds: errors.push == 0: on unique 512/1 x1: 0 is == 0\n",
    )


def test_a_missed_threshold_is_an_error_with_both_numbers() -> None:
    error, said = concluded(report(0.1), "errors.push == 0", "ttft.p50.push <= ttft.p90.push / 2")
    assert isinstance(error, BenchError)
    assert (error.exit_code, error.hint) == (11, "Every sample is in kept.json.")
    assert error.message == (
        "ttft.p50.push <= ttft.p90.push / 2: on unique 512/1 x1: cannot be judged: ttft.p90.push: "
        "5 samples, and p90 takes 10"
    )
    assert said.startswith("holds: errors.push == 0")
    (missed, _) = concluded(report(0.1), "ttft.p50.push <= 99 / 2")
    assert missed is not None
    assert missed.message.endswith("on unique 512/1 x1: 100 is not <= 49.5")


def test_a_mode_that_failed_half_way_is_another_error_and_says_where_the_rest_is() -> None:
    partial = report(0.1).model_copy(update={"failed": {"pull": "died"}})
    error, _ = concluded(partial, "ttft.p50.push < 1")
    assert isinstance(error, FleetError)
    assert (error.exit_code, error.hint) == (9, "What was measured is in kept.json.")
    assert error.message == (
        "not measured to the end: pull: died\nttft.p50.push < 1: on unique 512/1 x1: 100 is not < 1"
    )


# --- comparing -------------------------------------------------------------------------------
def test_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, made in (("a", report(0.1, device="cpu")), ("b", report(0.05, device="cuda"))):
        (tmp_path / name).write_text(made.model_dump_json())
    assert run(tmp_path, "compare", str(tmp_path / "a"), str(tmp_path / "b")) == (0, "")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "cell mode figure first second second/first"
    assert lines[1] == "unique 512/1 x1 push ttft p50 ms 100 50 0.50"
    assert lines[-1] == 'differs: environment.device: "cpu" and "cuda"'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{}", "is no report of a bench"),
        ("[", "is no report of a bench"),
    ],
)
def test_what_is_no_report_is_told(text: str | None, said: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(report(1).model_dump_json())
    if text is not None:
        bad.write_text(text)
    code, err = run(tmp_path, "compare", str(good), str(bad))
    assert code == 4
    assert err.startswith(f"error: {bad} {said}")


def test_a_report_of_a_newer_kvdeploy_is_told(tmp_path: Path) -> None:
    newer = report(1).model_copy(update={"schema_version": 99})
    (tmp_path / "newer").write_text(newer.model_dump_json())
    code, err = run(tmp_path, "compare", str(tmp_path / "newer"), str(tmp_path / "newer"))
    assert (code, err) == (
        4,
        f"error: {tmp_path / 'newer'} was written by a newer kvdeploy\n"
        "  try: Use that version, or a newer one.\n",
    )
