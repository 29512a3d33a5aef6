"""Ask a running fleet questions: the router for what is to be judged, prefill for references.

Gathers evidence; judges nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters import http
from kvdeploy.adapters.metrics import fetch_counters
from kvdeploy.errors import CheckError, FleetError, SmokeError
from kvdeploy.model.listing import HASHED, entries
from kvdeploy.planning.verdicts import TokenRun
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.routing import Engine
    from kvdeploy.planning.questions import Question
    from kvdeploy.stages.base import Step

ASK_TIMEOUT_S: Final = 120.0
PAIRS_TIMEOUT_S: Final = 120.0
"""For the router to warm every pair once the engines are healthy: a handshake takes 0.1-10 s."""
QUIET_S: Final = 15.0
SETTLE_S: Final = 15.0
"""Prefill counts a WRITE at its next step, which may be after the client has its answer."""


class Asker:
    def __init__(self, fleet: FleetOutputs) -> None:
        self.fleet = fleet
        self.config = fleet.router_config
        self.prefills = self.config.by_role("prefill")
        self.decodes = self.config.by_role("decode")
        self._key = self._first_key()
        self._tokenized: dict[tuple[str, str], http.Answer] = {}

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the router has to carry."""
        return dict(self._key)

    @property
    def pairs(self) -> tuple[tuple[Engine, Engine], ...]:
        return tuple((p, d) for p in self.prefills for d in self.decodes)

    def tokens_of(self, question: Question) -> tuple[int, ...]:
        """The question's prompt as the engine's tokenizer has it.

        Raises:
            FleetError: prefill does not tell.
        """
        answer = self._tokenize(question)
        if answer.status != 200:
            msg = f"{self.prefills[0].name} does not tokenize: {answer.message}"
            raise FleetError(msg, hint="'kvdeploy status' shows how it is.")
        return tuple(answer.body["tokens"])

    def why_not(self, question: Question) -> str:
        """Why the model cannot be asked this, e.g. chat without a chat template; '' if it can."""
        answer = self._tokenize(question)
        return answer.message if answer.status == 400 else ""

    def _tokenize(self, question: Question) -> http.Answer:
        """Ask once for each prompt: its length is needed before it is asked and after."""
        prompt = (question.endpoint, question.text)
        if prompt not in self._tokenized:
            self._tokenized[prompt] = http.post(
                f"{self.prefills[0].url}/tokenize",
                question.tokenize_body(self.config.served_model),
                timeout_s=30,
            )
        return self._tokenized[prompt]

    def reference(self, question: Question) -> TokenRun:
        """The answer of an engine that computes everything itself.

        A prefill engine that is asked like any vLLM server is one: KV is never pushed into it.
        """
        answer = http.post(
            f"{self.prefills[0].url}{question.endpoint}",
            question.reference_body(self.config.served_model),
            timeout_s=ASK_TIMEOUT_S,
        )
        if answer.status != 200:
            msg = f"{self.prefills[0].name} gives no reference: {answer.message}"
            raise SmokeError(msg, hint="'kvdeploy logs prefill-0' shows why.")
        return read_run(answer)

    def ask(
        self, question: Question, pair: str | None = None, timeout_s: float | None = None
    ) -> http.Answer:
        """Send it through the router, over `pair` if named, with a deadline if given."""
        headers = dict(self._key)
        if pair is not None:
            headers["X-Kvdeploy-Pair"] = pair
        if timeout_s is not None:
            headers["X-Kvdeploy-Timeout-S"] = str(timeout_s)
        return http.post(
            f"{self.fleet.url}{question.endpoint}",
            question.body(self.config.served_model),
            timeout_s=ASK_TIMEOUT_S,
            headers=headers,
            trust=self.fleet.trust,
        )

    def ask_at_once(self, questions: Sequence[Question]) -> list[http.Answer]:
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(self.ask, questions))

    def counters(self) -> dict[str, EngineCounters]:
        """Of every engine, by name."""
        return {e.name: fetch_counters(e.url, timeout_s=10) for e in self.config.engines}

    def settled(
        self, enough: Callable[[dict[str, EngineCounters]], bool]
    ) -> dict[str, EngineCounters]:
        """Counters once `enough` says so; the last ones seen when it never does."""
        seen: dict[str, EngineCounters] = {}

        def look() -> bool | None:
            nonlocal seen
            seen = self.counters()
            return True if enough(seen) else None

        wait_for(look, timeout_s=SETTLE_S, interval_s=0.25)
        return seen

    def wait_quiet(self) -> None:
        """Wait until nobody else is being served: counters must be of our own making.

        Raises:
            SmokeError: the fleet stays busy.
        """

        def quiet() -> bool | None:
            busy = any(c.running or c.waiting for c in self.counters().values())
            return None if busy else True

        if wait_for(quiet, timeout_s=QUIET_S, interval_s=0.5) is None:
            msg = f"the fleet is serving other requests for over {QUIET_S:.0f} s"
            raise SmokeError(
                msg, hint="Smoke counts bytes: run it when nobody else uses the fleet."
            )

    def is_ready(self) -> bool:
        return pairs_ready(self.fleet)

    def _first_key(self) -> dict[str, str]:
        if not self.config.api_key_file:
            return {}
        try:
            text = Path(self.config.api_key_file).read_text(encoding="utf-8")
        except OSError as e:
            msg = f"router.api_key_file: {self.config.api_key_file} cannot be read: {e.strerror}"
            raise CheckError(msg, hint="Smoke asks the router with the first key of it.") from e
        listed = entries(text)
        keys = [key for key in listed if not key.startswith(HASHED)]
        if listed and not keys:
            msg = f"router.api_key_file: {self.config.api_key_file} holds hashes only"
            raise CheckError(msg, hint="Smoke needs a key in the clear: make one for it.")
        return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def pairs_ready(fleet: FleetOutputs) -> bool:
    """Whether the router says that every pair is warm."""
    return ask_ready(fleet).status == 200


def wait_pairs(fleet: FleetOutputs, step: Step) -> str:
    """Until the router has pushed once over every pair; what is missing when it does not."""
    seen = http.Answer(status=0)

    def look() -> bool | None:
        nonlocal seen
        seen = ask_ready(fleet)
        step.update(f"warming pairs: {_describe_pairs(seen)}")
        return True if seen.status == 200 else None

    if wait_for(look, timeout_s=PAIRS_TIMEOUT_S, interval_s=0.2) is None:
        within = f"within {PAIRS_TIMEOUT_S:.0f} s"
        return f"the router could not push over every pair {within}: {_describe_pairs(seen)}"
    return ""


def _describe_pairs(answer: http.Answer) -> str:
    pairs = answer.body.get("pairs") if isinstance(answer.body, dict) else None
    if not isinstance(pairs, dict):
        return answer.message or "no answer from the router yet"
    return ", ".join(f"{pair} {state}" for pair, state in sorted(pairs.items()))


def ask_ready(fleet: FleetOutputs) -> http.Answer:
    """What the router says of every pair: 200 when all are warm."""
    return http.get(f"{fleet.url}/ready?complete=1", timeout_s=5, trust=fleet.trust)


def read_run(answer: http.Answer) -> TokenRun:
    """Tokens, text and odds of an answer, whole or streamed. What is no answer is an error run."""
    if answer.events:
        choices = [e["choices"][0] for e in answer.events if e.get("choices")]
    elif isinstance(answer.body, dict) and answer.body.get("choices"):
        choices = [answer.body["choices"][0]]
    else:
        choices = []
    if answer.status != 200 or not choices or (answer.events and answer.body is not None):
        return TokenRun(token_ids=(), text=answer.message, finish_reason="error")
    return TokenRun(
        token_ids=tuple(t for c in choices for t in c.get("token_ids") or ()),
        odds=() if answer.events else _odds(choices[0]),
        finish_reason=next(
            (str(c["finish_reason"]) for c in reversed(choices) if c.get("finish_reason")), ""
        ),
        text="".join(_text(c) for c in choices),
    )


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    return str((part.get("content") if part else choice.get("text")) or "")


def _odds(choice: dict[str, Any]) -> tuple[dict[int, float], ...]:
    """For each token: the log probabilities of the best ones."""
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:  # chat
        steps = [
            {t["token"]: t["logprob"] for t in step.get("top_logprobs") or ()}
            for step in logprobs["content"] or ()
        ]
    else:
        steps = [dict(step or {}) for step in logprobs.get("top_logprobs") or ()]
    return tuple(
        {number: odds for token, odds in step.items() if (number := _id(token)) is not None}
        for step in steps
    )


def _id(token: str) -> int | None:
    """'token_id:17' -> 17."""
    tail = token.rpartition(":")[2]
    return int(tail) if tail.isdigit() else None
