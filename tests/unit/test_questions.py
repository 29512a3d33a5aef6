from __future__ import annotations

from itertools import combinations

import pytest

from kvdeploy.model.spec import ClusterSpec, ModelSpec
from kvdeploy.planning.questions import (
    ANSWER_TOKENS,
    Question,
    concurrent_questions,
    control_question,
    pair_questions,
    proof_question,
    recovery_question,
    words,
)

NONCE = "n3ade68b1"
"""As long as the longest one that smoke makes."""


def everything(nonce: str) -> tuple[Question, ...]:
    return (
        *pair_questions(nonce, words_long=90),
        proof_question(nonce, words_long=90),
        *concurrent_questions(nonce, 8, words_long=90),
        control_question(nonce),
        recovery_question(nonce),
    )


def shared(a: str, b: str) -> int:
    """Letters that two texts begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def test_the_same_nonce_asks_the_same() -> None:
    assert everything("n1") == everything("n1")


def test_no_question_of_one_nonce_is_one_of_another() -> None:
    one, other = ({q.text for q in everything(nonce)} for nonce in ("n1", "n2"))
    assert not one & other


@pytest.mark.parametrize(("a", "b"), [("n1", "n2"), ("n12", "n21"), ("x", "xx")])
def test_words_of_different_nonces_differ_from_their_first_word(a: str, b: str) -> None:
    assert words(a, 30).split()[0] != words(b, 30).split()[0]


def test_words_are_as_many_as_asked_for_and_the_nonce() -> None:
    said = words("n1", 12).split(" ")
    assert (said[0], len(said)) == ("n1", 13)
    assert len(set(said)) > 3


def test_every_pair_is_asked_each_kind_once_in_this_order() -> None:
    assert [(q.rung, q.endpoint, q.stream) for q in pair_questions("n1", words_long=90)] == [
        ("tokens/short", "/v1/completions", False),
        ("tokens/long", "/v1/completions", False),
        ("tokens/prefix", "/v1/completions", False),
        ("tokens/chat", "/v1/chat/completions", False),
        ("tokens/stream", "/v1/completions", True),
    ]


def test_the_prefix_question_begins_like_the_long_one_and_ends_otherwise() -> None:
    _, long, prefix, *_ = pair_questions("n1", words_long=90)
    assert prefix.follows == long.text
    assert shared(prefix.text, long.text) == len(long.text) * 2 // 3
    assert not prefix.text.endswith(long.text[-20:])


def test_no_other_two_questions_share_a_block_even_of_bytes() -> None:
    """The smallest block is 16 tokens, and of builtin:tiny a token is a byte, the first one BOS.

    A block in common would be in decode's prefix cache already, and never be pushed.
    """
    unrelated = [q for q in everything(NONCE) if not q.follows]
    for a, b in combinations(unrelated, 2):
        assert 1 + shared(a.text, b.text) < 16, (a.text, b.text)


def test_the_controls_question_fits_the_shortest_model_even_in_bytes() -> None:
    shortest = ClusterSpec(name="demo", model=ModelSpec(max_length=64)).model.max_length
    assert 1 + len(control_question(NONCE).text) + ANSWER_TOKENS <= shortest


def test_at_once_there_are_as_many_as_asked_for_of_different_lengths_half_of_them_streamed() -> (
    None
):
    asked = concurrent_questions("n1", 6, words_long=90)
    assert len({len(q.text.split()) for q in asked}) == 6
    assert [q.stream for q in asked] == [False, True] * 3
    assert {q.rung for q in asked} == {"tokens/concurrent"}


def test_a_completions_body_whole() -> None:
    question = Question(rung="r", text="hello", stream=True, salt="n1")
    assert question.body("m") == {
        "model": "m",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "cache_salt": "n1",
        "prompt": "hello",
    }


def test_a_chat_body_has_messages_instead_of_a_prompt() -> None:
    question = Question(rung="r", text="hello", salt="s", endpoint="/v1/chat/completions")
    body = question.body("m")
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in body


@pytest.mark.parametrize(
    ("endpoint", "odds"),
    [
        ("/v1/completions", {"logprobs": 5}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 5}),
    ],
)
def test_the_reference_is_asked_the_same_unstreamed_and_for_its_odds(
    endpoint: str, odds: dict[str, object]
) -> None:
    question = Question(rung="r", text="hello", salt="s", endpoint=endpoint, stream=True)  # type: ignore[arg-type]
    assert question.reference_body("m") == question.body("m") | {
        "stream": False,
        "return_tokens_as_token_ids": True,
        **odds,
    }


def test_what_is_tokenized_is_what_is_asked() -> None:
    plain = Question(rung="r", text="hello", salt="s")
    chat = Question(rung="r", text="hello", salt="s", endpoint="/v1/chat/completions")
    assert plain.tokenize_body("m") == {"model": "m", "prompt": "hello"}
    assert chat.tokenize_body("m") == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
    }
