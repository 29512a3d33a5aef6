"""The recorded pages are those of a vLLM 0.32.0 (CPU) with NixlPushConnector, less other
programs' families, most buckets and creation times. Names, labels, help texts and all numbers
are real except these, written in as a pair that had pushed 19 prompts would show them:

- prefill: bytes_transferred, num_descriptors, xfer_time and post_time of NIXL. (The expired
  lease is real: its request never met a decode.)
- decode: prompt_tokens_by_source, kv_cache_usage_perc, num_requests_waiting and its reason
  'deferred'. (The NIXL zeros are real.)
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.metrics import fetch_counters, parse_counters
from kvdeploy.errors import FleetError
from kvdeploy.model.counters import EngineCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parent.parent / "data"
PREFILL = (DATA / "metrics-prefill.txt").read_text()
DECODE = (DATA / "metrics-decode.txt").read_text()


def test_a_prefill_that_pushed_shows_bytes_transfers_and_failures() -> None:
    counters = parse_counters(PREFILL)
    assert counters.pushed_bytes == 14_614_528
    assert (counters.transfers, counters.descriptors) == (19, 76)
    assert (counters.transfer_s, counters.post_s) == (1.058, 0.021)
    assert ((counters + counters) - counters).post_s == pytest.approx(0.021)
    assert (counters.failed_transfers, counters.failed_notifications) == (0, 0)
    assert (counters.kv_expired, counters.late_notifications) == (1, 0)
    assert (counters.local_tokens, counters.external_tokens) == (4509, 0)


def test_a_decode_that_waits_for_a_push_shows_where_its_prompts_came_from() -> None:
    counters = parse_counters(DECODE)
    assert counters.prompt_tokens_by_source == {
        "local_compute": 0,
        "local_cache_hit": 0,
        "external_kv_transfer": 6766,
    }
    assert (counters.pushed_bytes, counters.external_tokens) == (0, 6766)
    assert (counters.running, counters.waiting, counters.deferred) == (0, 1, 1)
    assert counters.kv_cache_usage == pytest.approx(9 / 1024)


@pytest.mark.parametrize("page", [PREFILL, DECODE])
def test_a_real_page_has_every_counter(page: str) -> None:
    counters = parse_counters(page)
    absent = set(EngineCounters.__dataclass_fields__) - counters.present - {"present"}
    assert absent == set()
    assert counters.has_nixl


def test_a_renamed_metric_is_absent_and_not_zero() -> None:
    counters = parse_counters(PREFILL.replace("vllm:nixl_bytes_transferred", "vllm:nixl_bytes"))
    assert counters.pushed_bytes == 0
    assert "pushed_bytes" not in counters.present
    assert not counters.has_nixl


def test_ranks_are_added_up_and_the_fullest_cache_counts() -> None:
    page = """\
vllm:nixl_bytes_transferred_sum{engine="0"} 100.0
vllm:nixl_bytes_transferred_sum{engine="1"} 23.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1.0
vllm:num_requests_waiting_by_reason{engine="1",reason="deferred"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""
    assert parse_counters(page) == EngineCounters(
        pushed_bytes=123,
        prompt_tokens_by_source={"local_compute": 11},
        deferred=3,
        kv_cache_usage=0.5,
        present=frozenset(
            {"pushed_bytes", "prompt_tokens_by_source", "deferred", "kv_cache_usage"}
        ),
    )


def test_an_empty_page_has_nothing_present() -> None:
    assert parse_counters("") == EngineCounters()


def test_later_less_earlier_is_what_happened_between() -> None:
    earlier = EngineCounters(
        pushed_bytes=10,
        transfers=1,
        failed_transfers=1,
        prompt_tokens_by_source={"local_compute": 4},
        kv_cache_usage=0.5,
        running=3,
    )
    later = EngineCounters(
        pushed_bytes=25,
        transfers=3,
        failed_transfers=1,
        prompt_tokens_by_source={"local_compute": 5, "external_kv_transfer": 7},
        kv_cache_usage=0.1,
        running=1,
        present=frozenset({"pushed_bytes"}),
    )
    assert later - earlier == EngineCounters(
        pushed_bytes=15,
        transfers=2,
        prompt_tokens_by_source={"local_compute": 1, "external_kv_transfer": 7},
        kv_cache_usage=0.1,
        running=1,
        present=frozenset({"pushed_bytes"}),
    )


PAGES = {"/metrics": (200, PREFILL.encode())}


@pytest.fixture
def engine() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = PAGES.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# real_process is what lets a test open sockets; nothing is started.
opens_sockets = [pytest.mark.loopback, pytest.mark.real_process]


class TestFetching:
    pytestmark = opens_sockets

    def test_a_server_is_asked_for_its_page(
        self, engine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert fetch_counters(engine, timeout_s=5) == parse_counters(PREFILL)

    @pytest.mark.parametrize(
        ("status", "body", "message"),
        [
            (404, b"", "{url}/metrics: answered 404 Not Found"),
            (
                200,
                b"<html>\xff",
                "{url}/metrics: not in Prometheus' text format: 'utf-8' codec can't decode byte "
                "0xff in position 6: invalid start byte",
            ),
            (
                200,
                b"vllm:num_requests_running lots\n",
                "{url}/metrics: not in Prometheus' text format: could not convert string to "
                "float: 'lots'",
            ),
        ],
    )
    def test_a_page_that_is_no_metrics_is_refused(
        self,
        engine: str,
        monkeypatch: pytest.MonkeyPatch,
        status: int,
        body: bytes,
        message: str,
    ) -> None:
        monkeypatch.setitem(PAGES, "/metrics", (status, body))
        with pytest.raises(FleetError) as e:
            fetch_counters(engine, timeout_s=5)
        assert e.value.message == message.format(url=engine)
        assert e.value.hint == "the URL must be that of a vLLM server"

    def test_a_dead_engine_is_named(self, engine: str) -> None:
        dead = "http://127.0.0.1:1"
        with pytest.raises(FleetError) as e:
            fetch_counters(dead, timeout_s=5)
        assert e.value.message == (
            "http://127.0.0.1:1/metrics: no answer: [Errno 111] Connection refused"
        )
        assert e.value.hint == "is the engine up? `kvdeploy status` says"
