"""Before the first token a request moves to another pair; after it, it never does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.router import lives
from kvdeploy.router.standing import Standing
from tests.router.harness import PROMPT, run_fleet
from tests.router.scripted import CHUNKS, ScriptedEngine
from tests.router.test_push import last_words, read_stream

if TYPE_CHECKING:
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback
RETRIES = 'kvdeploy_router_retries_total{reason="%s"}'
RETRIED = 'kvdeploy_router_retried_requests_total{outcome="%s"}'
NO_LOOKS: dict[str, Any] = {"health_interval_s": 30.0}
"""So that only requests can find a fault."""


def client_legs(fleet: Fleet, role: str) -> list[Any]:
    return [leg for e in fleet.engines.values() if e.role == role for leg in e.clients]


@pytest.mark.parametrize(("role", "switch", "value", "reason"), [
    ("prefill", "gone", None, "prefill_unreachable"),
    ("prefill", "fail", 500, "prefill_failed"),
    ("prefill", "silent", True, "prefill_failed"),
    ("prefill", "finish", "abort", "prefill_failed"),
    ("prefill", "fail", 429, "prefill_busy"),
    ("decode", "fail", 429, "decode_busy"),
    ("decode", "gone", None, "decode_unreachable"),
    ("decode", "fail", 503, "decode_failed"),
    ("decode", "choices", 0, "decode_failed"),
    ("decode", "finish", "error", "decode_failed"),
])  # fmt: skip
@pytest.mark.parametrize("sick", [0, 1])
async def test_whatever_fails_before_the_first_token_is_served_by_another_pair(
    role: str, switch: str, value: object, reason: str, sick: int
) -> None:
    async with run_fleet(2, 2, **NO_LOOKS) as fleet:
        engine = fleet.engines[f"{role}-{sick}"]
        if switch == "gone":
            await engine.stop()
        else:
            setattr(engine, switch, value)
        answers = [await fleet.post() for _ in range(2)]

        assert [status for status, _, _ in answers] == [200, 200]
        assert not any(engine.name in headers["X-Kvdeploy-Pair"] for _, _, headers in answers)
        tried = await fleet.metric(RETRIES % reason)
        assert tried == (1 if switch == "gone" else len(engine.clients))
        assert tried == await fleet.metric(RETRIED % "served") > 0
        assert await fleet.metric(RETRIED % "failed") == 0
        ids = [leg.request_id for leg in client_legs(fleet, role)]
        assert len(set(ids)) == len(ids)


async def test_a_stream_that_dies_before_its_first_token_is_served_by_another_decode() -> None:
    async with run_fleet(1, 2, **NO_LOOKS) as fleet:
        fleet.decode.die_after = 0
        bodies = [await read_stream(fleet) for _ in range(2)]
        assert await fleet.metric(RETRIES % "decode_broke_off") == 1

    assert bodies == [b"".join(CHUNKS)] * 2


async def test_a_prefill_that_is_too_slow_is_left_and_its_leg_goes_on() -> None:
    async with run_fleet(2, 1, deadlines={"prefill_s": 0.7}) as fleet:
        fleet.prefill.gate.clear()
        assert [(await fleet.post())[0] for _ in range(2)] == [200, 200]
        assert await fleet.metric(RETRIES % "prefill_deadline") == 1
        assert fleet.fabric.held
        fleet.prefill.gate.set()
        await fleet.until(lambda: not fleet.fabric.held, "the WRITE has freed decode's blocks")
        assert not fleet.prefill.aborted


async def test_a_write_that_never_lands_moves_the_request_and_cools_the_pair() -> None:
    async with run_fleet(2, 1, deadlines={"first_token_s": 0.7}) as fleet:
        fleet.prefill.writes = False
        bodies = [await read_stream(fleet) for _ in range(2)]
        assert await fleet.metric(RETRIES % "first_token_deadline") == 1
        states = fleet.service.table.states()
        engines = fleet.service.table.engines.values()

    assert bodies == [b"".join(CHUNKS)] * 2
    assert states["prefill-0/decode-0"] != "ready"
    assert states["prefill-1/decode-0"] == "ready"
    assert all(engine.up for engine in engines), "nobody can tell whose fault it was"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_waits_for_an_engine_that_is_found_frozen_moves_at_once(
    role: str, *, stream: bool
) -> None:
    """Its deadline may be minutes away."""
    async with run_fleet(2, 2) as fleet:
        pair = fleet.service.table.pairs["prefill-0/decode-0"]
        frozen = fleet.engines[f"{role}-0"]
        frozen.gate.clear()
        if role == "decode":
            frozen.mute = True
        for name in ("prefill-1", "decode-1"):
            fleet.service.table.hold(fleet.service.table.engines[name], held=True)
        request = asyncio.create_task(read_stream(fleet) if stream else fleet.post())
        await fleet.until(lambda: frozen.clients, "the request waits for it")
        for name in ("prefill-1", "decode-1"):
            fleet.service.table.hold(fleet.service.table.engines[name], held=False)
        frozen.health = 503
        done = await request
        assert await fleet.metric(RETRIES % f"{role}_ejected") == 1
        assert pair.state == "down"
        frozen.gate.set()

    assert done == b"".join(CHUNKS) if stream else done[0] == 200


async def test_a_prefill_that_dies_between_its_answer_and_its_write_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lives, "SETTLE_S", 0.05)
    async with run_fleet(2, 1) as fleet:
        fleet.prefill.writes = False
        fleet.service.table.hold(fleet.service.table.engines["prefill-1"], held=True)
        request = asyncio.create_task(read_stream(fleet))
        await fleet.until(lambda: len(fleet.prefill.done) > 1, "prefill has answered")
        fleet.service.table.hold(fleet.service.table.engines["prefill-1"], held=False)
        await fleet.prefill.stop()
        assert await request == b"".join(CHUNKS)
        assert await fleet.metric(RETRIES % "prefill_ejected") == 1
        assert await fleet.metric('kvdeploy_router_lost_writes_total{decode="decode-0"}') == 1


@pytest.mark.parametrize(("stream", "settle_s", "late_s"), [(True, 2.0, 0.0), (False, 0.02, 0.1)])
async def test_a_prefill_that_dies_after_its_write_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool, settle_s: float, late_s: float
) -> None:
    """A stream's first token may still be under way, a whole answer may take its time."""
    monkeypatch.setattr(lives, "SETTLE_S", settle_s)
    async with run_fleet() as fleet:
        fleet.decode.mute = True
        fleet.decode.gate.clear()
        request = asyncio.create_task(read_stream(fleet) if stream else fleet.post())
        await fleet.until(lambda: len(fleet.prefill.done) > 1, "prefill has answered")
        await fleet.prefill.stop()
        state = fleet.service.table.engines["prefill-0"]
        await fleet.until(lambda: not state.up, "prefill is ejected")
        await asyncio.sleep(late_s)
        fleet.decode.gate.set()
        done = await request

    assert done == b"".join(CHUNKS) if stream else done[0] == 200


def waiting(deferred: int) -> str:
    kind = 'engine="0",model_name="tiny",reason'
    return (
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:num_requests_waiting{engine="0"} 3.0\n'
        f'vllm:num_requests_waiting_by_reason{{{kind}="capacity"}} 3.0\n'
        f'vllm:num_requests_waiting_by_reason{{{kind}="deferred"}} {deferred}.0\n'
    )


@pytest.mark.parametrize(("deferred", "moved"), [(2, 1), (0, 0)])
async def test_a_whole_answer_without_its_prefill_is_given_up_only_while_decode_waits_for_kv(
    monkeypatch: pytest.MonkeyPatch, *, deferred: int, moved: int
) -> None:
    monkeypatch.setattr(lives, "SETTLE_S", 0.02)
    monkeypatch.setattr(lives, "KV_S", 0.1)
    async with run_fleet(2, 1) as fleet:
        fleet.decode.metrics = waiting(deferred)
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: state.kv, "decode's metrics are read")
        fleet.prefill.writes = False
        fleet.service.table.hold(fleet.service.table.engines["prefill-1"], held=True)
        request = asyncio.create_task(fleet.post())
        await fleet.until(lambda: len(fleet.prefill.done) > 1, "prefill has answered")
        fleet.service.table.hold(fleet.service.table.engines["prefill-1"], held=False)
        await fleet.prefill.stop()
        if not moved:
            await asyncio.sleep(0.4)
            fleet.fabric.write(fleet.decode.clients[-1].request_id)
        assert (await request)[0] == 200
        assert await fleet.metric(RETRIES % "prefill_ejected") == moved
        lost = 'kvdeploy_router_lost_writes_total{decode="decode-0"}'
        assert await fleet.metric(lost) == moved


async def test_an_engine_that_only_fails_again_and_again_may_yet_answer_the_others() -> None:
    async with run_fleet(1, 1, eject_after=1, **NO_LOOKS) as fleet:
        fleet.prefill.gate.clear()
        waiting = asyncio.create_task(fleet.post())
        await fleet.until(lambda: fleet.prefill.clients, "prefill has its leg")
        fleet.decode.fail = 500
        assert (await fleet.post())[0] == 502
        assert not fleet.service.table.engines["decode-0"].up
        fleet.prefill.gate.set()
        assert (await waiting)[0] == 200


async def test_a_request_is_tried_so_often_and_no_more() -> None:
    async with run_fleet(4, 1, tries=2, **NO_LOOKS) as fleet:
        for engine in fleet.engines.values():
            engine.fail = 500 if engine.role == "prefill" else 0
        status, answer, _ = await fleet.post()
        assert len(client_legs(fleet, "prefill")) == 2
        assert await fleet.metric(RETRIED % "failed") == 1

    assert (status, answer["error"]["code"]) == (502, "prefill_failed")


async def test_without_another_pair_the_first_failure_is_told() -> None:
    async with run_fleet(2, 1, **NO_LOOKS) as fleet:
        fleet.decode.fail = 500
        status, answer, headers = await fleet.post()
        assert len(fleet.decode.clients) == 1

    assert (status, answer["error"]["code"]) == (502, "decode_failed")
    assert headers["X-Kvdeploy-Pair"].endswith("/decode-0")


async def test_all_tries_together_have_one_total() -> None:
    async with run_fleet(4, 1, deadlines={"prefill_s": 0.6, "total_s": 1.0}) as fleet:
        for engine in fleet.engines.values():
            engine.gate.clear()
        begun = asyncio.get_running_loop().time()
        status, answer, _ = await fleet.post()
        seconds = asyncio.get_running_loop().time() - begun
        assert len(client_legs(fleet, "prefill")) == 2
        assert await fleet.metric(RETRIES % "prefill_deadline") == 1
        assert await fleet.metric(RETRIES % "total_deadline") == 0

    assert (status, answer["error"]["code"]) == (504, "total_deadline")
    assert answer["error"]["message"].startswith("the request did not finish within 1.0 s: ")
    assert 0.9 < seconds < 3


async def test_what_a_client_has_done_wrong_is_not_tried_again() -> None:
    async with run_fleet(2, 2, **NO_LOOKS) as fleet:
        for engine in fleet.engines.values():
            engine.fail = 400
        status, _, _ = await fleet.post()
        assert len(client_legs(fleet, "prefill")) == 1

    assert status == 400


async def test_a_pair_that_a_header_chose_is_the_only_one_tried() -> None:
    async with run_fleet(2, 1, **NO_LOOKS) as fleet:
        fleet.prefill.fail = 500
        status, _, _ = await fleet.post(headers={"X-Kvdeploy-Pair": "prefill-0/decode-0"})
        assert len(client_legs(fleet, "prefill")) == 1

    assert status == 502


@pytest.mark.parametrize("joined", [False, True])
async def test_a_stream_that_its_engine_gives_up_is_not_passed_on_as_whole(*, joined: bool) -> None:
    """As vLLM ends its streams when it is told to stop."""
    given_up = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
    quoted = (
        b'data: {"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":null}]}\n\n'
    )
    begun = (CHUNKS[0], quoted)
    async with run_fleet() as fleet:
        ends = (begun[-1] + given_up,) if joined else (begun[-1], given_up)
        fleet.decode.chunks = (begun[0], *ends, b"data: [DONE]\n\n")
        body = await read_stream(fleet)
        broken = await fleet.metric('kvdeploy_router_errors_total{code="decode_broke_off"}')

    assert body.startswith(b"".join(begun) + b'data: {"error":')
    assert b"decode-0 gave the request up before its end" in body
    assert given_up not in body
    assert broken == 1


async def test_a_stream_that_breaks_after_its_first_token_is_never_begun_again() -> None:
    async with run_fleet(2, 2, **NO_LOOKS) as fleet:
        for engine in fleet.engines.values():
            engine.die_after = 1
        body = await read_stream(fleet)
        assert len(client_legs(fleet, "decode")) == 1

    assert body.startswith(CHUNKS[0])
    assert last_words(body)["code"] == "decode_broke_off"


async def fail_twice(fleet: Fleet, engine: ScriptedEngine) -> None:
    """Two requests that meet the sick engine, which answers them with 500."""
    pair = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
    engine.fail = 500
    for _ in range(2):
        assert (await fleet.post(headers=pair))[0] == 502


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_fails_again_and_again_is_ejected_and_back_after_a_real_push(role: str) -> None:
    async with run_fleet(1, 1, eject_after=2, health_interval_s=0.05) as fleet:
        engine = fleet.engines[f"{role}-0"]
        state = fleet.service.table.engines[engine.name]
        await fail_twice(fleet, engine)
        assert not state.up
        assert state.reason == (
            f"2 failures within 30.0 s, the last: {engine.name} answered 500: scripted 500"
        )
        ejections = f'kvdeploy_router_ejections_total{{engine="{engine.name}"}}'
        assert await fleet.metric(ejections) == 1

        pair = fleet.service.table.pairs["prefill-0/decode-0"]
        await fleet.until(lambda: state.up and pair.failures, "healthy, and its push has failed")
        assert (await fleet.post())[0] == 503
        engine.fail = 0
        await fleet.until_ready()
        assert (await fleet.post())[0] == 200


async def test_an_engine_without_room_is_not_sick_and_the_client_may_come_back() -> None:
    async with run_fleet(eject_after=1, **NO_LOOKS) as fleet:
        fleet.prefill.gate.clear()
        fleet.decode.fail = 429
        status, answer, headers = await fleet.post()
        assert (status, answer["error"]["code"]) == (503, "decode_busy")
        assert headers["Retry-After"] == "1"
        assert fleet.service.table.engines["decode-0"].up
        await fleet.until(lambda: fleet.prefill.aborted, "prefill's leg, which has no taker")
        await fleet.until(fleet.is_idle, "all legs ended")
        assert await fleet.metric('kvdeploy_router_lost_writes_total{decode="decode-0"}') == 0


async def test_failures_that_are_too_few_leave_an_engine_in_use() -> None:
    async with run_fleet(eject_after=3, **NO_LOOKS) as fleet:
        await fail_twice(fleet, fleet.decode)
        fleet.decode.fail = 0
        assert (await fleet.post(PROMPT))[0] == 200
        await fail_twice(fleet, fleet.decode)

        assert fleet.service.table.engines["decode-0"].up


def test_failures_count_only_in_a_row_and_within_their_time() -> None:
    standing = Standing()

    def fail(now: float) -> bool:
        return standing.fail(now, limit=3, window_s=10)

    assert [fail(0), fail(1), fail(12), fail(13)] == [False, False, False, False]
    assert fail(14)
    assert [fail(15), fail(16)] == [False, False], "counted anew"
    standing.succeed()
    assert [fail(17), fail(18), fail(19)] == [False, False, True]
