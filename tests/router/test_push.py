from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.harness import PROMPT, Fleet, run_fleet
from tests.router.scripted import CHUNKS

pytestmark = pytest.mark.loopback
LOST = 'kvdeploy_router_lost_writes_total{decode="decode-0"}'


async def test_both_legs_leave_at_once() -> None:
    async with run_fleet() as fleet:
        fleet.prefill.gate.clear()
        request = asyncio.create_task(fleet.post())

        await fleet.until(lambda: fleet.decode.clients, "decode has its leg")
        assert fleet.prefill.clients
        assert not request.done()
        fleet.prefill.gate.set()
        status, answer, headers = await request

    assert (status, answer["by"]) == (200, "decode-0")
    assert headers["X-Kvdeploy-Pair"] == "prefill-0/decode-0"


async def test_prefill_is_told_nothing_of_decode_and_decode_everything_of_prefill() -> None:
    async with run_fleet() as fleet:
        await fleet.post()
        [prefill], [decode] = fleet.prefill.clients, fleet.decode.clients

    assert prefill.request_id == decode.request_id
    assert decode.params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0-g1",
        "remote_request_id": f"cmpl-{prefill.request_id}-0",
        "remote_host": "127.0.0.1",
        "remote_port": 26601,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_id": decode.request_id,
    }
    assert decode.headers["Accept-Encoding"] == "identity"


async def test_chat_goes_to_chat_on_both_sides() -> None:
    async with run_fleet() as fleet:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        status, _, _ = await fleet.post(chat, path="/v1/chat/completions")
        [prefill], [decode] = fleet.prefill.clients, fleet.decode.clients

    assert status == 200
    assert prefill.path == decode.path == "/v1/chat/completions"
    assert decode.params["remote_request_id"] == f"chatcmpl-{decode.request_id}"


async def test_a_stream_passes_through_as_it_comes() -> None:
    async with run_fleet() as fleet:
        body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        fleet.decode.gate.clear()
        async with fleet.session.post(fleet.url + "/v1/completions", json=body) as answer:
            first = await answer.content.readany()
            fleet.decode.gate.set()
            rest = await answer.content.read()
        sent = fleet.decode.clients[0].body

    assert first == CHUNKS[0]
    assert rest == b"".join(CHUNKS[1:])
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["X-Kvdeploy-Pair"] == "prefill-0/decode-0"
    assert sent["stream_options"] == {"include_usage": True}


async def test_a_repeated_client_id_is_answered_twice_and_unique_to_the_engines() -> None:
    async with run_fleet() as fleet:
        for _ in range(2):
            _, _, headers = await fleet.post(headers={"X-Request-Id": "mine-0badcafe"})
            assert headers["X-Request-Id"] == "mine-0badcafe"
        ids = [leg.request_id for leg in fleet.decode.clients]

    assert len(set(ids)) == 2
    assert all(seen.startswith("mine-0badcafe.") for seen in ids)


async def test_a_request_without_an_id_is_given_the_one_that_engines_see() -> None:
    async with run_fleet() as fleet:
        _, _, headers = await fleet.post()

        assert headers["X-Request-Id"] == fleet.decode.clients[0].request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_lets_the_write_land_before_decode_is_closed(
    *, stream: bool
) -> None:
    """A decode that aborts before it has registered leaves prefill's blocks to their lease."""
    async with run_fleet() as fleet:
        fleet.prefill.gate.clear()
        fleet.decode.gate.clear()
        request = asyncio.create_task(fleet.post(stream=stream))
        await fleet.until(lambda: fleet.fabric.held, "decode holds blocks")

        request.cancel()
        await asyncio.wait({request})
        await asyncio.sleep(0.1)
        assert await fleet.metric("kvdeploy_router_background_legs") == 1
        assert not fleet.prefill.aborted
        assert not fleet.decode.aborted
        assert fleet.fabric.held

        fleet.prefill.gate.set()
        await fleet.until(lambda: not fleet.fabric.held, "the WRITE has freed decode's blocks")
        await fleet.until(lambda: fleet.decode.aborted, "decode's leg is closed")
        assert not fleet.prefill.aborted
        await fleet.until(fleet.is_idle, "loads are back")
        assert await fleet.metric("kvdeploy_router_background_legs") == 0
        assert await fleet.metric(LOST) == 0


async def test_a_client_that_leaves_in_mid_stream_closes_decode() -> None:
    async with run_fleet() as fleet:
        body = {**PROMPT, "stream": True}
        fleet.decode.gate.clear()
        answer = await fleet.session.post(fleet.url + "/v1/completions", json=body)
        await answer.content.readany()
        answer.close()

        await fleet.until(lambda: fleet.decode.aborted, "decode's leg is closed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_fails_ends_the_request_and_closes_decode(*, stream: bool) -> None:
    async with run_fleet() as fleet:
        fleet.prefill.fail = 500
        status, answer, headers = await fleet.post(stream=stream)
        await fleet.until(lambda: fleet.decode.aborted, "decode's leg is closed")
        lost = await fleet.metric(LOST)

    assert (status, lost) == (502, 1)
    assert answer == {
        "error": {
            "message": "prefill-0 answered 500: scripted 500",
            "type": "upstream_error",
            "param": None,
            "code": "prefill_failed",
        }
    }
    assert headers["X-Kvdeploy-Pair"] == "prefill-0/decode-0"


async def test_a_prefill_that_has_no_kv_to_send_ends_the_request() -> None:
    async with run_fleet() as fleet:
        fleet.prefill.silent = True
        status, answer, _ = await fleet.post()
        await fleet.until(lambda: fleet.decode.aborted, "decode's leg is closed")

    assert status == 502
    assert answer["error"]["message"] == (
        "prefill-0 answered without transfer parameters: it has no KV to send"
    )


async def test_a_prefill_that_ended_otherwise_than_with_its_token_has_nothing_to_push() -> None:
    async with run_fleet() as fleet:
        fleet.prefill.finish = "abort"
        status, answer, _ = await fleet.post()
        lost = await fleet.metric(LOST)

    assert (status, answer["error"]["code"], lost) == (502, "prefill_failed", 1)
    assert answer["error"]["message"] == "prefill-0 ended the prompt with finish_reason 'abort'"


@pytest.mark.parametrize(("switch", "value", "message"), [
    ("finish", "error", "decode-0 ended the answer with finish_reason 'error'"),
    ("choices", 0, "decode-0 answered without a choice"),
])  # fmt: skip
async def test_a_decode_that_answers_200_with_nothing_is_a_failure(
    switch: str, value: object, message: str
) -> None:
    async with run_fleet() as fleet:
        setattr(fleet.decode, switch, value)
        status, answer, _ = await fleet.post()

    assert (status, answer["error"]["code"]) == (502, "decode_failed")
    assert answer["error"]["message"] == message


async def test_a_stream_whose_first_event_is_an_error_is_an_http_error() -> None:
    async with run_fleet() as fleet:
        fleet.decode.chunks = (b'data: {"error":{"message":"no KV"}}\n\n', CHUNKS[-1])
        status, answer, _ = await fleet.post(stream=True)

    assert status == 502
    assert answer["error"]["message"] == "decode-0 answered 200 with an error: no KV"


async def test_a_decode_that_fails_ends_the_request_and_loses_no_write() -> None:
    async with run_fleet() as fleet:
        fleet.decode.fail = 500
        status, answer, _ = await fleet.post()
        await fleet.until(lambda: fleet.prefill.done[1:], "prefill has finished all the same")
        lost = await fleet.metric(LOST)

    assert (status, lost) == (502, 0)
    assert answer["error"]["code"] == "decode_failed"
    assert answer["error"]["message"] == "decode-0 answered 500: scripted 500"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engines_own_refusal_reaches_the_client_as_it_is(role: str) -> None:
    async with run_fleet() as fleet:
        fleet.engines[f"{role}-0"].fail = 422
        if role == "decode":
            fleet.prefill.gate.clear()
        status, answer, _ = await fleet.post()
        fleet.prefill.gate.set()

    assert status == 422
    assert answer["error"] == {
        "message": "scripted 422",
        "type": "Scripted",
        "param": None,
        "code": 422,
    }


async def test_a_decode_that_refuses_frees_prefill_at_once() -> None:
    """Nothing was registered: prefill's blocks would only wait for their lease to end."""
    async with run_fleet() as fleet:
        fleet.prefill.gate.clear()
        fleet.decode.fail = 400
        status, _, _ = await fleet.post()
        await fleet.until(lambda: fleet.prefill.aborted, "prefill's leg is closed")
        await fleet.until(fleet.is_idle, "all legs ended")
        assert (status, await fleet.metric(LOST)) == (400, 0)


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 0}]
)
async def test_what_needs_the_prompts_own_odds_goes_to_decode_alone(asked: dict[str, Any]) -> None:
    async with run_fleet() as fleet:
        prefill_legs, decode_legs = len(fleet.prefill.seen), len(fleet.decode.seen)
        status, answer, _ = await fleet.post(**asked)
        assert (status, answer["choices"][0]["text"]) == (200, " alone")
        assert len(fleet.prefill.seen) == prefill_legs
        (leg,) = fleet.decode.seen[decode_legs:]
        assert leg.body == {**PROMPT, **asked}


async def test_an_echo_without_odds_is_pushed_as_everything_else() -> None:
    async with run_fleet() as fleet:
        prefill_legs = len(fleet.prefill.seen)
        assert (await fleet.post(echo=True))[0] == 200
        assert len(fleet.prefill.seen) == prefill_legs + 1


async def test_a_refusal_that_decode_repeats_a_little_later_loses_no_write() -> None:
    async with run_fleet() as fleet:
        fleet.prefill.fail = fleet.decode.fail = 400
        fleet.decode.gate.clear()
        status, _, _ = await fleet.post()
        assert (status, fleet.decode.aborted) == (400, [])
        fleet.decode.gate.set()
        await fleet.until(fleet.is_idle, "all legs ended")

        assert await fleet.metric(LOST) == 0


async def test_a_prefill_that_fails_after_decode_has_answered_loses_no_write() -> None:
    async with run_fleet() as fleet:
        fleet.prefill.gate.clear()
        fleet.prefill.silent = True
        fleet.decode.fail = 500
        assert (await fleet.post())[0] == 502
        fleet.prefill.gate.set()
        await fleet.until(fleet.is_idle, "all legs ended")

        assert await fleet.metric(LOST) == 0


async def test_prefills_deadline_answers_the_client_and_the_leg_goes_on() -> None:
    async with run_fleet(deadlines={"prefill_s": 0.1}) as fleet:
        fleet.prefill.gate.clear()
        status, answer, _ = await fleet.post()
        assert (status, answer["error"]) == (
            504,
            {
                "message": "prefill-0 did not finish the prompt within 0.1 s",
                "type": "upstream_timeout",
                "param": None,
                "code": "prefill_deadline",
            },
        )
        assert fleet.fabric.held
        assert not fleet.decode.aborted

        fleet.prefill.gate.set()
        await fleet.until(lambda: not fleet.fabric.held, "the WRITE has freed decode's blocks")
        await fleet.until(fleet.is_idle, "all legs ended")
        assert not fleet.prefill.aborted
        assert await fleet.metric(LOST) == 0


async def test_a_late_prefill_that_fails_after_its_deadline_is_counted_as_lost() -> None:
    async with run_fleet(deadlines={"prefill_s": 0.1}) as fleet:
        fleet.prefill.gate.clear()
        await fleet.post()
        fleet.prefill.silent = True
        fleet.prefill.gate.set()
        await fleet.until(lambda: fleet.prefill.done[1:], "prefill has answered")
        await asyncio.sleep(0.02)

        assert await fleet.metric(LOST) == 1


async def test_a_decode_without_a_first_token_breaks_its_own_deadline() -> None:
    async with run_fleet(deadlines={"first_token_s": 0.1}) as fleet:
        fleet.prefill.fabric.write = lambda request_id: None  # type: ignore[method-assign]
        status, answer, _ = await fleet.post(stream=True)
        lost = await fleet.metric(LOST)

    assert (status, lost) == (504, 1)
    assert answer["error"]["code"] == "first_token_deadline"
    assert answer["error"]["message"] == ("decode-0 sent no token within 0.1 s of the prompt's end")


@pytest.mark.parametrize(("slow", "doing"), [
    ("prefill-0", "prefill-0 was still working on the prompt"),
    ("decode-0", "decode-0 had not answered"),
])  # fmt: skip
async def test_a_client_may_shorten_the_total_and_is_told_who_was_slow(
    slow: str, doing: str
) -> None:
    async with run_fleet() as fleet:
        fleet.engines[slow].gate.clear()
        status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Timeout-S": "0.1"})
        fleet.engines[slow].gate.set()

    assert (status, answer["error"]["code"]) == (504, "total_deadline")
    assert answer["error"]["message"] == f"the request did not finish within 0.1 s: {doing}"


async def test_a_client_cannot_lengthen_the_total() -> None:
    async with run_fleet(deadlines={"total_s": 0.1}) as fleet:
        fleet.decode.gate.clear()
        _, answer, _ = await fleet.post(headers={"X-Kvdeploy-Timeout-S": "30"})
        fleet.decode.gate.set()

    assert answer["error"]["message"] == (
        "the request did not finish within 0.1 s: decode-0 had not answered"
    )


async def read_stream(fleet: Fleet, headers: dict[str, str] | None = None) -> bytes:
    body: dict[str, Any] = {**PROMPT, "stream": True}
    url = fleet.url + "/v1/completions"
    async with fleet.session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200
        return await answer.read()


def last_words(body: bytes) -> dict[str, Any]:
    _, event, done, end = body.rsplit(b"\n\n", 3)
    assert (done, end) == (b"data: [DONE]", b"")
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


@pytest.mark.parametrize("first", [CHUNKS[0], b'data: {"cut'])
async def test_a_decode_that_dies_in_mid_stream_ends_it_with_an_error_event(first: bytes) -> None:
    async with run_fleet() as fleet:
        fleet.decode.chunks = (first, *CHUNKS[1:])
        fleet.decode.die_after = 1
        body = await read_stream(fleet)

    assert body.startswith(first)
    assert last_words(body)["code"] == "decode_broke_off"
    assert last_words(body)["message"].startswith("decode-0 broke the connection off: ")


async def test_a_decode_that_falls_silent_ends_the_stream_with_an_error_event() -> None:
    async with run_fleet(deadlines={"inter_token_s": 0.1}) as fleet:
        fleet.decode.gate.clear()
        body = await read_stream(fleet)
        await fleet.until(lambda: fleet.decode.aborted, "decode's leg is closed")

    assert body.startswith(CHUNKS[0])
    assert last_words(body)["message"] == "decode-0 sent nothing more for 0.1 s"
    assert last_words(body)["type"] == "upstream_timeout"


async def test_the_total_deadline_ends_a_stream_as_well() -> None:
    async with run_fleet() as fleet:
        fleet.decode.gate.clear()
        body = await read_stream(fleet, {"X-Kvdeploy-Timeout-S": "0.1"})

    assert last_words(body)["message"] == (
        "the request did not finish within 0.1 s: decode-0 was still generating"
    )


async def test_a_stream_that_dies_before_its_first_token_is_an_http_error() -> None:
    async with run_fleet() as fleet:
        fleet.decode.die_after = 0
        status, answer, _ = await fleet.post(stream=True)

    assert (status, answer["error"]["code"]) == (502, "decode_broke_off")
