"""A bench of a fleet that is scripted: what is asked, timed, counted, and given up."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.errors import FleetError
from kvdeploy.model.bench import Cell
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs
from kvdeploy.model.routing import Engine, RouterConfig
from kvdeploy.planning.bench.matrix import Planned
from kvdeploy.stages.bench import Bench, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.routing import Mode

pytestmark = [pytest.mark.loopback, pytest.mark.real_process]

BYTES = 1000


class Site(ThreadingHTTPServer):
    """Router and engine in one: as many tokens as wanted, BYTES pushed for each but aggregated."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sick: dict[str, int] = {}
        """Modes that fail after so many requests."""
        self.dies_after = 10**9
        """Requests of `aggregated` after which the engines tell no counters."""
        self.blocks = 8
        """Of KV, in each engine; 0 when they do not tell."""
        self.pairs: list[str] = []
        """That were asked for by name."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, mode: str, body: dict[str, Any]) -> bool:
        with self.lock:
            self.asked.append((mode, body))
            return self.count(mode) <= self.sick.get(mode, 10**9)

    def count(self, mode: str) -> int:
        return Counter(m for m, _ in self.asked)[mode]

    def outputs(self) -> FleetOutputs:
        process = LaunchSpec(
            name="router",
            role="router",
            argv=("x",),
            ports=(1,),
            ready=Readiness(url=f"{self.url}/health", timeout_s=1),
        )
        engines = (
            Engine(name="prefill-0", role="prefill", url=self.url),
            Engine(name="decode-0", role="decode", url=self.url),
        )
        config = RouterConfig(
            host="127.0.0.1", port=1, served_model="tiny", mode_header=True, engines=engines
        )
        return FleetOutputs(
            url=self.url, engines=(), router=process, router_config=config, generations={}
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site  # type: ignore[mutable-override]  # it is ours alone

    def do_GET(self) -> None:
        if self.server.count("aggregated") >= self.server.dies_after:
            self._send(500, "text/plain", b"")
            return
        pushed = sum(self.server.count(m) for m in ("push", "push-sequential"))
        lines = (
            f"vllm:nixl_bytes_transferred_sum {BYTES * pushed}",
            f"vllm:nixl_bytes_transferred_count {pushed}",
            f"vllm:nixl_post_time_seconds_sum {pushed / 100}",
            "vllm:kv_cache_usage_perc 0.0",
            f'vllm:cache_config_info{{num_gpu_blocks="{self.server.blocks}"}} 1.0',
        )
        self._send(200, "text/plain", "\n".join((*lines, "")).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):  # an engine, asked alone
            self.server.take("alone", body)
            self._send(200, "application/json", b'{"choices": []}')
            return
        mode = self.headers.get("X-Kvdeploy-Mode", "push")
        if pair := self.headers.get("X-Kvdeploy-Pair"):
            self.server.pairs.append(pair)
        if not self.server.take(mode, body):
            self._send(503, "application/json", b"{}")
            return
        count = body["max_tokens"]
        choices = [
            {
                "text": "x",
                "token_ids": [7000 + i],
                "finish_reason": "length" if i == count - 1 else None,
            }
            for i in range(count)
        ]
        events = [{"choices": [choice]} for choice in choices]
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in (*events, usage))
        self._send(200, "text/event-stream", f"{text}data: [DONE]\n\n".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Told:
    """The line of progress."""

    def __init__(self) -> None:
        self.details: list[str] = []

    def update(self, detail: str) -> None:
        self.details.append(detail)

    def note(self, text: str) -> None:
        raise AssertionError(text)


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()


def planned(*modes: Mode, scenario: str = "unique", clients: int = 2) -> list[Planned]:
    cell = Cell(scenario=scenario, input_tokens=100, output_tokens=3, concurrency=clients)
    return [Planned(mode=m, cell=cell, round=n) for n in (1, 2) for m in modes]


def measure(
    site: Site,
    asked: list[Planned],
    requests: int = 10,
    renew: Callable[[], None] | None = None,
) -> tuple[Bench, Told]:
    pace = Pace(requests=requests, seconds=30)
    bench = Bench(vocabulary=32_000, seed=0, mark="m", pace=pace, runs=len(asked), still_s=0)
    told = Told()
    bench.measure(site.outputs(), asked, told, renew)
    return bench, told


def test_every_run_asks_its_mode_and_counts_what_moved_after_its_warm_up(site: Site) -> None:
    bench, told = measure(site, planned("push", "aggregated"))
    assert bench.failed == {}
    assert [(r.mode, r.round) for r in bench.runs] == [
        *(("push", 1), ("aggregated", 1), ("push", 2), ("aggregated", 2)),
    ]
    assert {len(r.good) for r in bench.runs} == {10}
    seen = [r.moved for r in bench.runs if r.moved]
    moved = [(m.kv_bytes, m.transfers) for m in seen]
    # Both engines are this one site, so what it pushed is counted twice.
    assert moved == [(2 * 10 * BYTES, 20), (0, 0), (2 * 10 * BYTES, 20), (0, 0)]
    assert [round(m.post_s, 2) for m in seen] == [0.2, 0.0, 0.2, 0.0]
    assert (site.count("push"), site.count("aggregated")) == (24, 24)
    assert told.details[0] == "run 1 of 4: push, unique 100/3 x2"
    assert told.details[3].startswith("run 4 of 4, about ")


def test_one_pair_alone_is_measured_where_it_is_named(site: Site) -> None:
    pace, asked = Pace(requests=2, seconds=30), planned("push")[:1]
    bench = Bench(vocabulary=32_000, seed=0, mark="m", pace=pace, runs=1, still_s=0, pair="p/d")
    bench.measure(site.outputs(), asked, Told())
    assert set(site.pairs) == {"p/d"}


def test_what_is_asked_makes_an_answer_of_exactly_so_many_tokens(site: Site) -> None:
    measure(site, planned("push")[:1])
    _, body = site.asked[-1]
    assert len(body.pop("prompt")) == 100
    assert body == {
        "model": "tiny",
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_conversation_goes_on_with_the_answer_that_was_given(site: Site) -> None:
    measure(site, planned("push", scenario="turns", clients=1)[:1], requests=4)
    *_, first, second, _, _ = (body["prompt"] for _, body in site.asked)
    assert second[: len(first) + 3] == [*first, 7000, 7001, 7002]


def test_a_mode_that_fails_half_way_is_given_up_and_what_was_measured_stays(site: Site) -> None:
    site.sick["push-sequential"] = 6  # two of them warm up
    bench, _ = measure(site, planned("push", "push-sequential"))
    assert bench.failed == {
        "push-sequential": "unique 100/3 x2, round 1: 6 of 10 requests failed, most with: "
        "status 503"
    }
    assert [(r.mode, r.round, len(r.good)) for r in bench.runs] == [
        *(("push", 1, 10), ("push-sequential", 1, 4), ("push", 2, 10)),
    ]
    assert site.count("push-sequential") == 2 + 10, "it was asked again"


def test_a_mode_whose_warm_up_fails_is_given_up(site: Site) -> None:
    site.sick["aggregated"] = 0
    bench, _ = measure(site, planned("aggregated", "push"))
    assert bench.failed == {"aggregated": "a warm-up request was not answered: status 503"}
    assert [r.mode for r in bench.runs] == ["push", "push"]


def test_what_clients_saw_is_kept_when_an_engine_has_gone_since(site: Site) -> None:
    site.dies_after = 12
    bench, _ = measure(site, planned("aggregated"))
    assert bench.failed == {
        "aggregated": "unique 100/3 x2, round 1: an engine did not answer when its counters were "
        "to be read"
    }
    (run,) = bench.runs
    assert len(run.good) == 10
    assert run.moved is None


def test_a_run_ends_when_its_time_is_over(site: Site) -> None:
    pace = Pace(requests=10**6, seconds=0.2)
    bench = Bench(vocabulary=32_000, seed=0, mark="m", pace=pace, runs=1, still_s=0)
    bench.measure(site.outputs(), planned("push")[:1], Told())
    (run,) = bench.runs
    assert 0.2 <= run.seconds < 5
    assert run.good


def test_every_run_is_told_of_when_it_is_over(site: Site) -> None:
    seen: list[int] = []
    bench = Bench(
        vocabulary=32_000,
        seed=0,
        mark="m",
        pace=Pace(requests=2, seconds=30),
        runs=4,
        still_s=0,
        on_run=lambda: seen.append(len(bench.runs)),
    )
    bench.measure(site.outputs(), planned("push", "aggregated"), Told())
    assert seen == [1, 2, 3, 4]


# --- cold pairs ------------------------------------------------------------------------------
def test_a_cold_pair_is_asked_once_after_its_engines_were_asked_alone(site: Site) -> None:
    started: list[int] = []
    asked = planned("push", "push-sequential", scenario="cold", clients=1)[:2]
    bench, _ = measure(site, asked, renew=lambda: started.append(len(site.asked)))
    assert bench.failed == {}
    once = ["alone", "alone", "push"] * 3 + ["alone", "alone", "push-sequential"] * 3
    assert [mode for mode, _ in site.asked] == once
    assert started == [0, 3, 6, 9, 12, 15]
    assert site.pairs == ["prefill-0/decode-0"] * 6
    assert [len(r.good) for r in bench.runs] == [3, 3]
    # Both engines are this one site, so what it pushed is counted twice.
    assert [r.moved.transfers if r.moved else None for r in bench.runs] == [6, 6]
    beginnings = {tuple(body["prompt"][:16]) for _, body in site.asked}
    assert len(beginnings) == len(site.asked), "no cache holds the beginning of another"


def test_decode_that_does_not_come_back_ends_its_mode_and_no_other(site: Site) -> None:
    def renew() -> None:
        if len(site.asked) > 3:
            msg = "decode-0 does not end"
            raise FleetError(msg)

    asked = [
        *planned("push", scenario="cold", clients=1),
        *planned("aggregated"),
    ]
    bench, _ = measure(site, asked, renew=renew)
    assert bench.failed == {"push": "decode-0 does not end"}
    assert [r.mode for r in bench.runs] == ["aggregated", "aggregated"]


# --- fragmented ------------------------------------------------------------------------------
def test_every_block_of_the_cache_is_used_once_before_the_first_fragmented_run(site: Site) -> None:
    site.blocks = 40
    bench, told = measure(site, planned("push-sequential", scenario="fragmented"))
    assert bench.failed == {}
    scattering = [b for mode, b in site.asked if mode == "push" and b["max_tokens"] == 1]
    tokens = sum(len(body["prompt"]) for body in scattering)
    assert tokens >= 40 * 128 * 1.25
    assert tokens < 40 * 128 * 1.25 + 8 * 4 * 100, "and not much more"
    assert len({len(body["prompt"]) for body in scattering}) > 20
    assert sum("scattering" in line for line in told.details) == 1, "engines stay so"


def test_engines_that_do_not_tell_their_blocks_are_not_called_fragmented(site: Site) -> None:
    site.blocks = 0
    bench, _ = measure(site, planned("push", scenario="fragmented"))
    assert bench.failed == {"push": "prefill-0 does not tell how many KV blocks it has"}
    assert bench.runs == []
