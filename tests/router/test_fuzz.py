"""Whatever clients send, the router answers in OpenAI's shape, never with 500, and lives on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.harness import Fleet, run_fleet

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

pytestmark = pytest.mark.loopback
MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
ENDPOINTS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


class Stand:
    """A fleet in a thread of its own, so that one serves all examples."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.fleet: Fleet = self.run(self._stack.enter_async_context(run_fleet(1, 2)))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(asyncio.sleep(0.1))  # what was closed, is
            self._loop.close()

    def send(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """The status, of an answer that is in order."""
        return int(self.run(self._send(path, body, headers or {})))

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        async with self.fleet.session.post(
            self.fleet.url + path, data=body, headers=headers
        ) as answer:
            text = await answer.read()
        # A deadline that a client has set itself is the one failure that is nobody's fault.
        assert answer.status < 500 or answer.status == 504, text
        if answer.status >= 400:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert answer.headers["X-Request-Id"]
        return answer.status


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    stand = Stand()
    yield stand
    try:
        status, _, _ = stand.run(stand.fleet.post())
        assert status == 200, "it still serves"
        stand.run(stand.fleet.until(stand.fleet.is_idle, "nothing is left behind"))
        bugs = 'kvdeploy_router_errors_total{code="router_bug"}'
        assert stand.run(stand.fleet.metric(bugs)) == 0
        name = 'kvdeploy_router_errors_total{code="%s_failed"}'
        failed = [stand.run(stand.fleet.metric(name % role)) for role in ("prefill", "decode")]
        assert failed == [0, 0], "engines were sent something that they cannot take"
    finally:
        stand.close()


letters = st.text(max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | letters,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(letters, inner, max_size=4),
    max_leaves=12,
)
prompts = st.one_of(
    values,
    letters,
    st.lists(st.integers(-1, 2**40), max_size=300),
    st.lists(letters, max_size=5),
    st.text(alphabet=st.characters(categories=["Cs", "Lu"]), max_size=2000),
)
messages = st.lists(
    st.fixed_dictionaries({"role": values, "content": values | prompts}) | values, max_size=4
)
fields = st.sampled_from(
    ["stream", "max_tokens", "max_completion_tokens", "n", "logprobs", "prompt_logprobs", "echo",
     "stream_options", "min_tokens", "tools", "tool_choice", "stop", "use_beam_search", "model",
     "kv_transfer_params", "temperature", "", "\x00", "messages", "prompt"]
)  # fmt: skip


@MANY
@given(path=ENDPOINTS, body=st.binary(max_size=300))
def test_bodies_of_any_bytes(stand: Stand, path: str, body: bytes) -> None:
    stand.send(path, body)


@MANY
@given(path=ENDPOINTS, value=values)
def test_bodies_of_any_json(stand: Stand, path: str, value: Any) -> None:
    stand.send(path, json.dumps(value).encode())


@MANY
@given(path=ENDPOINTS, prompt=prompts, talk=messages, more=st.dictionaries(fields, values))
def test_bodies_that_are_almost_right(
    stand: Stand, path: str, prompt: Any, talk: Any, more: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": prompt, "messages": talk, **more}
    stand.send(path, json.dumps(body).encode())


header_text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200)


@MANY
@given(
    headers=st.dictionaries(
        st.sampled_from(
            ["X-Request-Id", "X-Kvdeploy-Timeout-S", "X-Kvdeploy-Pair", "X-Kvdeploy-Mode",
             "Authorization", "Content-Type", "Accept"]
        ),
        header_text,
    )
)  # fmt: skip
def test_headers_of_any_text(stand: Stand, headers: dict[str, str]) -> None:
    stand.send("/v1/completions", b'{"model":"tiny","prompt":"x"}', headers)


@pytest.mark.parametrize("body", [
    b"[" * 200_000,
    b'{"model":"tiny","prompt":' + b"[" * 200_000,
    b'{"model":"tiny","prompt":' + b"9" * 10_000 + b"}",
    b'{"model":"tiny","prompt":[' + b"9" * 10_000 + b"]}",
    b'{"model":"tiny","prompt":"x","max_tokens":NaN}',
    b'{"model":"tiny","prompt":"x","model":"tiny","prompt":7}',
    b'\xef\xbb\xbf{"model":"tiny","prompt":"x"}',
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"\\ud800","prompt":"x"}',
    b'{"model":"tiny","prompt":"x"} ',
    b"",
], ids=range(11))  # fmt: skip
@pytest.mark.parametrize("encoding", [None, "gzip", "deflate", "br", "nonsense"])
def test_bodies_made_to_hurt(stand: Stand, body: bytes, encoding: str | None) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}
    stand.send("/v1/completions", body, headers)


async def talk_raw(fleet: Fleet, data: bytes, *, end: str) -> None:
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    if end == "half":
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read(65536)
        assert b" 500 " not in answer.split(b"\r\n", 1)[0]
    elif end == "reset":
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@settings(MANY, max_examples=60)
@given(data=st.binary(min_size=1, max_size=200), end=st.sampled_from(["half", "reset", "close"]))
def test_connections_of_any_bytes(stand: Stand, data: bytes, end: str) -> None:
    stand.run(talk_raw(stand.fleet, data, end=end))


@pytest.mark.parametrize("end", ["half", "reset", "close"])
@pytest.mark.parametrize("data", [
    b"POST /v1/completions HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /\xff\x00 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
], ids=range(7))  # fmt: skip
def test_requests_that_are_cut_or_crooked(stand: Stand, data: bytes, end: str) -> None:
    stand.run(talk_raw(stand.fleet, data, end=end))


def test_the_client_itself_is_not_what_refuses(stand: Stand) -> None:
    """The stand sends what it is told: a good request is served."""
    assert stand.send("/v1/completions", b'{"model":"tiny","prompt":"x"}') == 200
    assert isinstance(stand.fleet.session, aiohttp.ClientSession)
