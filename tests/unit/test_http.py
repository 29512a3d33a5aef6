"""The HTTP client against a real server: one that says, byte by byte, what a test tells it to."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters import http

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_process

JSON = "application/json"
SSE = "text/event-stream; charset=utf-8"


@dataclass
class Heard:
    url: str
    requests: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return self.requests[0].splitlines()[0]

    @property
    def headers(self) -> dict[str, str]:
        head = self.requests[0].partition("\r\n\r\n")[0].splitlines()[1:]
        return {k.lower(): v for k, _, v in (line.partition(": ") for line in head)}

    @property
    def body(self) -> str:
        return self.requests[0].partition("\r\n\r\n")[2]


@contextmanager
def server(*pieces: bytes, hangs: bool = False) -> Iterator[Heard]:
    """Answer one connection with `pieces`, then close it, or keep it and say no more."""
    ends = threading.Event()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        heard = Heard(f"http://127.0.0.1:{s.getsockname()[1]}")

        def serve() -> None:
            connection, _ = s.accept()
            with connection:
                heard.requests.append(read_request(connection))
                for piece in pieces:
                    connection.sendall(piece)
                if hangs:
                    ends.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            ends.set()
            thread.join(10)


def read_request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.splitlines()
            if line.lower().startswith(b"content-length")
        ),
        0,
    )
    while len(body) < length:
        body += connection.recv(65536)
    return (head + b"\r\n\r\n" + body).decode()


def whole(body: str, *, kind: str = JSON, status: str = "200 OK", extra: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    )
    return (head + body).encode()


def head_of_stream() -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {SSE}\r\n\r\n".encode()


def event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def test_json_goes_out_and_comes_back() -> None:
    with server(whole('{"a": [1]}', extra="X-Kvdeploy-Pair: p/d\r\n")) as heard:
        answer = http.post(
            f"{heard.url}/v1/x?y=1", {"q": "ü"}, timeout_s=5, headers={"Authorization": "Bearer k"}
        )
    assert (answer.status, answer.body, answer.error) == (200, {"a": [1]}, "")
    assert answer.headers["x-kvdeploy-pair"] == "p/d"
    assert 0 < answer.seconds < 5
    assert heard.line == "POST /v1/x?y=1 HTTP/1.1"
    assert heard.headers["content-type"] == JSON
    assert heard.headers["authorization"] == "Bearer k"
    assert json.loads(heard.body) == {"q": "ü"}


def test_get_asks_for_the_root_when_nothing_is_named() -> None:
    with server(whole("{}")) as heard:
        assert http.get(heard.url, timeout_s=5).body == {}
    assert heard.line == "GET / HTTP/1.1"
    assert heard.body == ""


def test_what_is_not_json_is_kept_as_text() -> None:
    with server(whole("<html>", kind="text/html", status="502 Bad Gateway")) as heard:
        answer = http.get(heard.url, timeout_s=5)
    assert (answer.status, answer.body, answer.message) == (502, "<html>", "<html>")
    assert not answer.is_openai_error


@pytest.mark.parametrize(
    ("body", "message", "openai"),
    [
        ('{"error": {"message": "no pair", "type": "x"}}', "no pair", True),
        ('{"error": "plain"}', "plain", False),
        ('{"detail": "Not Found"}', "{'detail': 'Not Found'}", False),
        ('{"message": "old form"}', "old form", False),
        ('["a"]', "['a']", False),
    ],
)
def test_an_errors_words_are_found_in_every_form(body: str, message: str, openai: bool) -> None:  # noqa: FBT001
    with server(whole(body, status="503 Service Unavailable")) as heard:
        answer = http.get(heard.url, timeout_s=5)
    assert (answer.status, answer.message, answer.is_openai_error) == (503, message, openai)


def test_a_stream_is_read_to_its_end() -> None:
    events = [{"usage": {}}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
    pieces = [b": a comment\n\n", *map(event, events), b"data: [DONE]\n\n"]
    with server(head_of_stream(), *pieces) as heard:
        answer = http.post(heard.url, {}, timeout_s=5)
    assert (answer.status, answer.done, answer.body) == (200, True, None)
    assert answer.events == tuple(events)
    assert answer.ttft_s is not None
    assert answer.ttft_s <= answer.seconds


def test_a_stream_in_chunks_is_read_whatever_the_cuts() -> None:
    text = event({"choices": [{"text": "a"}]}) + b"data:[DONE]\n\n"
    chunks = [text[:9], text[9:31], text[31:]]
    pieces = [f"{len(c):x}\r\n".encode() + c + b"\r\n" for c in chunks]
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {SSE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with server(head, *pieces, b"0\r\n\r\n") as heard:
        answer = http.post(heard.url, {}, timeout_s=5)
    assert (answer.events, answer.done) == (({"choices": [{"text": "a"}]},), True)


def test_a_stream_that_breaks_off_is_not_done() -> None:
    with server(head_of_stream(), event({"choices": [{"text": "a"}]})) as heard:
        answer = http.post(heard.url, {}, timeout_s=5)
    assert (len(answer.events), answer.done) == (1, False)


def test_a_chunked_stream_that_breaks_off_is_no_answer() -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {SSE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with server(head, b"ff\r\ndata: {}") as heard:
        answer = http.post(heard.url, {}, timeout_s=5)
    assert answer.status == 0
    assert answer.error.startswith("IncompleteRead: ")


def test_an_error_in_a_stream_is_its_body() -> None:
    error = {"error": {"message": "decode went away"}}
    pieces = [event({"choices": [{"text": "a"}]}), event(error), b"data: [DONE]\n\n"]
    with server(head_of_stream(), *pieces) as heard:
        answer = http.post(heard.url, {}, timeout_s=5)
    assert (answer.body, answer.message) == (error, "decode went away")
    assert answer.is_openai_error


def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    with server(hangs=True) as heard:
        answer = http.get(heard.url, timeout_s=0.2)
    assert (answer.status, answer.error) == (0, "no answer within 0.2 s")
    assert 0.2 <= answer.seconds < 2
    assert answer.message == answer.error


def test_a_stream_that_falls_silent_is_given_up_in_time() -> None:
    with server(head_of_stream(), event({"choices": []}), hangs=True) as heard:
        answer = http.post(heard.url, {}, timeout_s=0.2)
    assert (answer.status, answer.error) == (0, "no answer within 0.2 s")


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]  # bound, but it does not listen
        answer = http.get(f"http://127.0.0.1:{port}/health", timeout_s=5)
    assert answer.status == 0
    assert answer.error == "ConnectionRefusedError: [Errno 111] Connection refused"


def test_a_server_that_closes_at_once_is_no_answer() -> None:
    with server() as heard:
        answer = http.get(heard.url, timeout_s=5)
    assert answer.status == 0
    assert answer.error == "RemoteDisconnected: Remote end closed connection without response"


def test_a_server_of_another_kind_is_no_answer() -> None:
    with server(b"SSH-2.0-OpenSSH\r\n") as heard:
        answer = http.get(heard.url, timeout_s=5)
    assert (answer.status, answer.error) == (0, "BadStatusLine: SSH-2.0-OpenSSH\r\n")


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(whole("{}")) as heard:
        assert http.get(heard.url, timeout_s=5).status == 200
