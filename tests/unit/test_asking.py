from __future__ import annotations

from typing import Any

import pytest

from kvdeploy.adapters.http import Answer
from kvdeploy.planning.verdicts import TokenRun
from kvdeploy.stages.asking import read_run


def completion(**choice: Any) -> Answer:
    return Answer(status=200, body={"choices": [choice]})


def stream(*choices: dict[str, Any] | None, body: Any = None) -> Answer:
    events: tuple[dict[str, Any], ...] = tuple(
        {"choices": [] if c is None else [c]} for c in choices
    )
    return Answer(status=200, events=events, done=True, body=body)


def test_a_completion_with_its_odds() -> None:
    top = [{"token_id:7": -0.1, "token_id:9": -2.1}, {"token_id:8": -1.5, "token_id:5": -1.25}]
    answer = completion(
        text="ab", token_ids=[7, 5], finish_reason="length", logprobs={"top_logprobs": top}
    )
    assert read_run(answer) == TokenRun(
        token_ids=(7, 5),
        odds=({7: -0.1, 9: -2.1}, {8: -1.5, 5: -1.25}),
        finish_reason="length",
        text="ab",
    )


def test_a_chat_answer_with_its_odds() -> None:
    content = [
        {
            "token": "token_id:7",
            "top_logprobs": [
                {"token": "token_id:7", "logprob": -0.5},
                {"token": "token_id:9", "logprob": -1.0},
            ],
        }
    ]
    answer = completion(
        message={"role": "assistant", "content": "a"},
        token_ids=[7],
        finish_reason="stop",
        logprobs={"content": content},
    )
    assert read_run(answer) == TokenRun(
        token_ids=(7,), odds=({7: -0.5, 9: -1.0},), finish_reason="stop", text="a"
    )


@pytest.mark.parametrize("top", [{}, None], ids=["none", "null"])
def test_a_token_without_candidates_has_no_odds(top: dict[str, float] | None) -> None:
    run = read_run(completion(token_ids=[7], logprobs={"top_logprobs": [top]}))
    assert run.odds == ({},)


def test_a_candidate_that_is_a_word_has_no_id() -> None:
    top = {"token_id:7": -1.0, "b": -3.0}
    run = read_run(completion(token_ids=[7], logprobs={"top_logprobs": [top]}))
    assert run.odds == ({7: -1.0},)


def test_without_odds_there_are_none() -> None:
    run = read_run(completion(token_ids=[7], text="a", finish_reason="length"))
    assert run == TokenRun(token_ids=(7,), finish_reason="length", text="a")


@pytest.mark.parametrize(
    "choices",
    [
        (
            {"text": "a", "token_ids": [1, 2], "finish_reason": None},
            {"text": "b", "token_ids": None, "finish_reason": None},
            {"text": "c", "token_ids": [3], "finish_reason": "length"},
        ),
        (
            {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
            {"delta": {"content": "ab"}, "token_ids": [1, 2], "finish_reason": None},
            {"delta": {"content": "c"}, "token_ids": [3], "finish_reason": "length"},
        ),
    ],
    ids=["completions", "chat"],
)
def test_a_streams_pieces_are_put_together(choices: tuple[dict[str, Any], ...]) -> None:
    run = read_run(stream(*choices, None))  # the last event of a stream may carry usage alone
    assert run == TokenRun(token_ids=(1, 2, 3), finish_reason="length", text="abc")


def test_an_error_in_a_stream_is_no_answer_whatever_came_before() -> None:
    error = {"error": {"message": "decode went away"}}
    run = read_run(stream({"text": "a", "token_ids": [1]}, body=error))
    assert run == TokenRun(token_ids=(), text="decode went away", finish_reason="error")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(status=503, body={"error": {"message": "no pair"}}), "no pair"),
        (Answer(status=500, body="Internal Server Error"), "Internal Server Error"),
        (Answer(status=0, error="no answer within 1.0 s"), "no answer within 1.0 s"),
        (Answer(status=200, body={"choices": []}), "{'choices': []}"),
        (Answer(status=503, body={"choices": [{"token_ids": [1]}]}), "{'choices': [{'token_ids'"),
    ],
    ids=["refused", "not JSON", "nothing", "no choice", "an error with a choice"],
)
def test_what_is_no_answer_is_an_error_run(answer: Answer, text: str) -> None:
    run = read_run(answer)
    assert (run.token_ids, run.finish_reason) == ((), "error")
    assert run.text.startswith(text)
