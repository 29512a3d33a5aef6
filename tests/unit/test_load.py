"""The bench's own eyes: an answer that lacks anything is told from one that is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvdeploy.adapters.load import Answer, find_fault, read_sample

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


# --- samples ---------------------------------------------------------------------------------
def timed(pieces: list[tuple[float, bytes]]) -> Answer:
    found = Answer(sent=1.0, raw=b"".join(piece for _, piece in pieces))
    end = 0
    for at, piece in pieces:
        end += len(piece)
        found.times.append(at)
        found.ends.append(end)
    return found


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def told(text: str, number: int, finish: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish, "token_ids": [number]}])


def test_a_token_is_timed_by_the_piece_that_ends_it() -> None:
    """The second token lacks its last byte at first; the third comes with the end."""
    cut = frame(told(" b", 8))
    usage = event(choices=[], usage={"completion_tokens": 3})
    pieces = [
        (1.1, HEAD),
        (1.25, frame(told(" a", 7))),
        (1.5, cut[:-3]),
        (1.75, cut[-3:]),
        (2.0, frame(told(" c", 9, "length")) + frame(usage) + frame(DONE) + b"0\r\n\r\n"),
    ]
    sample, tokens = read_sample(timed(pieces), 3)
    assert sample.error == ""
    assert (sample.ttft_s, sample.total_s, sample.gaps_s) == (0.25, 1.0, (0.5, 0.25))
    assert sample.output_tokens == 3
    assert sample.tpot_s == 0.375
    assert tokens == [7, 8, 9]


def test_an_answer_of_known_length_is_timed_as_well() -> None:
    body = b"".join(RIGHT)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    first = len(RIGHT[0])
    pieces = [(1.5, head + body[:first]), (2.0, body[first:])]
    sample, tokens = read_sample(timed(pieces), 2)
    assert (sample.ttft_s, sample.gaps_s, tokens) == (0.5, (0.5,), [])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(sent=1.0, error="hung"), "hung"),
        (Answer(sent=1.0, raw=b""), "not an answer: IndexError"),
        (Answer(sent=1.0, raw=HEAD + b"5\r\ndata"), "not an answer: ValueError"),
        (timed([(1.5, HEAD + frame(DONE) + b"0\r\n\r\n")]), "None tokens"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_and_has_no_times(answer: Answer, error: str) -> None:
    sample, tokens = read_sample(answer, 2)
    assert (sample.error, sample.ttft_s, sample.gaps_s, tokens) == (error, 0.0, (), [])
