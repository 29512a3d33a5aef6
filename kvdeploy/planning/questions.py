"""What smoke asks. Pure: the same nonce makes the same questions.

Texts are plain words, so that any tokenizer makes of them what it makes of a user's prompts.
Each begins with a nonce of its own and is salted with one: nothing of it can be in a prefix
cache from an earlier run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from kvdeploy.planning.verdicts import CANDIDATES

ANSWER_TOKENS: Final = 24
WORDS: Final = (
    *("harbour", "lantern", "river", "copper", "winter", "orchard", "signal", "meadow"),
    *("thunder", "violet", "canyon", "marble", "pepper", "saddle", "tunnel", "velvet"),
    *("window", "anchor", "basket", "candle", "desert", "engine", "forest", "garden"),
)

KINDS: Final = ("short", "long", "prefix", "chat", "stream")
"""Of the questions that every pair is asked."""

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, and what of it decode may hold already."""

    rung: str
    text: str
    salt: str
    """Prefix caches are shared under the same salt only: what a chat template puts before every
    prompt is not in the cache from an earlier climb."""
    endpoint: Endpoint = "/v1/completions"
    stream: bool = False
    follows: str = ""
    """Text of the question before, with which it shares its beginning."""

    def body(self, model: str) -> dict[str, Any]:
        """The request as a client would send it; greedy, of fixed length, with token ids back."""
        asked: dict[str, Any] = {
            "model": model,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            "cache_salt": self.salt,
        }
        if self.endpoint == "/v1/completions":
            return asked | {"prompt": self.text}
        return asked | {"messages": [{"role": "user", "content": self.text}]}

    def reference_body(self, model: str) -> dict[str, Any]:
        """The same for an engine that does all itself, asked for the odds of its choices too."""
        asked = self.body(model) | {"stream": False, "return_tokens_as_token_ids": True}
        if self.endpoint == "/v1/completions":
            return asked | {"logprobs": CANDIDATES}
        return asked | {"logprobs": True, "top_logprobs": CANDIDATES}

    def tokenize_body(self, model: str) -> dict[str, Any]:
        if self.endpoint == "/v1/completions":
            return {"model": model, "prompt": self.text}
        return {"model": model, "messages": [{"role": "user", "content": self.text}]}


def words(nonce: str, count: int) -> str:
    """`count` words that begin with `nonce` and differ from those of any other nonce."""
    at = sum(nonce.encode())
    chosen = (WORDS[(at * (i + 3) + i * i) % len(WORDS)] for i in range(count))
    return " ".join((nonce, *chosen))


def pair_questions(nonce: str, *, words_long: int) -> tuple[Question, ...]:
    """What every pair is asked, in this order; `words_long` words are more than 4 KV blocks."""
    long = words(f"{nonce}-long", words_long)
    return (
        Question(rung="tokens/short", text=words(f"{nonce}-short", 4), salt=nonce),
        Question(rung="tokens/long", text=long, salt=nonce),
        Question(
            rung="tokens/prefix",
            text=f"{long[: len(long) * 2 // 3]} but then {words('other', words_long // 4)}",
            follows=long,
            salt=nonce,
        ),
        Question(
            rung="tokens/chat",
            text=words(f"{nonce}-chat", words_long // 3),
            endpoint="/v1/chat/completions",
            salt=nonce,
        ),
        Question(
            rung="tokens/stream",
            text=words(f"{nonce}-stream", words_long // 2),
            stream=True,
            salt=nonce,
        ),
    )


def proof_question(nonce: str, *, words_long: int) -> Question:
    """The one question that `up` asks every pair."""
    return Question(rung="tokens", text=words(f"{nonce}-proof", words_long // 3), salt=nonce)


def control_question(nonce: str) -> Question:
    """What is asked while prefill is stopped. It fits every model: only that may make it fail."""
    return Question(rung="control", text=words(f"{nonce}-control", 2), salt=nonce)


def recovery_question(nonce: str) -> Question:
    """What is asked when prefill runs again."""
    return Question(rung="tokens/recovered", text=words(f"{nonce}-after", 13), salt=nonce)


def concurrent_questions(nonce: str, count: int, *, words_long: int) -> tuple[Question, ...]:
    """Different prompts of different lengths, to be asked at the same time."""
    return tuple(
        Question(
            rung="tokens/concurrent",
            text=words(f"{i}-{nonce}-at-once", max(4, words_long * (i + 1) // (count + 1))),
            stream=i % 2 == 1,
            salt=f"{i}-{nonce}",
        )
        for i in range(count)
    )
