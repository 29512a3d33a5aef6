"""HTTP to an engine at the socket, against a server that sends what it is told to, byte by byte."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvdeploy.router import wire
from kvdeploy.router.errors import ApiError
from kvdeploy.router.relay import relay_stream
from kvdeploy.router.wire import Pool, Reply, WireError
from tests.router.harness import run_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvdeploy.router.wire import Sink

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = OK + b"content-length: 3\r\n\r\none"


class Server:
    """Answers each request with the next of its scripts, one write an item."""

    def __init__(self, *scripts: list[bytes]) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.asked: list[bytes] = []
        self.closes = False
        """After an answer."""
        self.unsent = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.asked.append(head + await reader.readexactly(length))
                for data in self.scripts.pop(0):
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def run_server(*scripts: list[bytes]) -> AsyncIterator[tuple[Server, Pool]]:
    server = Server(*scripts)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        pool = Pool(f"http://127.0.0.1:{server.port}", connect_s=1)
        yield server, pool
        pool.close()
        await asyncio.sleep(0.01)


async def post(pool: Pool) -> Reply:
    return await pool.post("/path", b"body", {"X-Request-Id": "r1"})


async def test_what_is_sent_is_http_with_the_headers_and_the_body() -> None:
    async with run_server([WHOLE]) as (server, pool):
        await (await post(pool)).read()
    head, _, body = server.asked[0].partition(b"\r\n\r\n")
    assert body == b"body"
    assert head.split(b"\r\n") == [
        b"POST /path HTTP/1.1",
        b"Host: 127.0.0.1:%d" % server.port,
        b"User-Agent: kvdeploy-router",
        b"Accept-Encoding: identity",
        b"X-Request-Id: r1",
        b"Content-Length: 4",
    ]


async def test_one_connection_serves_one_answer_after_another() -> None:
    async with run_server([WHOLE], [CHUNKED, b"2\r\n", b"tw\r\n1\r\no\r\n0\r\n\r\n"]) as (
        server,
        pool,
    ):
        first = await post(pool)
        assert (first.status, first.content_type) == (200, "text/event-stream")
        assert await first.read() == b"one"
        first.close()  # an answer that is whole leaves its connection as it is
        assert await (await post(pool)).read() == b"two"
    assert server.connections == 1


async def test_two_answers_at_once_have_a_connection_each() -> None:
    async with run_server([WHOLE], [WHOLE]) as (server, pool):
        first, second = await asyncio.gather(post(pool), post(pool))
        assert await first.read() == await second.read() == b"one"
    assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_server([WHOLE], [WHOLE]) as (server, pool):
        await (await post(pool)).read()
        monkeypatch.setattr(wire, "KEEP_ALIVE_S", 0.01)
        await asyncio.sleep(0.05)
        await (await post(pool)).read()
    assert server.connections == 2


async def test_a_connection_that_the_engine_closed_is_not_used() -> None:
    async with run_server([WHOLE], [WHOLE]) as (server, pool):
        server.closes = True
        await (await post(pool)).read()
        await asyncio.sleep(0.05)
        await (await post(pool)).read()
    assert server.connections == 2


async def test_a_whole_answer_that_was_not_taken_ends_its_connection() -> None:
    async with run_server([CHUNKED, b"1\r\na\r\n"], [WHOLE]) as (server, pool):
        cut = await post(pool)
        assert await cut.read_some() == b"a"
        cut.close()
        assert await (await post(pool)).read() == b"one"
    assert server.connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with run_server([OK + b"\r\n", b"all of", b" it"]) as (server, pool):
        server.closes = True
        assert await (await post(pool)).read() == b"all of it"


@pytest.mark.parametrize(
    "script",
    [
        [CHUNKED, b"5\r\nab"],
        [OK + b"content-length: 9\r\n\r\n", b"short"],
        [b"HTTP/1.1 200"],
        [],
    ],
)
async def test_an_answer_that_is_cut_is_an_error(script: list[bytes]) -> None:
    async with run_server(script) as (server, pool):
        server.closes = True
        with pytest.raises(WireError, match="the engine closed it"):
            await (await post(pool)).read()


async def test_what_is_not_http_is_an_error() -> None:
    async with run_server([b"SSH-2.0-OpenSSH_9.6\r\n"]) as (_, pool):
        with pytest.raises(WireError, match="not HTTP"):
            await post(pool)


async def test_an_interim_answer_is_not_the_answer() -> None:
    async with run_server([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE]) as (_, pool):
        reply = await post(pool)
        assert (reply.status, await reply.read()) == (200, b"one")


async def test_all_that_comes_is_poured_in_order_and_its_end_is_told() -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(t), t) for t in (b"a", b"bc", b"def")]
    got: list[bytes] = []
    async with run_server([CHUNKED, *chunks, b"0\r\n\r\n"]) as (_, pool):
        reply = await post(pool)
        got.append(await reply.read_some())
        await reply.pour(got.append)
    assert got == [b"a", b"bc", b"def"]


async def test_a_stream_that_breaks_while_it_is_poured_is_an_error() -> None:
    got: list[bytes] = []
    async with run_server([CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n"]) as (server, pool):
        server.closes = True
        reply = await post(pool)
        with pytest.raises(WireError, match="the engine closed it"):
            await reply.pour(got.append)
    assert b"".join(got) == b"ab"


async def test_a_connection_held_at_the_end_of_its_answer_goes_on_with_the_next() -> None:
    late = [OK + b"content-length: 3\r\n\r\n", b"one"]
    async with run_server([CHUNKED, b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"], late) as (server, pool):
        reply = await post(pool)
        await reply.pour(lambda _: reply.hold(held=True))
        async with asyncio.timeout(1):
            following = await post(pool)
            reply.hold(held=True)  # too late: the connection is another's
            assert await following.read() == b"one"
    assert server.connections == 1


async def test_a_client_that_takes_nothing_holds_decode_back_and_gets_everything_later() -> None:
    line = b"data: " + b"x" * 65536 + b"\n\n"
    async with run_fleet() as fleet:
        fleet.decode.chunks = (*[line] * 400, b"data: [DONE]\n\n")
        body = {"model": "tiny", "prompt": "p", "stream": True}
        async with fleet.session.post(fleet.url + "/v1/completions", json=body) as answer:
            await asyncio.sleep(0.3)
            assert fleet.decode.done[-1:] != [fleet.decode.clients[0].request_id]
            got = await answer.read()
    assert got == line * 400 + b"data: [DONE]\n\n"


class Endless:
    """Decode's answer, which goes on when its time is over."""

    first, content_type = b"data: 1\n\n", "text/event-stream"

    def __init__(self) -> None:
        self.ends_at = asyncio.get_running_loop().time() + 0.05
        self.sink: Sink | None = None

    async def pour(self, sink: Sink) -> None:
        self.sink = sink
        sink(b"data: 2\n\n")
        await asyncio.Event().wait()

    def build_total_error(self, _: float) -> ApiError:
        assert self.sink is not None
        self.sink(b"data: late\n\n")
        return ApiError(504, "total_deadline", "too late")


async def test_nothing_of_decode_comes_between_a_streams_end_and_its_last_words() -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        response, _ = await relay_stream(request, cast("Any", Endless()), total_s=0.05)
        return response

    app = web.Application()
    app.add_routes([web.get("/", serve)])
    async with TestClient(TestServer(app)) as client:
        got = await (await client.get("/")).text()
    numbers, _, error = got.partition('data: {"error"')
    assert numbers == "data: 1\n\ndata: 2\n\n"
    assert "too late" in error
