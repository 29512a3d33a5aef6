from __future__ import annotations

import pytest

from kvdeploy.router.judge import find_decode_fault, find_prefill_fault, find_stream_fault


@pytest.mark.parametrize(("body", "fault"), [
    (b'{"choices":[{"finish_reason":"length"}]}', ""),
    (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}', ""),
    (b'{"choices":[{"finish_reason":"abort"}]}', "ended the prompt with finish_reason 'abort'"),
    (b'{"choices":[{"finish_reason":"length"},{}]}', "ended the prompt with finish_reason None"),
    (b'{"choices":[]}', "answered without a choice"),
    (b'{"choices":[7]}', "answered without a choice"),
    (b"nonsense", "answered without a choice"),
])  # fmt: skip
def test_a_prefill_whose_blocks_are_free_again_is_told_by_its_ending(
    body: bytes, fault: str
) -> None:
    assert find_prefill_fault(body) == fault


@pytest.mark.parametrize(("body", "fault"), [
    (b'{"choices":[{"text":"a","finish_reason":"length"}]}', ""),
    (b'{"choices":[{"text":"a"}]}', ""),
    (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"error"}]}',
     "ended the answer with finish_reason 'error'"),
    (b'{"choices":[]}', "answered without a choice"),
    (b'{"error":{"message":"KV load failed"}}', "answered 200 with an error: KV load failed"),
    (b'{"error":"plain"}', "answered 200 with an error: plain"),
    (b"[]", "answered something that is not a JSON object"),
    (b"<html>", "answered something that is not a JSON object"),
])  # fmt: skip
def test_a_whole_answer_is_judged_by_what_is_in_it(body: bytes, fault: str) -> None:
    assert find_decode_fault(body) == fault


@pytest.mark.parametrize(("first", "fault"), [
    (b'data: {"choices":[{"text":" one"}]}\n\n', ""),
    (b'data: {"choices":[{"text":" one"}]}\r\n\r\ndata: {"choi', ""),
    (b'data: {"cut', ""),
    (b": ping\n\n", ""),
    (b'data: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n',
     "answered 200 with an error: gone"),
    (b'data: {"choices":[]}\n\n', "answered without a choice"),
    (b"data: [DONE]\n\n", "ended its stream before the first token"),
    (b'data: {"choices":[{"finish_reason":"abort"}]}\n\n',
     "ended the answer with finish_reason 'abort'"),
])  # fmt: skip
def test_a_stream_is_judged_by_its_first_event_alone(first: bytes, fault: str) -> None:
    assert find_stream_fault(first) == fault
