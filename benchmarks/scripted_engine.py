"""An engine that costs next to nothing: one scripted prefill or decode server, for load.

    python -m benchmarks.scripted_engine --role decode --port 9101 [--tokens-every-ms 20]

Speaks what a router needs of a vLLM server in push mode: /health, /v1/models, /metrics and
/v1/completions. Prefill answers after a fixed time, however many ask; decode waits for prefill's
WRITE and then gives every running request one token a step. It is as unforgiving as the real
ones (0.32): decode registers at the coordinates that it was told, the first time with a handshake,
and a prefill of another id, or a dead one, leaves the request waiting for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
from dataclasses import dataclass
from functools import cache
from typing import Any

import uvloop

MODEL = "tiny"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def text_of(tokens: int) -> str:
    """What a decode engine answers."""
    return "".join(f" t{number}" for number in range(tokens))


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    head = {"id": "cmpl-scripted", "object": "text_completion", "created": 0, "model": MODEL}
    return _frame(b"data: " + json.dumps(head | fields).encode() + b"\n\n")


@cache
def _token(number: int, *, last: bool) -> bytes:
    finish = "length" if last else None
    choice = {"index": 0, "text": f" t{number}", "logprobs": None, "finish_reason": finish}
    return _event(choices=[choice | {"stop_reason": None}], usage=None)


def _answer(body: object, status: str = "200 OK", kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass(eq=False)
class Stream:
    """One request that decode is generating for."""

    http: Http
    tokens: int
    streamed: bool
    usage: bool
    given: int = 0


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.running: dict[Stream, None] = {}
        # of a prefill engine
        self.written: set[str] = set()
        self.registered: dict[str, asyncio.StreamWriter] = {}
        # of a decode engine
        self.waiting: dict[str, Stream] = {}
        self.peers: dict[str, asyncio.Task[asyncio.StreamWriter | None]] = {}
        self.readers: set[asyncio.Task[None]] = set()

    def serve(self, http: Http, path: str, headers: str, body: bytes) -> None:
        if path == "/health":
            http.send(_answer(b""))
        elif path == "/metrics":
            http.send(_answer(self._metrics(), kind="text/plain"))
        elif path == "/v1/models":
            model = {"id": MODEL, "object": "model", "max_model_len": 32768}
            http.send(_answer({"object": "list", "data": [model]}))
        elif path == "/v1/completions":
            found = re.search(r"^x-request-id: *(\S+)", headers, re.IGNORECASE | re.MULTILINE)
            asked = json.loads(body)
            params = asked.get("kv_transfer_params") or {}
            # Ids that differ in what an engine adds at random are one.
            request_id = re.sub(r"-[0-9a-f]{8}$", "", found[1] if found else "")
            if self.options.role == "prefill":
                self._prefill(http, request_id, params)
            else:
                self._decode(http, request_id, asked, params)
        else:
            http.send(_answer({"error": f"no {path}"}, "404 Not Found"))

    def _metrics(self) -> bytes:
        return (
            f"vllm:num_requests_running {len(self.running)}\n"
            f"vllm:num_requests_waiting {len(self.waiting)}\n"
            f"vllm:kv_cache_usage_perc {min(1.0, len(self.running) / 4096)}\n"
            'vllm:cache_config_info{num_gpu_blocks="65536"} 1\n'
        ).encode()

    def _prefill(self, http: Http, request_id: str, params: dict[str, Any]) -> None:
        if not params.get("do_remote_decode"):
            http.send(_answer({"error": {"message": "not a prefill leg"}}, "500 Scripted"))
            return
        done = self._answer_prefill
        self.loop.call_later(self.options.prefill_ms / 1000, done, http, request_id)

    def _answer_prefill(self, http: Http, request_id: str) -> None:
        taker = self.registered.pop(request_id, None)
        if taker is None:
            self.written.add(request_id)
        else:
            taker.write(request_id.encode() + b"\n")
        choice = {"index": 0, "text": " t0", "finish_reason": "length"}
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": self.options.engine_id,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": "127.0.0.1",
            "remote_port": self.options.side_port,
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
            "transfer_mode": "push",
        }
        answer = {"id": f"cmpl-{request_id}", "object": "text_completion", "model": MODEL}
        http.send(_answer(answer | {"choices": [choice], "kv_transfer_params": params}))

    async def on_side_channel(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Decode's registrations: an engine id and a request id a line."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                engine_id, request_id = line.decode().split()
                if engine_id != self.options.engine_id:
                    continue
                if request_id in self.written:
                    self.written.discard(request_id)
                    writer.write(request_id.encode() + b"\n")
                else:
                    self.registered[request_id] = writer
        writer.close()

    def _decode(
        self, http: Http, request_id: str, asked: dict[str, Any], params: dict[str, Any]
    ) -> None:
        usage = (asked.get("stream_options") or {}).get("include_usage", False)
        tokens = int(asked.get("max_tokens", 16))
        stream = Stream(http, tokens, bool(asked.get("stream")), bool(usage))
        if stream.streamed:
            http.send(_STREAM)
        http.on_lost = lambda: self._drop(request_id, stream)
        if not params.get("do_remote_prefill"):
            self._begin(stream)
            return
        self.waiting[request_id] = stream
        engine_id = params["remote_engine_id"]
        peer = self.peers.get(engine_id)
        if peer is None:
            meeting = self._shake_hands(params["remote_host"], params["remote_port"])
            peer = self.peers[engine_id] = self.loop.create_task(meeting)
        line = f"{engine_id} {request_id}\n".encode()
        if peer.done():
            _register(line, peer)
        else:
            peer.add_done_callback(lambda met: _register(line, met))

    async def _shake_hands(self, host: str, port: int) -> asyncio.StreamWriter | None:
        await asyncio.sleep(self.options.handshake_ms / 1000)
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            return None
        self.readers.add(self.loop.create_task(self._take_writes(reader)))
        return writer

    async def _take_writes(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                stream = self.waiting.pop(line.decode().strip(), None)
                if stream is not None:
                    self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        self._give(stream)
        if stream.given < stream.tokens:
            self.running[stream] = None

    def _drop(self, request_id: str, stream: Stream) -> None:
        self.waiting.pop(request_id, None)
        self.running.pop(stream, None)

    async def step(self) -> None:
        """For ever: a token for everyone, then a pause."""
        every_s = self.options.token_ms / 1000
        at = self.loop.time()
        while True:
            at = max(at + every_s, self.loop.time())
            await asyncio.sleep(at - self.loop.time())
            for stream in list(self.running):
                self._give(stream)
                if stream.given >= stream.tokens:
                    del self.running[stream]

    def _give(self, stream: Stream) -> None:
        number = stream.given
        stream.given += 1
        last = stream.given >= stream.tokens
        if stream.streamed:
            stream.http.send(_token(number, last=last))
        if not last:
            return
        usage = {"prompt_tokens": 1, "completion_tokens": stream.tokens}
        if stream.streamed:
            if stream.usage:
                stream.http.send(_event(choices=[], usage=usage))
            stream.http.send(_frame(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            choice = {"index": 0, "text": text_of(stream.tokens), "finish_reason": "length"}
            stream.http.send(_answer({"model": MODEL, "choices": [choice], "usage": usage}))
        stream.http.on_lost = None


def _register(line: bytes, peer: asyncio.Task[asyncio.StreamWriter | None]) -> None:
    writer = peer.result()
    if writer is not None and not writer.transport.is_closing():
        writer.write(line)


class Http(asyncio.Protocol):
    """As much of HTTP/1.1 as the routers use: one request after another, bodies with a length."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.on_lost: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        if self.on_lost is not None:
            self.on_lost()

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            text = head.decode("latin-1")
            found = re.search(r"^content-length: *(\d+)", text, re.IGNORECASE | re.MULTILINE)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            path = text.split(" ", 2)[1].partition("?")[0]
            self._engine.serve(self, path, text, rest[:length])


async def serve(options: argparse.Namespace) -> None:
    engine, loop = Engine(options), asyncio.get_running_loop()
    await loop.create_server(lambda: Http(engine), "127.0.0.1", options.port, backlog=1024)
    if options.role == "prefill":
        await asyncio.start_server(engine.on_side_channel, "127.0.0.1", options.side_port)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    step = loop.create_task(engine.step())
    await stop.wait()
    step.cancel()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--role", choices=("prefill", "decode"), required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--side-port", type=int, default=0)
    options.add_argument("--engine-id", default="scripted")
    options.add_argument("--prefill-ms", type=float, default=50)
    options.add_argument("--token-ms", type=float, default=20)
    options.add_argument("--handshake-ms", type=float, default=300)
    uvloop.run(serve(options.parse_args()))


if __name__ == "__main__":
    main()
