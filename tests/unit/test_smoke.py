"""The climb of the smoke ladder, against a fleet that can be told to be broken in one way.

The double keeps what real engines keep: NIXL counters, prompt tokens by source, and which blocks
decode holds. A token is a byte, a block 32 of them, and KV is 32 bytes a token: 2 layers, a key
and a value of one head of 4 numbers of 2 bytes each.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvdeploy.errors import CheckError, FleetError, SmokeError
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
from kvdeploy.model.reports import RungReport, SmokeReport, Verdict
from kvdeploy.model.routing import Engine, RouterConfig
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.questions import pair_questions, proof_question
from kvdeploy.stages.proof import ProofStage, raise_unless_proven
from kvdeploy.stages.smoke import Smoke
from tests.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kvdeploy.adapters.local.processes import Processes

pytestmark = pytest.mark.real_process

KV_BYTES_A_TOKEN = 32
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "torch_dtype": "bfloat16",
}
ANSWERED = 24


@dataclass
class Counters:
    pushed: int = 0
    transfers: int = 0
    failed: int = 0
    local: int = 0
    external: int = 0
    usage: float = 0.0
    running: int = 0


@dataclass
class ScriptedFleet:
    """Router, prefills and decodes in one; every switch breaks one thing."""

    block: int = 32
    max_length: int = 2048
    prefills: int = 1
    decodes: int = 1
    # --- switches ---
    wrong_tokens: bool = False
    pushes: bool = True
    extra_blocks: int = 0
    decode_computes: bool = False
    transfers_fail: bool = False
    counts_nixl: bool = True
    answers_without_prefill: bool = False
    hangs_without_prefill: bool = False
    blames_the_client: bool = False
    leaks: bool = False
    stays_down: bool = False
    cuts_streams: bool = False
    refuses: bool = False
    cannot_chat: bool = False
    caches_prefixes: bool = True
    busy: bool = False
    why_down: str = ""
    # --- what is known ---
    counters: dict[str, Counters] = field(default_factory=dict)
    held: dict[str, set[bytes]] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    was_paused: bool = False
    too_long: int = 0
    asked: list[tuple[str | None, str | None]] = field(default_factory=list)
    """Pair and key of every request to the router."""
    urls: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.prefill_names = [f"prefill-{i}" for i in range(self.prefills)]
        self.decode_names = [f"decode-{i}" for i in range(self.decodes)]
        for name in (*self.prefill_names, *self.decode_names):
            self.counters[name] = Counters(running=int(self.busy))
            self.held[name] = set()

    # --- processes, as far as smoke needs them ---
    def pause(self, name: str) -> None:
        self.paused.add(name)
        self.was_paused = True

    def resume(self, name: str) -> None:
        self.paused.discard(name)

    # --- the router's word on pairs ---
    def standing(self) -> dict[str, Any]:
        pairs = [f"{p}/{d}" for p in self.prefill_names for d in self.decode_names]
        state = "down" if self.why_down else "ready"
        return {
            "pairs": dict.fromkeys(pairs, state),
            "reasons": dict.fromkeys(pairs, self.why_down),
        }

    # --- engines ---
    def metrics(self, name: str) -> str:
        with self.lock:
            c = self.counters[name]
            nixl = {
                "vllm:nixl_bytes_transferred_sum": c.pushed,
                "vllm:nixl_bytes_transferred_count": c.transfers,
                "vllm:nixl_num_descriptors_sum": c.transfers,
                "vllm:nixl_num_failed_transfers_total": c.failed,
                "vllm:nixl_num_failed_notifications_total": 0,
                "vllm:nixl_num_kv_expired_reqs_total": 0,
            }
            common = {
                "vllm:num_requests_running": c.running,
                "vllm:num_requests_waiting": 0,
                "vllm:kv_cache_usage_perc": c.usage,
                'vllm:prompt_tokens_by_source_total{source="local_compute"}': c.local,
                'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': c.external,
            }
        values = common | (nixl if self.counts_nixl else {})
        return "".join(f"{name} {value}\n" for name, value in values.items())

    def reference(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt = prompt_of(body)
        with self.lock:
            self.counters[name].local += len(prompt)
        return answer_of(prompt, body)

    # --- the router ---
    def route(self, body: Mapping[str, Any], pair: str | None) -> dict[str, Any]:
        prefill, _, decode = (pair or f"{self.prefill_names[0]}/{self.decode_names[0]}").partition(
            "/"
        )
        prompt = prompt_of(body)
        whole = [prompt[: end + self.block] for end in range(0, len(prompt), self.block)]
        with self.lock:
            p, d = self.counters[prefill], self.counters[decode]
            full = [b for b in whole if len(b) % self.block == 0]
            missing = [b for b in whole if b not in self.held[decode]]
            if self.caches_prefixes:
                self.held[decode] |= set(full)
            if self.pushes:
                blocks = len(missing) + (self.extra_blocks if missing else 0)
                p.pushed += blocks * self.block * KV_BYTES_A_TOKEN
                p.transfers += 1
            if self.transfers_fail:
                p.failed += 1
            if self.decode_computes:
                d.local += len(prompt)
            else:
                d.external += len(prompt)
            if self.leaks and self.was_paused:
                d.usage = 0.01
        return answer_of(prompt, body, shift=int(self.wrong_tokens))


def prompt_of(body: Mapping[str, Any]) -> bytes:
    """The prompt's tokens: one that begins it, then its bytes."""
    if "prompt" in body:
        return b"\0" + str(body["prompt"]).encode()
    return b"\0" + "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"]).encode()


def answer_of(prompt: bytes, body: Mapping[str, Any], *, shift: int = 0) -> dict[str, Any]:
    """Tokens that depend on every byte of the prompt, as vLLM answers."""
    tokens = [b + shift for b in hashlib.sha256(prompt).digest()[: body["max_tokens"]]]
    choice: dict[str, Any] = {"token_ids": tokens, "finish_reason": "length"}
    text = " ".join(map(str, tokens))
    odds = [{f"token_id:{t}": -0.1, f"token_id:{t + 500}": -3.0} for t in tokens]
    if "prompt" in body:
        choice["text"] = text
        if body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": odds}
    else:
        choice["message"] = {"role": "assistant", "content": text}
        if body.get("logprobs"):
            content = [
                {"top_logprobs": [{"token": k, "logprob": v} for k, v in step.items()]}
                for step in odds
            ]
            choice["logprobs"] = {"content": content}
    return {"choices": [choice]}


def handler(fleet: ScriptedFleet, name: str) -> type[http.server.BaseHTTPRequestHandler]:
    """Everything that the server `name` answers; what it was not told of is a 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        wbufsize = -1  # one packet an answer

        def do_GET(self) -> None:
            if name == "router" and self.path == "/ready?complete=1":
                down = fleet.stays_down and fleet.was_paused
                self.say(503 if down else 200, fleet.standing())
            elif name != "router" and self.path == "/metrics":
                self.say(200, fleet.metrics(name))
            else:
                self.say(404, {"error": {"message": f"{name}: GET {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asks = self.path in ("/v1/completions", "/v1/chat/completions")
            if asks and len(prompt_of(body)) + body["max_tokens"] > fleet.max_length:
                fleet.too_long += 1
                self.say(400, {"error": {"message": "longer than max_model_len"}})
                return
            if asks and ("prompt" in body) is not (self.path == "/v1/completions"):
                self.say(400, {"error": {"message": f"wrong body for {self.path}"}})
            elif asks and name == "router":
                self.route(body)
            elif asks and name in fleet.prefill_names:
                if fleet.refuses:
                    self.say(500, {"error": {"message": "engine is dead"}})
                else:
                    self.say(200, fleet.reference(name, body))
            elif self.path == "/tokenize" and name in fleet.prefill_names:
                if fleet.refuses:
                    self.say(500, {"error": {"message": "engine is dead"}})
                elif fleet.cannot_chat and "messages" in body:
                    self.say(400, {"error": {"message": "there is no chat template"}})
                else:
                    self.say(200, {"tokens": list(prompt_of(body))})
            else:
                self.say(404, {"error": {"message": f"{name}: POST {self.path}"}})

        def route(self, body: dict[str, Any]) -> None:
            pair = self.headers["X-Kvdeploy-Pair"]
            fleet.asked.append((pair, self.headers["Authorization"]))
            unanswered = fleet.paused and not fleet.answers_without_prefill
            if unanswered and fleet.hangs_without_prefill:
                fleet.ends.wait(20)
                return
            if fleet.stays_down and fleet.was_paused:
                self.say(503, {"error": {"message": "no pair is ready"}})
            elif unanswered and fleet.blames_the_client:
                self.say(400, {"error": {"message": "bad request"}})
            elif unanswered:
                fleet.ends.wait(float(self.headers["X-Kvdeploy-Timeout-S"]))
                self.say(504, {"error": {"message": "prefill did not answer in time"}})
            else:
                answer = fleet.route(body, pair)
                if body["stream"]:
                    self.stream(answer["choices"][0])
                else:
                    self.say(200, answer)

        def say(self, status: int, document: object) -> None:
            text = document if isinstance(document, str) else json.dumps(document)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def stream(self, choice: Mapping[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            tokens = choice["token_ids"]
            for i, token in enumerate(tokens):
                finish = "length" if i == len(tokens) - 1 else None
                part = {"text": f"{token} ", "token_ids": [token], "finish_reason": finish}
                self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
            if not fleet.cuts_streams:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args: object) -> None:
            pass

    return Handler


class Stand:
    """Starts the servers of scripted fleets, and climbs them."""

    def __init__(self) -> None:
        self.servers: list[http.server.ThreadingHTTPServer] = []
        self.fleets: list[ScriptedFleet] = []
        self.line = Line()

    def start(self, fleet: ScriptedFleet) -> None:
        self.fleets.append(fleet)
        for name in ("router", *fleet.counters):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(fleet, name))
            self.servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            fleet.urls[name] = f"http://127.0.0.1:{server.server_address[1]}"

    def stop(self) -> None:
        for fleet in self.fleets:
            fleet.ends.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def smoke(
        self,
        fleet: ScriptedFleet,
        *,
        config: dict[str, Any] | None = None,
        can_stop: bool = True,
        api_key_file: str | None = None,
        **model: Any,
    ) -> Smoke:
        self.start(fleet)
        spec = ClusterSpec.model_validate(
            {
                "name": "demo",
                "connector": {"block_size": fleet.block},
                "model": {"max_length": fleet.max_length, **model},
                "fleet": {
                    "prefill": {"count": fleet.prefills},
                    "decode": {"count": fleet.decodes},
                },
            }
        )
        processes = cast("Processes", fleet) if can_stop else None
        outputs = outputs_of(fleet, api_key_file=api_key_file)
        return Smoke(spec, model_of(config), outputs, processes, self.line)

    def climb(self, fleet: ScriptedFleet, **how: Any) -> SmokeReport:
        return self.smoke(fleet, **how).climb()


def model_of(config: dict[str, Any] | None = None) -> ModelOutputs:
    return ModelOutputs(path="/m", served_name="tiny", config=config or CONFIG)


def launch_of(name: str, fleet: ScriptedFleet) -> LaunchSpec:
    flags = () if fleet.caches_prefixes else ("--no-enable-prefix-caching",)
    return LaunchSpec(
        name=name, role="decode", argv=("x", *flags), ready=Readiness(url="x", timeout_s=1)
    )


def outputs_of(fleet: ScriptedFleet, *, api_key_file: str | None = None) -> FleetOutputs:
    engines = tuple(
        Engine(
            name=name,
            role="prefill" if name in fleet.prefill_names else "decode",
            url=fleet.urls[name],
        )
        for name in fleet.counters
    )
    url = fleet.urls["router"]
    router = LaunchSpec(
        name="router", role="router", argv=("x",), ready=Readiness(url=url, timeout_s=1)
    )
    return FleetOutputs(
        url=url,
        engines=tuple(launch_of(name, fleet) for name in fleet.decode_names),
        router=router,
        router_config=RouterConfig(
            host="127.0.0.1",
            port=1,
            served_model="tiny",
            engines=engines,
            api_key_file=api_key_file,
        ),
        generations={},
    )


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr("kvdeploy.stages.asking.SETTLE_S", 0.0)
    monkeypatch.setattr("kvdeploy.stages.asking.QUIET_S", 0.0)
    monkeypatch.setattr("kvdeploy.stages.asking.ASK_TIMEOUT_S", 5.0)
    monkeypatch.setattr("kvdeploy.stages.controls.RECOVERY_S", 0.0)
    monkeypatch.setattr("kvdeploy.stages.controls.DEADLINE_S", 0.1)
    monkeypatch.setattr("kvdeploy.stages.controls.TOLERANCE_S", 1.0)
    monkeypatch.setattr("kvdeploy.stages.smoke.AT_ONCE", 4)
    stand = Stand()
    yield stand
    stand.stop()


def rungs(report: SmokeReport, verdict: Verdict) -> set[tuple[str, str]]:
    return {(r.rung, r.subject) for r in report.rungs if r.verdict is verdict}


def red(report: SmokeReport) -> set[str]:
    return {r.rung for r in report.failed}


def the(report: SmokeReport, rung: str, subject: str | None = None) -> RungReport:
    (found,) = (r for r in report.rungs if r.rung == rung and subject in (None, r.subject))
    return found


PAIR = "prefill-0/decode-0"
KINDS = ("short", "long", "prefix", "chat", "stream", "concurrent", "recovered")


# --- what is right ---------------------------------------------------------------------------
def test_a_good_fleet_is_proven_on_every_rung(stand: Stand) -> None:
    fleet = ScriptedFleet()
    report = stand.climb(fleet)
    assert report.failed == ()
    assert report.proven
    assert report.pairs == (PAIR,)
    assert [(r.rung, r.subject) for r in report.rungs] == [
        *((f"tokens/{kind}", PAIR) for kind in ("short", "long", "prefix", "chat", "stream")),
        *((rung, PAIR) for rung in ("pushed", "bytes", "failures", "local-compute")),
        *((rung, "router") for rung in ("tokens/concurrent", "pushed", "bytes", "failures")),
        ("control", "prefill stopped"),
        ("tokens/recovered", "router"),
        ("leak", "decode-0"),
    ]
    assert {r.verdict for r in report.rungs} == {Verdict.PASSED}
    assert the(report, "tokens/concurrent").message.startswith("4 at once: ")
    assert the(report, "control").seconds >= 0.1
    assert fleet.paused == set()
    expected = the(report, "bytes", PAIR).evidence["expected_bytes"]
    assert isinstance(expected, int)
    assert expected > 4 * fleet.block * KV_BYTES_A_TOKEN


@pytest.mark.parametrize("block", [16, 128])
def test_a_good_fleet_is_proven_whatever_its_blocks(stand: Stand, block: int) -> None:
    report = stand.climb(ScriptedFleet(block=block))
    assert report.failed == ()
    assert report.proven


def test_every_pair_is_named_to_the_router_and_proven_on_its_own(stand: Stand) -> None:
    fleet = ScriptedFleet(block=16, prefills=2, decodes=2)
    report = stand.climb(fleet)
    pairs = [f"prefill-{p}/decode-{d}" for p in (0, 1) for d in (0, 1)]
    assert report.failed == ()
    assert report.pairs == tuple(pairs)
    assert [pair for pair, _ in fleet.asked if pair] == [p for p in pairs for _ in range(5)]
    assert {(r, s) for r, s in rungs(report, Verdict.PASSED) if r == "bytes"} == {
        ("bytes", s) for s in (*pairs, "router")
    }


class Under:
    """What is under a fleet, one rung of which may be bad."""

    def __init__(self, verdict: Verdict = Verdict.PASSED) -> None:
        self.verdict = verdict
        self.pushed: dict[str, int] = {}

    def rungs(self, step: object, nonce: str) -> Iterator[RungReport]:
        yield RungReport(rung="write/small", subject=PAIR, verdict=self.verdict, message=nonce)

    def carried(self, pushed: Mapping[str, int]) -> Iterator[RungReport]:
        self.pushed = dict(pushed)
        yield RungReport(rung="efa", subject=PAIR, verdict=Verdict.PASSED, message="")


def test_what_is_under_the_fleet_comes_first_and_counts(stand: Stand) -> None:
    fleet, under = ScriptedFleet(), Under()
    smoke = stand.smoke(fleet)
    smoke.ground = under
    report = smoke.climb()
    assert report.proven
    assert [r.rung for r in report.rungs][:2] == ["write/small", "tokens/short"]
    assert the(report, "write/small").message == smoke.nonce
    assert the(report, "efa").verdict is Verdict.PASSED
    moved = [r.evidence["pushed_bytes"] for r in report.rungs if r.rung == "bytes"]
    assert under.pushed == {"prefill-0": sum(cast("list[int]", moved))}

    bad = stand.smoke(ScriptedFleet())
    bad.ground = Under(Verdict.FAILED)
    assert not bad.climb().proven


def test_a_second_climb_of_the_same_fleet_is_proven_too(stand: Stand) -> None:
    fleet = ScriptedFleet()
    assert stand.climb(fleet).proven
    assert stand.climb(fleet).failed == ()


def test_the_first_key_of_the_file_is_shown_to_the_router(stand: Stand, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\n  k1 \nk2\n")
    fleet = ScriptedFleet()
    stand.climb(fleet, api_key_file=str(keys))
    assert {key for _, key in fleet.asked} == {"Bearer k1"}


def test_a_hash_of_the_file_is_not_shown_to_the_router(stand: Stand, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{'0' * 64}\nk2\n")
    fleet = ScriptedFleet()
    stand.climb(fleet, api_key_file=str(keys))
    assert {key for _, key in fleet.asked} == {"Bearer k2"}

    keys.write_text(f"sha256:{'0' * 64}\n")
    with pytest.raises(CheckError) as caught:
        stand.smoke(ScriptedFleet(), api_key_file=str(keys))
    assert caught.value.message == f"router.api_key_file: {keys} holds hashes only"


def test_a_key_file_that_is_gone_is_told(stand: Stand) -> None:
    with pytest.raises(CheckError) as caught:
        stand.smoke(ScriptedFleet(), api_key_file="/nowhere/keys")
    assert caught.value.message == (
        "router.api_key_file: /nowhere/keys cannot be read: No such file or directory"
    )


def test_a_proof_asks_every_pair_once_and_freezes_nobody(stand: Stand) -> None:
    fleet = ScriptedFleet(prefills=2)
    report = stand.smoke(fleet).prove()
    assert report.proven
    assert [pair for pair, _ in fleet.asked] == ["prefill-0/decode-0", "prefill-1/decode-0"]
    assert not fleet.was_paused


# --- what is broken, one thing at a time -----------------------------------------------------
@pytest.mark.parametrize(
    ("fleet", "broken", "message"),
    [
        (
            lambda: ScriptedFleet(wrong_tokens=True),
            {f"tokens/{kind}" for kind in KINDS},
            "token 0 is ",
        ),
        (
            lambda: ScriptedFleet(pushes=False),
            {"pushed", "bytes"},
            "no KV bytes moved: decode did without prefill",
        ),
        (
            lambda: ScriptedFleet(extra_blocks=1),
            {"bytes"},
            "expected: 5 blocks more; another request ran meanwhile, or the blocks went out twice",
        ),
        (
            lambda: ScriptedFleet(decode_computes=True),
            {"local-compute"},
            "decode computed ",
        ),
        (
            lambda: ScriptedFleet(transfers_fail=True),
            {"failures"},
            "5 failed transfers; the engine's log names them",
        ),
        (
            lambda: ScriptedFleet(counts_nixl=False),
            {"pushed", "bytes", "failures"},
            "no KV bytes moved: decode did without prefill",
        ),
        (
            lambda: ScriptedFleet(answers_without_prefill=True),
            {"control"},
            "the request was answered (200) although prefill was stopped: smoke cannot be "
            "trusted; something else computes prompts",
        ),
        (
            lambda: ScriptedFleet(blames_the_client=True),
            {"control"},
            "answered 400 while prefill was stopped: that blames the client; 503 or 504 is right",
        ),
        (
            lambda: ScriptedFleet(leaks=True),
            {"leak"},
            "1.000% of the KV cache is still held although nothing runs: blocks leaked; restart "
            "this engine, and look for a request that never ended",
        ),
        (
            lambda: ScriptedFleet(stays_down=True),
            {"tokens/recovered"},
            "the router answered 503: no pair is ready",
        ),
        (
            lambda: ScriptedFleet(cuts_streams=True),
            {"tokens/stream", "tokens/concurrent"},
            "the stream ended without [DONE]",
        ),
    ],
    ids=[
        "wrong tokens",
        "nothing pushed",
        "one block too many",
        "decode computes",
        "failed transfers",
        "no NIXL metrics",
        "answers without prefill",
        "blames the client",
        "leak",
        "never recovers",
        "streams cut short",
    ],
)
def test_each_fault_makes_its_own_rungs_red_and_no_others(
    stand: Stand, fleet: Callable[[], ScriptedFleet], broken: set[str], message: str
) -> None:
    report = stand.climb(fleet())
    assert red(report) == broken
    assert message in report.failed[0].message
    assert not report.proven


def test_a_router_that_hangs_without_prefill_is_red(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdeploy.stages.asking.ASK_TIMEOUT_S", 0.6)
    monkeypatch.setattr("kvdeploy.stages.controls.TOLERANCE_S", 0.2)
    report = stand.climb(ScriptedFleet(hangs_without_prefill=True))
    assert red(report) == {"control"}
    assert the(report, "control").message == (
        "no answer within 0.3 s (deadline 0.1 s) while prefill was stopped, after 0.6 s: "
        "clients would hang"
    )
    assert not report.proven


def test_prefill_runs_again_although_the_control_broke_off(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ScriptedFleet()
    smoke = stand.smoke(fleet)
    ask = smoke.asker.ask

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if fleet.paused:
            raise KeyboardInterrupt
        return ask(*args, **kwargs)

    monkeypatch.setattr(smoke.asker, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smoke.climb()
    assert fleet.was_paused
    assert fleet.paused == set()


def test_a_busy_fleet_is_not_measured(stand: Stand) -> None:
    fleet = ScriptedFleet(busy=True)
    with pytest.raises(SmokeError) as caught:
        stand.climb(fleet)
    assert (caught.value.message, caught.value.hint) == (
        "the fleet is serving other requests for over 0 s",
        "Smoke counts bytes: run it when nobody else uses the fleet.",
    )
    assert fleet.asked == []


def test_a_prefill_that_cannot_tokenize_ends_the_climb(stand: Stand) -> None:
    with pytest.raises(FleetError) as caught:
        stand.climb(ScriptedFleet(refuses=True))
    assert (caught.value.message, caught.value.hint) == (
        "prefill-0 does not tokenize: engine is dead",
        "'kvdeploy status' shows how it is.",
    )


def test_a_prefill_that_gives_no_reference_ends_the_climb(stand: Stand) -> None:
    fleet = ScriptedFleet()
    smoke = stand.smoke(fleet)
    question = proof_question(smoke.nonce, words_long=30)
    fleet.refuses = True
    with pytest.raises(SmokeError) as caught:
        smoke.asker.reference(question)
    assert (caught.value.message, caught.value.hint) == (
        "prefill-0 gives no reference: engine is dead",
        "'kvdeploy logs prefill-0' shows why.",
    )


# --- what cannot be shown --------------------------------------------------------------------
def test_equal_tokens_of_dummy_weights_prove_nothing(stand: Stand) -> None:
    report = stand.climb(ScriptedFleet(), load_format="dummy")
    of_tokens = [r for r in report.rungs if r.rung.startswith("tokens/")]
    assert {r.rung for r in of_tokens} == {f"tokens/{kind}" for kind in KINDS}
    assert {r.verdict for r in of_tokens} == {Verdict.NOT_APPLICABLE}
    assert the(report, "tokens/long").message == (
        "dummy weights: every token is as likely as any, so equal ones prove nothing"
    )
    assert report.proven  # bytes moved, as many as computed


def test_a_model_without_a_chat_template_is_not_asked_to_chat(stand: Stand) -> None:
    report = stand.climb(ScriptedFleet(cannot_chat=True))
    chat = the(report, "tokens/chat")
    assert chat.verdict is Verdict.NOT_APPLICABLE
    assert chat.message == "the model cannot be asked this: there is no chat template"
    assert report.proven


def test_a_decode_without_prefix_cache_is_pushed_the_whole_prompt(stand: Stand) -> None:
    report = stand.climb(ScriptedFleet(caches_prefixes=False))
    assert the(report, "bytes", PAIR).verdict is Verdict.PASSED
    assert report.proven


def test_bytes_of_an_uneven_cache_cannot_be_foretold_and_moved_is_still_asked_for(
    stand: Stand,
) -> None:
    config = CONFIG | {"sliding_window": 64}
    report = stand.climb(ScriptedFleet(), config=config)
    assert {s for r, s in rungs(report, Verdict.NOT_APPLICABLE) if r == "bytes"} == {PAIR, "router"}
    assert the(report, "bytes", PAIR).message == (
        "the size cannot be foretold: layers forget what is more than 64 tokens back"
    )
    assert report.proven
    silent = stand.climb(ScriptedFleet(pushes=False), config=config)
    assert red(silent) == {"pushed"}
    assert not silent.proven


def test_a_configuration_that_says_too_little_leaves_the_bytes_open(stand: Stand) -> None:
    report = stand.climb(ScriptedFleet(), config={"dtype": "bfloat16"})
    told = the(report, "bytes", PAIR)
    assert told.verdict is Verdict.NOT_APPLICABLE
    assert told.message == (
        "the size cannot be foretold: config.json has no 'num_hidden_layers', so the size of its "
        "KV cache cannot be computed"
    )
    assert report.proven


def test_a_question_too_long_for_the_model_is_said_and_not_asked(stand: Stand) -> None:
    fleet = ScriptedFleet(max_length=80)
    report = stand.climb(fleet)
    long = the(report, "tokens/long")
    assert long.verdict is Verdict.NOT_APPLICABLE
    needs, _, rest = long.message.partition(" tokens")
    assert needs.startswith("needs ")
    assert int(needs.removeprefix("needs ")) > 4 * fleet.block
    assert rest == ", and model.max_length leaves room for 56"
    assert report.failed == ()
    assert fleet.too_long == 0


def test_what_follows_a_question_that_was_not_asked_is_not_asked_either(stand: Stand) -> None:
    """Decode would not hold the blocks that the sum counts on."""
    first = stand.smoke(ScriptedFleet())
    _, long, prefix, *_ = pair_questions(f"0{first.nonce}", words_long=first._words_long())
    assert len(prefix.text) < len(long.text)
    fleet = ScriptedFleet(max_length=len(long.text) + ANSWERED)
    smoke = stand.smoke(fleet, can_stop=False)
    smoke.nonce = first.nonce
    report = smoke.climb()
    skipped = {r for r, _ in rungs(report, Verdict.NOT_APPLICABLE)}
    assert {"tokens/long", "tokens/prefix"} <= skipped
    assert report.failed == ()
    assert fleet.too_long == 0


@pytest.mark.parametrize("max_length", [64, 100, 200])
def test_the_proof_of_a_short_model_asks_what_fits(stand: Stand, max_length: int) -> None:
    fleet = ScriptedFleet(block=128, max_length=max_length)
    assert stand.smoke(fleet).prove().proven
    assert fleet.too_long == 0


def test_without_processes_the_control_is_not_applicable(stand: Stand) -> None:
    fleet = ScriptedFleet()
    report = stand.climb(fleet, can_stop=False)
    control = the(report, "control")
    assert control.verdict is Verdict.NOT_APPLICABLE
    assert control.message == "this target's prefill cannot be stopped from here"
    assert not fleet.was_paused
    assert "leak" not in {r.rung for r in report.rungs}


# --- the stage of `up` -----------------------------------------------------------------------
def proof(stand: Stand, fleet: ScriptedFleet) -> Mapping[str, Any]:
    stand.start(fleet)
    spec = ClusterSpec.model_validate({"name": "demo", "connector": {"block_size": fleet.block}})
    results: dict[str, Mapping[str, Any]] = {
        "model": model_of().model_dump(),
        "fleet": outputs_of(fleet).model_dump(),
    }
    stage = ProofStage(spec)
    assert stage.inputs(results) == {"fleet": results["fleet"]}
    return stage.apply(results, stand.line)


def test_the_proof_of_a_good_fleet_holds(stand: Stand) -> None:
    result = proof(stand, ScriptedFleet())
    json.dumps(result)
    assert ProofStage(ClusterSpec(name="demo")).holds(result)


def test_a_fleet_that_does_not_push_ends_up_with_every_reason(stand: Stand) -> None:
    with pytest.raises(SmokeError) as caught:
        proof(stand, ScriptedFleet(pushes=False, transfers_fail=True))
    first, *rest = caught.value.message.splitlines()
    assert first == "not proven:"
    assert [line.split(":")[0] for line in rest] == [
        f"pushed {PAIR}",
        f"bytes {PAIR}",
        f"failures {PAIR}",
        f"no KV was seen to move over {PAIR}",
    ]
    assert caught.value.hint == "The fleet still runs: 'kvdeploy logs' shows what engines say."


def test_a_report_without_pairs_proves_nothing() -> None:
    report = SmokeReport(
        cluster="demo", target="local", started_at="", seconds=0, pairs=(), rungs=()
    )
    with pytest.raises(SmokeError, match="not proven"):
        raise_unless_proven(report)
