"""A real fleet on this machine, from `up` to `down`: real vLLM engines, real NIXL, real kills.

The tests are one story in the order of the file; each leaves the fleet whole for the next.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import openai
import psutil
import pytest

from kvdeploy.adapters.http import Answer, post
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.metrics import fetch_counters
from kvdeploy.polling import wait_for
from tests.certificates import write_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real_process, pytest.mark.e2e]

UP_TIMEOUT_S = 900  # the first `up` builds the runtime
LONG = "The harbour lights went out one by one, and nobody on the pier said a word. " * 8


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Cluster:
    """The command line as a user has it, in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = next(machine.free_ports(28000))
        self.url = f"http://127.0.0.1:{self.port}"
        text = f"name: e2e\nrouter: {{port: {self.port}}}\nconnector: {{block_size: 32}}\n"
        (root / "cluster.yaml").write_text(text)

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "kvdeploy", *words]

    def run(self, *words: str, timeout_s: float = 120) -> Ran:
        done = subprocess.run(
            self.argv(*words), cwd=self.root, capture_output=True, text=True, timeout=timeout_s
        )
        print(done.stderr, file=sys.stderr)
        return Ran(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv(*words), cwd=self.root, stderr=subprocess.PIPE, text=True)

    def up(self, *words: str) -> Ran:
        return self.run("up", "--json", *words, timeout_s=UP_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run("status", "--json").document
        return found

    def started(self) -> dict[str, int] | None:
        """Pids of all three processes, as soon as all have one."""
        pids = {p["name"]: p["pid"] for p in self.status()["processes"]}
        return pids if len(pids) == 3 and all(pids.values()) else None

    def process(self, name: str) -> dict[str, Any]:
        return next(p for p in self.status()["processes"] if p["name"] == name)

    def engine_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.process(name)['ports'][0]}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def reference(self, prompt: str, max_tokens: int = 24) -> str:
        """Prefill asked like any vLLM server: it computes everything itself."""
        answer = post(
            f"{self.engine_url('prefill-0')}/v1/completions",
            {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
            timeout_s=60,
        )
        return str(answer.body["choices"][0]["text"])

    def living(self) -> list[str]:
        """Every process that belongs to this cluster, found without kvdeploy's help."""
        found = []
        for p in psutil.process_iter(["pid", "cmdline"]):
            line = " ".join(p.info["cmdline"] or ())
            if str(self.root) in line and p.info["pid"] != os.getpid():
                found.append(line)
        found += [
            f"a listener on port {port}"
            for port in range(self.port, self.port + 1)
            if not machine.port_is_free(port)
        ]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("e2e"))
    yield cluster
    cluster.run("down")


def engine_workers() -> set[int]:
    return {p.pid for p in psutil.process_iter(["name"]) if "VLLM::" in (p.info["name"] or "")}


def test_up_brings_a_proven_fleet(cluster: Cluster) -> None:
    ran = cluster.up()
    assert ran.code == 0, ran.err
    assert ran.document["done"] == ["runtime", "model", "fleet", "proof"]
    status = cluster.status()
    assert status["whole"]
    assert status["pairs"] == {"prefill-0/decode-0": "ready"}


def test_a_second_up_finds_nothing_to_do(cluster: Cluster) -> None:
    started = time.monotonic()
    ran = cluster.up()
    assert (ran.code, ran.document["done"]) == (0, [])
    assert time.monotonic() - started < 15


def test_streams_go_on_through_an_up_that_changes_what_the_router_reads_again(
    cluster: Cluster,
) -> None:
    """There is a stream under way all the time, and the router is the same process after it."""
    client, router = cluster.client(), cluster.process("router")["pid"]
    expected = cluster.reference("Once", max_tokens=400)
    changed = threading.Event()

    def ask() -> list[str]:
        answers = []
        while not changed.is_set():
            parts = client.completions.create(
                model="tiny", prompt="Once", max_tokens=400, temperature=0, stream=True
            )
            answers.append("".join(p.choices[0].text for p in parts if p.choices))
        return answers

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            ran = cluster.up("--set", "router.deadlines.inter_token_s=50")
        finally:
            changed.set()
        answers = [answer for one in asked for answer in one.result()]
    assert ran.code == 0, ran.err
    assert {*answers} == {expected}
    assert cluster.process("router")["pid"] == router
    with urllib.request.urlopen(f"{cluster.url}/metrics") as page:
        assert 'kvdeploy_router_reloads_total{outcome="done"} 1.0' in page.read().decode()


def test_a_router_of_two_workers_with_a_certificate_is_proven_like_any(cluster: Cluster) -> None:
    cert, key = write_certificate(cluster.root)
    sets = (f"router.tls_cert_file={cert}", f"router.tls_key_file={key}", "router.workers=2")
    ran = cluster.up(*(word for value in sets for word in ("--set", value)))
    assert ran.code == 0, ran.err
    assert ran.document["url"] == f"https://127.0.0.1:{cluster.port}"
    assert cluster.status()["whole"]
    smoked = cluster.run("smoke", "--json", timeout_s=300)
    assert smoked.code == 0, smoked.err
    assert cluster.up().code == 0


def test_the_openai_client_gets_the_tokens_of_an_aggregated_engine(cluster: Cluster) -> None:
    client = cluster.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    for prompt in ("Hi", LONG, LONG[:300] + "But then the bell rang twice."):
        expected = cluster.reference(prompt)
        whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        assert whole.choices[0].text == expected
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 24
        parts = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
        assert "".join(p.choices[0].text for p in parts if p.choices) == expected


def test_the_openai_client_chats_streamed_and_not(cluster: Cluster) -> None:
    client = cluster.client()
    messages: Any = [{"role": "user", "content": LONG}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=16, temperature=0
    )
    parts = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_completion_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text
    assert text == whole.choices[0].message.content
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 16


def test_several_choices_and_several_prompts_come_back_whole(cluster: Cluster) -> None:
    client = cluster.client()
    prompts = ["One fish", f"Two fish. {LONG}"]
    many = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)
    assert [c.index for c in many.choices] == [0, 1]
    assert [c.text for c in many.choices] == [cluster.reference(p, 8) for p in prompts]
    sampled = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=8, temperature=1, seed=7, n=3
    )
    assert [c.index for c in sampled.choices] == [0, 1, 2, 3, 4, 5]
    assert sampled.usage is not None
    assert sampled.usage.completion_tokens == 48


def test_a_mistake_of_the_client_is_told_as_openai_tells_it(cluster: Cluster) -> None:
    client = cluster.client()
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="tiny", prompt="x" * 5000, max_tokens=4)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices


UNUSUAL: list[dict[str, Any]] = [
    {"prompt_logprobs": 1},
    {"echo": True, "logprobs": 1},
    {"echo": True},
    {"logprobs": 5},
    {"logprobs": 100},
    {"max_tokens": 0},
    {"min_tokens": 5},
    {"stop": ["e", "a"]},
    {"logit_bias": {"65": 100}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[0-9]{3}"}},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [1, 2, 3] * 40},
    {"prompt": [[1, 2, 3] * 40, [4, 5]]},
    {"prompt": [99999]},
    {"prompt": "é😀" * 40},
    {"prompt": "a" * 2040},
    {"truncate_prompt_tokens": 10},
    {"stream_options": {"include_usage": True}},
    {"suffix": "x"},
    {"n": 0},
    {"temperature": -1},
    {"seed": "x"},
]


def test_unusual_requests_are_answered_as_an_aggregated_engine_does_and_cost_no_blocks(
    cluster: Cluster,
) -> None:
    urls = [cluster.engine_url(n) for n in ("prefill-0", "decode-0")]
    plain = {"model": "tiny", "prompt": LONG, "max_tokens": 8, "temperature": 0}
    for i, changed in enumerate(UNUSUAL):
        asked = plain | {"cache_salt": f"unusual {i}"} | changed
        alone, routed = (
            post(f"{url}/v1/completions", asked, timeout_s=60) for url in (urls[0], cluster.url)
        )
        assert routed.status == alone.status, (changed, routed.message)
        assert texts(routed) == texts(alone), changed

    def nothing_held() -> bool | None:
        seen = [fetch_counters(u, timeout_s=10) for u in urls]
        return True if all(not c.running and not c.kv_cache_usage for c in seen) else None

    assert wait_for(nothing_held, timeout_s=20, interval_s=0.5), "KV blocks are held"


def texts(answer: Answer) -> list[str]:
    if isinstance(answer.body, dict) and "choices" in answer.body:
        return [c["text"] for c in answer.body["choices"]]
    return [answer.message]


def test_a_client_that_leaves_costs_no_blocks(cluster: Cluster) -> None:
    urls = [cluster.engine_url(n) for n in ("prefill-0", "decode-0")]
    before = [fetch_counters(u, timeout_s=10).kv_cache_usage for u in urls]
    for patience in (0.001, 0.05, 0.3):
        impatient = cluster.client().with_options(timeout=patience)
        for i in range(4):
            with pytest.raises(openai.APITimeoutError):
                impatient.completions.create(
                    model="tiny", prompt=f"{patience} {i} {LONG}", max_tokens=1200
                )

    def given_back() -> bool | None:
        seen = [fetch_counters(u, timeout_s=10) for u in urls]
        idle = all(not c.running and not c.waiting for c in seen)
        usage = [c.kv_cache_usage for c in seen]
        return True if idle and all(a <= b for a, b in zip(usage, before, strict=True)) else None

    assert wait_for(given_back, timeout_s=60, interval_s=0.5), "KV blocks are still held"
    assert cluster.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_smoke_proves_the_fleet_and_sees_each_way_to_break_it(cluster: Cluster) -> None:
    """Engines are started otherwise, and the cluster's own again: three times there and back."""
    ran = cluster.run("smoke", "--restart", "--json", "--junit", "smoke.xml", timeout_s=900)
    assert ran.code == 0, ran.err
    report = ran.document
    assert report["proven"]
    verdicts = {(r["rung"], r["subject"]): r["verdict"] for r in report["rungs"]}
    pair = "prefill-0/decode-0"
    assert verdicts.pop(("control", "TCP in place of EFA")) == "not applicable"
    assert verdicts.pop(("ttft", pair)) == "not applicable"
    (ttft,) = (r for r in report["rungs"] if r["rung"] == "ttft")
    assert ttft["evidence"]["samples"] == {"push": 80, "pull": 80}
    here = "this machine"
    assert {k for k, v in verdicts.items() if v != "passed"} == {
        (rung, here) for rung in ("node", "node/memlock", "fabric")
    }
    assert {v for v in verdicts.values() if v != "passed"} == {"not applicable"}
    assert ("spec", "cluster file") in verdicts
    written = {r["rung"]: r["evidence"] for r in report["rungs"] if r["rung"].startswith("write/")}
    assert {name: e["wrote"]["bytes"] for name, e in written.items()} == {
        "write/small": 4096,
        "write/many": 2**24,
        "write/large": 2**26,
    }
    assert {e["wrote"]["backend"] for e in written.values()} == {"UCX"}
    for subject in ("decode in pull mode", "other block size"):
        assert ("control", subject) in verdicts
    suite = ET.parse(cluster.root / "smoke.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == (str(len(report["rungs"])), "0")
    assert suite.get("skipped") == "5"
    assert cluster.up().document["done"] == [], "the cluster did not get its own fleet back"
    for rung in ("short", "long", "prefix", "chat", "stream"):
        assert (f"tokens/{rung}", pair) in verdicts
    assert ("bytes", pair) in verdicts
    assert ("control", "prefill stopped") in verdicts


def test_smoke_is_red_when_decode_does_without_prefill(cluster: Cluster) -> None:
    """A router that sends plain requests to decode looks healthy and answers right."""
    record = cluster.root / ".kvdeploy" / "e2e" / "record.json"
    good = record.read_text()
    changed = json.loads(good)
    fleet = changed["stages"]["fleet"]["result"]
    with plain_proxy(cluster.engine_url("decode-0"), router=fleet["url"]) as url:
        fleet["url"] = url
        record.write_text(json.dumps(changed))
        try:
            ran = cluster.run("smoke", "--json", timeout_s=300)
        finally:
            record.write_text(good)
    assert ran.code == 10
    red = {r["rung"] for r in ran.document["rungs"] if r["verdict"] == "failed"}
    assert red == {"pushed", "bytes", "local-compute", "control"}
    assert "no KV bytes moved: decode did without prefill" in ran.err
    assert cluster.run("smoke").code == 0


@contextmanager
def plain_proxy(target: str, *, router: str) -> Iterator[str]:
    """Says what the router says of itself and its pairs, and hands every request to one engine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(urllib.request.Request(router + self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Content-Type": "application/json"}
            self._pass(urllib.request.Request(target + self.path, body, headers))

        def _pass(self, request: urllib.request.Request) -> None:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self._send(answer.status, answer.headers["Content-Type"], answer.read())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_bench_measures_modes_side_by_side_and_leaves_the_fleet_as_it_was(
    cluster: Cluster,
) -> None:
    """Every byte is one that the model's shape demands: 200 tokens are 7 blocks of 32."""
    small = ("--scenario", "unique", "--input", "200", "--output", "4", "--concurrency", "2")
    pids = cluster.started()
    ran = cluster.run(
        *("bench", *small, "--mode", "push,push-sequential,aggregated", "--requests", "6"),
        *("--json", "bench.json", "--html", "bench.html", "--assert", "errors.push == 0"),
        *("--assert", "bytes.push-sequential > bytes.aggregated"),
    )
    assert ran.code == 0, ran.err
    report = json.loads((cluster.root / "bench.json").read_text())
    seen = [(r["mode"], r["round"], len(r["samples"])) for r in report["runs"]]
    modes = ("push", "push-sequential", "aggregated")
    assert seen == [(mode, number, 6) for number in (1, 2) for mode in modes]
    token_bytes = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, numbers, float32
    for run in report["runs"]:
        pushed = run["mode"] != "aggregated"
        assert run["moved"]["kv_bytes"] == (6 * 7 * 32 * token_bytes if pushed else 0)
        assert [s["error"] for s in run["samples"]] == [""] * 6
        assert {len(s["gaps_s"]) for s in run["samples"]} == {3}
        by_source = run["moved"]["prompt_tokens"]["decode-0"]
        assert by_source["external_kv_transfer" if pushed else "local_compute"] == 6 * 200
    environment = report["environment"]
    assert environment["flags"].keys() == {"prefill-0", "decode-0"}
    assert environment["versions"].keys() >= {"vllm", "nixl"}
    assert environment["device"] == "cpu"
    assert "nothing about GPUs" in ran.out
    assert "<svg" in (cluster.root / "bench.html").read_text()
    assert cluster.started() == pids
    refused = post(
        f"{cluster.url}/v1/completions",
        {"model": "tiny", "prompt": "x", "max_tokens": 1},
        timeout_s=30,
        headers={"X-Kvdeploy-Mode": "aggregated"},
    )
    assert refused.status == 400, "the router still lets requests choose their mode"

    tight = ("--mode", "push", "--rounds", "1", "--requests", "5")
    ran = cluster.run("bench", *small, *tight, "--assert", "ttft.p50.push < 0.001")
    assert ran.code == 11
    assert "is not < 0.001" in ran.err


def test_bench_refuses_a_fleet_that_was_not_proven(cluster: Cluster) -> None:
    record = cluster.root / ".kvdeploy" / "e2e" / "record.json"
    good = record.read_text()
    changed = json.loads(good)
    del changed["stages"]["proof"]
    record.write_text(json.dumps(changed))
    try:
        ran = cluster.run("bench", "--quick")
    finally:
        record.write_text(good)
    assert ran.code == 10
    assert "was not proven to push since its engines were started" in ran.err


def test_a_killed_engine_is_missed_and_up_repairs_it(cluster: Cluster) -> None:
    before = cluster.process("decode-0")
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: True if not cluster.status()["whole"] else None, timeout_s=10)
    assert cluster.run("status").code == 9
    with pytest.raises(openai.InternalServerError):
        cluster.client().completions.create(model="tiny", prompt="x", max_tokens=2)

    ran = cluster.up()

    assert (ran.code, ran.document["done"]) == (0, ["fleet", "proof"])
    after = cluster.process("decode-0")
    assert after["pid"] != before["pid"]
    assert cluster.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_a_second_up_on_a_locked_cluster_is_refused(cluster: Cluster) -> None:
    first = cluster.start("smoke")
    try:
        lock = cluster.root / ".kvdeploy" / "e2e" / "lock"
        assert wait_for(lambda: lock.read_text() or None, timeout_s=30)
        ran = cluster.up()
    finally:
        first.communicate(timeout=120)
    assert ran.code == 12
    assert "cluster 'e2e' is held by 'kvdeploy smoke' (pid " in ran.err
    assert first.returncode == 0


def test_what_a_killed_smoke_has_frozen_is_thawed_by_up(cluster: Cluster) -> None:
    smoke = cluster.start("smoke")
    frozen = wait_for(
        lambda: True if cluster.process("prefill-0")["phase"] == "frozen" else None,
        timeout_s=60,
        interval_s=0.1,
    )
    smoke.kill()
    smoke.communicate(timeout=10)
    assert frozen
    assert cluster.process("prefill-0")["phase"] == "frozen"

    assert cluster.up().code == 0

    assert cluster.status()["whole"]
    assert cluster.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_what_a_killed_smoke_has_started_otherwise_is_replaced_by_up(cluster: Cluster) -> None:
    launched = cluster.root / ".kvdeploy/e2e/processes/decode-0/launch.json"
    smoke = cluster.start("smoke", "--restart")
    other = wait_for(
        lambda: "NixlConnector" in launched.read_text() or None, timeout_s=60, interval_s=0.1
    )
    smoke.kill()
    smoke.communicate(timeout=10)
    assert other
    ran = cluster.run("smoke")
    assert (ran.code, "'kvdeploy up' repairs it" in ran.err) == (9, True)

    ran = cluster.up()

    assert (ran.code, ran.document["done"]) == (0, ["fleet", "proof"])
    assert "NixlPushConnector" in launched.read_text()


def test_an_engine_that_dies_at_start_is_told_and_nothing_of_it_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = Cluster(tmp_path)
    (tmp_path / "cluster.yaml").write_text(
        f"name: sick\nrouter: {{port: {other.port}}}\n"
        "fleet: {decode: {engine_args: {no-such-flag: true}}}\n"
    )
    before = engine_workers()
    ran = other.up()
    assert ran.code == 9
    assert "decode-0 ended (2) before it was ready" in ran.err
    assert "unrecognized arguments: --no-such-flag" in ran.err
    assert other.living() == []
    assert engine_workers() == before
    assert other.run("down").code == 0


def test_two_by_two_works_over_every_pair(cluster: Cluster) -> None:
    words = ("--set", "fleet.prefill.count=2", "--set", "fleet.decode.count=2")
    ran = cluster.up(*words)
    assert ran.code == 0, ran.err
    ran = cluster.run("smoke", "--json", timeout_s=400)
    assert ran.code == 0, ran.err
    passed = {
        r["subject"]
        for r in ran.document["rungs"]
        if r["rung"] == "bytes" and r["verdict"] == "passed"
    }
    pairs = {f"prefill-{p}/decode-{d}" for p in (0, 1) for d in (0, 1)}
    assert passed == pairs | {"router"}
    spec = next(r for r in ran.document["rungs"] if r["rung"] == "spec")
    assert spec["verdict"] == "not applicable"
    assert "fleet.prefill.count is 2, there 1" in spec["message"]


def test_engines_killed_under_load_cost_no_request_and_no_token(cluster: Cluster) -> None:
    """Eight clients at once; what the dead engine was sent moves to another pair."""
    prompts = [f"The {n} lights went out along the harbour wall, and " * 6 for n in range(7)]
    expected = {p: cluster.reference(p) for p in prompts}
    client = cluster.client()

    def ask(prompt: str) -> str:
        made = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=False
        )
        return made.choices[0].text

    for victim in ("prefill-0", "decode-1"):
        pid = cluster.process(victim)["pid"]
        with ThreadPoolExecutor(8) as pool:
            asked = [(p, pool.submit(ask, p)) for p in prompts * 8]
            asked[10][1].result()
            os.kill(pid, signal.SIGKILL)
            assert [p for p, answer in asked if answer.result() != expected[p]] == []
    metrics = urllib.request.urlopen(f"{cluster.url}/metrics").read().decode()
    helped = re.search(r'kvdeploy_router_retried_requests_total{outcome="served"} (\S+)', metrics)
    assert helped
    assert float(helped[1]) > 0


def test_two_by_two_and_back_again(cluster: Cluster) -> None:
    assert cluster.up().code == 0
    assert {p["name"] for p in cluster.status()["processes"]} == {
        "prefill-0",
        "decode-0",
        "router",
    }


def test_an_interrupted_up_leaves_nothing_half_started_and_can_be_run_again(
    cluster: Cluster,
) -> None:
    assert cluster.run("down").code == 0
    first = cluster.start("up")
    assert wait_for(cluster.started, timeout_s=30)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "interrupted" in err
    assert cluster.living() == []

    ran = cluster.up()
    assert (ran.code, ran.document["done"]) == (0, ["fleet", "proof"])


def test_a_killed_up_is_taken_up_by_the_next(cluster: Cluster) -> None:
    """With 16-bit numbers this time: other kernels than float32's, on CPUs with AMX its tiles."""
    sixteen_bits = ("--set", "model.dtype=bfloat16")
    assert cluster.run("down").code == 0
    first = cluster.start("up", *sixteen_bits)
    pids = wait_for(cluster.started, timeout_s=30)
    first.kill()
    first.communicate(timeout=10)
    assert pids

    ran = cluster.up(*sixteen_bits)

    assert ran.code == 0, ran.err
    assert {p["name"]: p["pid"] for p in cluster.status()["processes"]} == pids


def test_down_leaves_nothing(cluster: Cluster) -> None:
    ran = cluster.run("down")
    assert ran.code == 0
    assert ran.out.endswith("nothing is left\n")
    assert cluster.living() == []
    assert engine_workers() == set()
    with pytest.raises(OSError):  # noqa: PT011  # refused, reset: whatever the kernel says
        urllib.request.urlopen(f"{cluster.url}/health", timeout=2)
    assert cluster.run("down").code == 0
    assert cluster.run("status").code == 0
