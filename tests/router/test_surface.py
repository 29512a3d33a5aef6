from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from kvdeploy.errors import SpecError
from kvdeploy.router.auth import read_keys
from tests.router.harness import PROMPT, run_fleet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.loopback


async def test_a_model_that_is_not_served_is_named_with_the_one_that_is() -> None:
    async with run_fleet() as fleet:
        status, answer, _ = await fleet.post(model="large")

    assert status == 404
    assert answer["error"] == {
        "message": "The model `large` does not exist. This service has `tiny`.",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(("path", "body", "message"), [
    ("completions", b"{", "The body is not JSON in UTF-8: "),
    ("completions", b"\xff\xfe{}", "The body is not JSON in UTF-8: "),
    ("completions", b"[1]", "The body must be a JSON object."),
    ("completions", b'{"prompt":"x"}', "`model` must be given, as a string."),
    ("completions", b'{"model":7,"prompt":"x"}', "`model` must be given, as a string."),
    ("completions", b'{"model":"tiny"}', "`prompt` must be given, as a string, a list of strings"),
    ("completions", b'{"model":"tiny","prompt":{}}', "`prompt` must be given, as a string, a list"),
    ("completions", b'{"model":"tiny","prompt":"x","stream":"yes"}', "`stream` must be true or"),
    ("completions", b'{"model":"tiny","prompt":"x","use_beam_search":true}', "`use_beam_search` "),
    ("chat/completions", b'{"model":"tiny"}', "`messages` must be given, as a list."),
    ("chat/completions", b'{"model":"tiny","messages":"x"}', "`messages` must be given, as a list"),
])  # fmt: skip
async def test_a_malformed_request_is_refused_before_any_engine_sees_it(
    path: str, body: bytes, message: str
) -> None:
    async with run_fleet() as fleet:
        url = f"{fleet.url}/v1/{path}"
        async with fleet.session.post(url, data=body) as response:
            answer = await response.json()
        assert fleet.prefill.clients == fleet.decode.clients == []

    assert response.status == 400
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", [None, {}, {"do_remote_prefill": True}])
async def test_a_client_cannot_give_transfer_parameters(value: Any) -> None:
    async with run_fleet() as fleet:
        status, answer, _ = await fleet.post(kv_transfer_params=value)
        assert fleet.decode.clients == []

    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
async def test_a_shorter_total_must_be_a_positive_number(value: str) -> None:
    async with run_fleet() as fleet:
        status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Timeout-S": value})

    assert status == 400
    assert answer["error"]["message"] == (
        "`X-Kvdeploy-Timeout-S` must be a number of seconds above 0."
    )


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(*, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(3):
            yield b"x" * 500

    async with run_fleet(max_body_bytes=1000) as fleet:
        data = pieces() if chunked else b"x" * 1001
        async with fleet.session.post(f"{fleet.url}/v1/completions", data=data) as response:
            answer = await response.json()

    assert response.status == 413
    assert answer["error"]["message"] == "The request body is larger than the limit of 1000 bytes."


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def pieces() -> Any:
        yield b'{"model":'
        await asyncio.sleep(1)

    async with run_fleet(deadlines={"body_s": 0.1}) as fleet:
        async with fleet.session.post(f"{fleet.url}/v1/completions", data=pieces()) as response:
            answer = await response.json()
        assert fleet.prefill.clients == []

    assert (response.status, answer["error"]["code"]) == (408, "body_deadline")
    assert response.headers["Connection"] == "close"
    assert answer["error"]["message"] == "The request body did not come within 0.1 s."


async def test_a_body_whose_framing_breaks_in_the_middle_is_a_clients_mistake() -> None:
    async with run_fleet(deadlines={"body_s": 0.2}) as fleet:
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"1\r\n{\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"zz\r\n")
        async with asyncio.timeout(5):
            answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert fleet.prefill.clients == []
        assert await fleet.metric('kvdeploy_router_errors_total{code="router_bug"}') == 0

    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("Identity", 200)])
async def test_a_body_comes_as_it_is(encoding: str, status: int) -> None:
    async with run_fleet() as fleet:
        url, headers = f"{fleet.url}/v1/completions", {"Content-Encoding": encoding}
        body = json.dumps(PROMPT).encode()
        if encoding == "gzip":
            body = gzip.compress(body)
        async with fleet.session.post(url, data=body, headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize(("sent", "why"), [
    (b"hello\r\n\r\n", "Invalid method encountered"),
    (b"GET /v1/models HTTP/1.1\r\nbad header\r\n\r\n", "Invalid header token"),
    (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", "Invalid character"),
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", "Got more than 8190 bytes"),
])  # fmt: skip
async def test_what_is_not_http_is_refused_in_the_same_shape(sent: bytes, why: str) -> None:
    async with run_fleet() as fleet:
        host, _, port = fleet.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        counted = await fleet.metric('kvdeploy_router_errors_total{code="malformed"}')

    assert head.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert b"Content-Type: application/json" in head
    assert b"X-Request-Id" in head
    error = json.loads(body)["error"]
    assert error == {
        "message": error["message"],
        "type": "invalid_request_error",
        "param": None,
        "code": "malformed",
    }
    assert error["message"].startswith(f"This is not HTTP: {why}")
    assert counted == 1


async def test_an_unknown_route_is_refused_in_the_same_shape() -> None:
    async with run_fleet() as fleet:
        status, answer = await fleet.get("/v1/embeddings")
        wrong, _ = await fleet.get("/v1/completions")

    assert (status, wrong) == (404, 405)
    assert answer["error"]["message"] == "GET /v1/embeddings: Not Found"


async def test_the_served_model_is_listed() -> None:
    async with run_fleet() as fleet:
        _, answer = await fleet.get("/v1/models")

    assert [model["id"] for model in answer["data"]] == ["tiny"]


@pytest.mark.parametrize(("authorization", "status"), [
    (None, 401),
    ("Bearer wrong", 401),
    ("Basic right", 401),
    ("Bearer # a comment", 401),
    ("Bearer right", 200),
    ("bearer second", 200),
])  # fmt: skip
async def test_a_key_of_the_file_is_needed_where_one_is_configured(
    tmp_path: Path, authorization: str | None, status: int
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# a comment\n\nright\n second \n")
    headers = {"Authorization": authorization} if authorization else {}
    async with run_fleet(api_key_file=str(keys)) as fleet:
        answered, answer, _ = await fleet.post(headers=headers)
        open_paths = [(await fleet.get(path))[0] for path in ("/health", "/ready")]
        assert await fleet.metric(
            'kvdeploy_router_pair_ready{decode="decode-0",prefill="prefill-0"}'
        )

    assert answered == status
    assert open_paths == [200, 200]
    if status == 401:
        assert answer["error"]["code"] == "invalid_api_key"


def test_a_key_may_be_given_as_its_hash_which_is_no_key_itself(tmp_path: Path) -> None:
    entry = "sha256:" + hashlib.sha256(b"secret").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"plain\n{entry}\n")
    keys = read_keys(str(file))

    assert [keys.accepts(f"Bearer {key}") for key in ("plain", "secret", entry)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("digits", ["", "abc", "g" * 64, "a" * 65])
def test_a_hash_that_is_none_is_told_before_anything_is_served(tmp_path: Path, digits: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"plain\nsha256:{digits}\n")
    with pytest.raises(SpecError) as caught:
        read_keys(str(file))

    assert caught.value.message == (
        f"the API key file {file}: key 2 begins with sha256: and is no hash"
    )


async def test_keys_never_reach_an_engine() -> None:
    async with run_fleet() as fleet:
        await fleet.post(headers={"Authorization": "Bearer secret"})

        assert "Authorization" not in fleet.decode.clients[0].headers


async def test_every_request_leaves_one_access_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with run_fleet() as fleet:
        await fleet.post(headers={"X-Request-Id": "mine"})
        await fleet.get("/health")

    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("access ")]
    assert line.startswith(
        "access method=POST path=/v1/completions status=200 mode=push "
        "pair=prefill-0/decode-0 tries=1 seconds=0."
    )
    assert line.endswith(" request_id=mine")


async def test_requests_and_errors_are_counted_by_route_and_code() -> None:
    async with run_fleet() as fleet:
        await fleet.post()
        await fleet.post(model="large")
        await fleet.get("/some/path/of/the/clients/choice")
        count = 'kvdeploy_router_requests_total{endpoint="%s",status="%s"}'

        assert await fleet.metric(count % ("/v1/completions", 200)) == 1
        assert await fleet.metric(count % ("/v1/completions", 404)) == 1
        assert await fleet.metric(count % ("other", 404)) == 1
        assert await fleet.metric('kvdeploy_router_errors_total{code="model_not_found"}') == 1


async def test_an_answers_body_is_the_engines_own_bytes() -> None:
    async with (
        run_fleet() as fleet,
        fleet.session.post(f"{fleet.url}/v1/completions", json=PROMPT) as through,
    ):
        body = await through.read()

    assert body == (
        b'{"choices": [{"text": " one two", "finish_reason": "length"}], "by": "decode-0"}'
    )


async def test_a_client_that_goes_after_the_last_word_was_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_eof = web.StreamResponse.write_eof

    async def gone(response: web.StreamResponse, data: bytes = b"") -> None:
        if "X-Request-Id" in response.headers:  # the router's, not the engine's
            message = "Cannot write to closing transport"
            raise aiohttp.ClientConnectionResetError(message)
        await write_eof(response, data)

    async with run_fleet() as fleet:
        monkeypatch.setattr(web.StreamResponse, "write_eof", gone)
        with contextlib.suppress(aiohttp.ClientError):
            async with fleet.session.post(
                f"{fleet.url}/v1/completions", json={**PROMPT, "stream": True}
            ) as answer:
                await answer.read()
        monkeypatch.undo()
        served = 'kvdeploy_router_requests_total{endpoint="/v1/completions",status="200"}'
        assert await fleet.metric(served) == 1
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
