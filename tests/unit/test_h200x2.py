"""The benchmark of two GPUs: what is asked for, what is kept, and what is made of it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from xml.etree import ElementTree

import pytest

from benchmarks.h200x2 import page, summary
from benchmarks.h200x2.__main__ import QUICK_START, build_document, main
from benchmarks.h200x2.arms import ARMS, DEFAULT, LARGE, SMALL, build_acts
from benchmarks.h200x2.drive import Block, Call, build_blocks, estimate_s
from benchmarks.h200x2.fleets import Place, UpError, build_cluster
from benchmarks.h200x2.ledger import Job, Ledger
from kvdeploy.model.bench import Cell, Moved, Run, Sample
from kvdeploy.model.spec import ClusterSpec
from tests.unit.test_bench_stage import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.h200x2.arms import Arm
    from benchmarks.h200x2.fleets import Host
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.routing import Mode

ROOT = Path(__file__).parents[2]
SHAPE = replace(SMALL, concurrency=(16,))
SHARED = Cell(scenario="shared", input_tokens=256, output_tokens=8, concurrency=16)
HOST = Place(
    gpus=(141.0, 141.0),
    at_once=2,
    model={"id": "/models/m", "max_length": 16384},
    runtime={"python": "/opt/python"},
    args=QUICK_START,
    weights_gib=16,
)


def job(arm: str = "default", mode: Mode = "push", round: int = 1, cell: Cell = SHARED) -> Job:
    act = "cold" if cell.scenario == "cold" else "compare"
    return Job(act=act, beside="default+stock", arm=ARMS[arm], mode=mode, cell=cell, round=round)


def run(wanted: Job, ttft_ms: float, count: int = 120) -> Run:
    sample = Sample(ttft_s=ttft_ms / 1e3, total_s=1, gaps_s=(ttft_ms / 1e4,), output_tokens=2)
    moved = Moved(kv_bytes=count, transfers=count, descriptors=count)
    return Run(
        mode=wanted.mode,
        cell=wanted.cell,
        round=wanted.round,
        seconds=ttft_ms / 10,
        samples=(sample,) * count,
        moved=moved,
    )


def add(ledger: Ledger, wanted: Job, ttft_ms: float, count: int = 120) -> None:
    ledger.add(wanted, run(wanted, ttft_ms, count))


# --- clusters --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("place", [HOST, replace(HOST, gpus=(141.0,)), replace(HOST, gpus=())])
def test_every_arm_is_a_cluster_file_that_kvdeploy_takes(name: str, place: Place) -> None:
    spec = ClusterSpec.model_validate(build_cluster(ARMS[name], place, 8000, name))
    assert spec.router.mode_header
    assert spec.connector.mode == ("pull" if name in {"pull", "stock"} else "push")


def test_engines_that_share_a_gpu_share_its_memory_and_are_both_on_it() -> None:
    one = replace(HOST, gpus=(141.0,))
    spec = ClusterSpec.model_validate(build_cluster(DEFAULT, one, 8000, "default"))
    assert spec.fleet.decode.env == {"CUDA_VISIBLE_DEVICES": "0"}
    each = 0.94 * 141 / 4 - 16 - 4
    assert spec.fleet.decode.kv_cache_gib == pytest.approx(2 * 0.64 * each, abs=0.1)
    assert spec.fleet.prefill.kv_cache_gib == pytest.approx(2 * 0.36 * each, abs=0.1)
    assert spec.fleet.decode.engine_args["gpu-memory-utilization"] == 0.235
    alone = ClusterSpec.model_validate(build_cluster(DEFAULT, HOST, 8000, "default"))
    assert alone.fleet.decode.env == {}
    assert alone.fleet.decode.kv_cache_gib == alone.fleet.prefill.kv_cache_gib
    with pytest.raises(UpError, match="6 engines a GPU have no room"):
        build_cluster(DEFAULT, replace(one, at_once=3, weights_gib=20), 8000, "default")


def test_what_is_expected_is_written_down_beforehand() -> None:
    text = (ROOT / "docs" / "benchmarks" / "h200x2.md").read_text(encoding="utf-8")
    for arm in ARMS.values():
        if arm is not DEFAULT:
            assert f"| `{arm.name}` | {arm.tell_differences()} | {arm.expected} |\n" in text


@pytest.mark.real_process
def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as e:
        main(["--folder", str(tmp_path), "--model", str(tmp_path)])
    assert e.value.code == "no NVIDIA GPU is here (nvidia-smi names none); --small runs on CPUs"


# --- what is asked for -----------------------------------------------------------------------
def test_every_arm_is_measured_in_turns_with_default(tmp_path: Path) -> None:
    blocks = list(build_blocks(list(build_acts(SHAPE)), DEFAULT, SHAPE, 2, Ledger(tmp_path)))
    seen = {arm.name for block in blocks for arm in block.arms}
    assert seen == ARMS.keys()
    for block in blocks:
        assert len({arm.engines for arm in block.arms}) <= 2, "more than are up at once"
        of_each = {(j.arm.name, str(j.cell), j.round) for j in block.jobs}
        for name, cell, number in of_each:
            assert ("default", cell, number) in of_each, name
    first = [f"{j.arm.name} {j.mode}" for j in blocks[0].jobs[:8]]
    assert first == [
        *("default push", "default push-sequential", "default aggregated", "stock pull"),
        *("stock pull", "default push", "default push-sequential", "default aggregated"),
    ]


def test_less_can_be_asked_for(tmp_path: Path) -> None:
    shape = replace(SHAPE, scenarios=("shared",), modes=("push",))
    (first, *_) = build_blocks(list(build_acts(shape)), DEFAULT, shape, 2, Ledger(tmp_path))
    assert {(j.arm.name, j.mode, j.cell.scenario) for j in first.jobs} == {
        *(("default", "push", "shared"), ("stock", "pull", "shared"))
    }
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--small", "--estimate", "--modes", "pull"])


def test_an_act_of_which_no_arm_is_wanted_is_left_out(tmp_path: Path) -> None:
    acts = [act.only(["stock"]) for act in build_acts(SHAPE)]
    blocks = build_blocks(acts, DEFAULT, SHAPE, 2, Ledger(tmp_path))
    assert [block.jobs[0].act for block in blocks] == ["compare", "cold", "compare"]


def test_what_was_measured_is_not_asked_again(tmp_path: Path) -> None:
    acts = list(build_acts(SHAPE))
    ledger = Ledger(tmp_path)
    blocks = list(build_blocks(acts, DEFAULT, SHAPE, 2, ledger))
    for wanted in blocks[0].jobs[:-1]:
        add(ledger, wanted, 100)
    again = Ledger(tmp_path)  # as another call reads it
    left = list(build_blocks(acts, DEFAULT, SHAPE, 2, again))
    assert [j.key for j in left[0].jobs] == [blocks[0].jobs[-1].key]
    assert len(left) == len(blocks)
    assert estimate_s(left, SHAPE) < estimate_s(blocks, SHAPE)


def test_a_line_that_was_cut_costs_its_run_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    add(ledger, job(), 100)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"act": "compare", "besi')
    again = Ledger(tmp_path)
    assert len(again.entries) == 1
    add(again, job("stock", "pull"), 400)
    assert [e.arm for e in Ledger(tmp_path).entries] == ["default", "stock"]


class FakeCluster:
    """A set-up behind one scripted site."""

    def __init__(self, site: Site) -> None:
        self._site, self.renewed = site, 0
        self.told: list[dict[str, object]] = []

    def outputs(self) -> FleetOutputs:
        return self._site.outputs()

    def vocabulary(self) -> int:
        return 32_000

    def tell(self, router: dict[str, object]) -> None:
        self.told.append(dict(router))

    def run(self, *_argv: str) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout="PROVEN\n", stderr="")


class FakeHost:
    """Brings up what is wanted, but for what is `broken`."""

    def __init__(self, site: Site, broken: str = "") -> None:
        self._site, self._broken = site, broken
        self.clusters: dict[str, FakeCluster] = {}
        self.start_s: list[float] = []

    @staticmethod
    def renew(cluster: FakeCluster, _step: object) -> None:
        cluster.renewed += 1

    def bring(self, arms: tuple[Arm, ...]) -> None:
        names = {arm.engines for arm in arms} - {self._broken}
        self.clusters = {n: self.clusters.get(n) or FakeCluster(self._site) for n in names}
        if self._broken in {arm.engines for arm in arms}:
            msg = f"{self._broken} did not come up (9)"
            raise UpError(msg)


def call(host: FakeHost, ledger: Ledger, seconds: float) -> Call:
    ends = time.monotonic() + seconds
    return Call(host=cast("Host", host), ledger=ledger, shape=QUICK, ends=ends, still_s=0)


QUICK = replace(SHAPE, concurrency=(1,), rounds=1, requests=1, cold_starts=2, input_tokens=64)


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()


CELL = SHARED.model_copy(update={"concurrency": 1, "input_tokens": 64})


def blocks_of(name: str, arms: list[str], ledger: Ledger) -> list[Block]:
    acts = [act.only(arms) for act in build_acts(QUICK) if act.name == name]
    return list(build_blocks(acts, DEFAULT, QUICK, 2, ledger))


@pytest.mark.loopback
@pytest.mark.real_process
def test_a_set_up_that_does_not_come_up_costs_its_own_runs_alone(
    site: Site, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    one = call(FakeHost(site, broken="stock"), ledger, 1000)
    assert one.make(blocks_of("admission", ["admit-2"], ledger)[:1], lambda _: {})
    assert [e.arm for e in ledger.entries] == ["default", "admit-2"]
    assert one.smoke["code"] == 0
    told = one.host.clusters["default"].told  # type: ignore[attr-defined]
    assert told == [{}, {"prefill_at_once": 2}], "its router is told before each run"
    assert one.make(blocks_of("compare", ["stock"], ledger)[:1], lambda _: {})
    assert one.failures == ["compare: stock did not come up (9)"]
    assert {e.arm for e in ledger.entries if e.act == "compare"} == {"default"}


@pytest.mark.loopback
@pytest.mark.real_process
def test_smoke_climbs_until_a_call_was_proven_by_it(site: Site, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for code, climbs in ((None, True), (10, True), (0, False)):
        if code is not None:
            ledger.add_call({"smoke": {"code": code}})
        one = call(FakeHost(site), ledger, 1000)
        assert one.make([Block((DEFAULT,), [job(cell=CELL, round=code or 99)])], lambda _: {})
        assert bool(one.smoke) == climbs, code


@pytest.mark.loopback
@pytest.mark.real_process
def test_cold_pairs_are_met_once_a_start_by_all_at_the_same_time(
    site: Site, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    one = call(FakeHost(site), ledger, 1000)
    assert one.make(blocks_of("cold", ["pull"], ledger), lambda _: {})
    assert one.failures == []
    assert sorted((e.arm, e.run.round, len(e.run.good)) for e in ledger.entries) == [
        *(("default", 1, 1), ("default", 2, 1), ("pull", 1, 1), ("pull", 2, 1)),
    ]
    for cluster in one.host.clusters.values():
        assert cluster.renewed == 2  # type: ignore[attr-defined]
        assert cluster.told == [{"warm_pairs": False}, {}]  # type: ignore[attr-defined]


@pytest.mark.loopback
def test_nothing_is_begun_that_would_go_beyond_the_time_that_was_given(
    site: Site, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    host = FakeHost(site)
    assert not call(host, ledger, 30).make(blocks_of("compare", ["stock"], ledger), lambda _: {})
    assert host.clusters == {}, "engines would not have come up in time"


@pytest.mark.loopback
@pytest.mark.real_process
def test_a_run_is_given_the_time_that_the_last_of_its_kind_took(site: Site, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    one = call(FakeHost(site), ledger, 1000)
    jobs = [job(cell=CELL, round=n) for n in (1, 2)]
    assert one.make([Block((DEFAULT,), jobs[:1])], lambda _: {})
    one._took_s = dict.fromkeys(one._took_s, 10_000.0)
    assert not one.make([Block((DEFAULT,), jobs[1:])], lambda _: {})
    assert [e.run.round for e in ledger.entries] == [1]


# --- what is made of it ----------------------------------------------------------------------
def test_a_ratio_above_one_is_ours_being_better(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    add(ledger, job(), 100)
    add(ledger, job("stock", "pull"), 400)
    told = summary.summarize(ledger.entries, SHAPE)
    assert told["ttft_p50_stock_over_default"] == 4.0
    assert told["ttft_p99_stock_over_default"] == 4.0
    assert told["reqs_stock_over_default"] == 4.0, "it answers four times as many a second"
    assert told["ttft_p99_pull_over_push_equal"] is None, "it was not measured"


def test_arms_that_were_not_measured_in_turns_are_not_compared(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    add(ledger, job(), 100)
    add(ledger, replace(job("stock", "pull"), beside="default+pull"), 400)
    assert summary.summarize(ledger.entries, SHAPE)["ttft_p50_stock_over_default"] is None


def test_too_few_samples_carry_no_figure(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    add(ledger, job(), 100, count=50)
    add(ledger, job("stock", "pull"), 400, count=50)
    told = summary.summarize(ledger.entries, SHAPE)
    assert (told["ttft_p50_stock_over_default"], told["ttft_p99_stock_over_default"]) == (4.0, None)


def test_cold_pairs_are_compared_by_their_mean(tmp_path: Path) -> None:
    cold = Cell(scenario="cold", input_tokens=256, output_tokens=8, concurrency=1)
    ledger = Ledger(tmp_path)
    add(ledger, job(cell=cold), 50, count=3)
    add(ledger, job("pull", "pull", cell=cold), 200, count=3)
    assert summary.summarize(ledger.entries, SHAPE)["cold_ttft_mean_pull_over_push"] == 4.0


def test_the_report_says_what_it_is_of_and_what_is_missing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    add(ledger, job(), 100)
    add(ledger, job("stock", "pull"), 400)
    call = {"when": "2026-12-01T00:00:00Z", "failures": ["pull did not come up"]}
    ledger.add_call(call | {"set_ups": {"stock": {"router": "kvdeploy"}}})
    document = build_document(ledger, LARGE, replace(HOST, gpus=(141.0,)), small=False)
    assert document["gpus"] == "1 shared"
    assert document["notes"][0].startswith("both engines of every set-up share one GPU")
    assert "stock has kvdeploy's router before it: no vllm-router was given" in document["notes"]
    assert document["notes"][-1] == "failed: pull did not come up"
    assert document["arms"]["stock"]["expected"]
    json.dumps(document)
    html = page.render(ledger.entries, document)
    plots = html.split("<svg")[1:]
    assert len(plots) == 8
    for plot in plots:
        ElementTree.fromstring("<svg" + plot.split("</svg>")[0] + "</svg>")
    legend = html.split("legend")[-1].split("</p>")[0]
    assert [n for n in ("push", "stock") if f"</i>{n}<" in legend] == ["push", "stock"]
