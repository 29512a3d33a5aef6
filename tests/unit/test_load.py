"""The bench's own eyes: an answer that lacks anything is told from one that is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.load import Answer, find_fault

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish}])


USAGE = event(choices=[], usage={"completion_tokens": 2})
DONE = b"data: [DONE]\n\n"
RIGHT = [token(" a"), token(" b", "length"), USAGE, DONE]


def answer(events: list[bytes], head: bytes = HEAD) -> Answer:
    frames = [b"%x\r\n%b\r\n" % (len(e), e) for e in events]
    return Answer(sent=1.0, raw=head + b"".join(frames) + b"0\r\n\r\n")


def test_a_whole_answer_is_right_however_it_was_cut_into_chunks() -> None:
    assert find_fault(answer(RIGHT), 2, " a b") == ""
    whole = b"".join(RIGHT)
    assert find_fault(answer([whole[:7], whole[7:60], whole[60:]]), 2, " a b") == ""


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (RIGHT[:-1], "no [DONE]"),
        ([], "no [DONE]"),
        ([RIGHT[0], RIGHT[1], DONE], "None tokens"),
        ([RIGHT[1], USAGE, DONE], "wrong text"),
        ([RIGHT[0], RIGHT[0], USAGE, DONE], "finish_reason None"),
        ([RIGHT[1], RIGHT[0], USAGE, DONE], "wrong text"),
        ([RIGHT[0], event(error={"code": "gone"}), DONE], "error event: gone"),
    ],
)
def test_what_an_answer_lacks_is_told(events: list[bytes], fault: str) -> None:
    assert find_fault(answer(events), 2, " a b") == fault


def test_another_number_of_tokens_is_a_fault() -> None:
    assert find_fault(answer(RIGHT), 3, None) == "2 tokens"


def test_a_refusal_is_a_fault() -> None:
    refused = answer([], b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    assert find_fault(refused, 2, None) == "status 503"


def test_what_went_wrong_on_the_way_is_the_fault() -> None:
    assert find_fault(Answer(sent=1.0, error="hung"), 2, None) == "hung"
