"""Climb the smoke ladder of a running fleet and bring the evidence to its judges.

Every rung names its evidence. The control at the end must fail while prefill is frozen: if it
does not, no green above it means anything.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvdeploy.errors import KvdeployError
from kvdeploy.model.reports import SmokeReport, Verdict
from kvdeploy.planning import questions, verdicts
from kvdeploy.planning.launch import NO_PREFIX_CACHING
from kvdeploy.stages.asking import Asker
from kvdeploy.stages.controls import StoppedPrefill
from kvdeploy.stages.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.model.outputs import FleetOutputs, ModelOutputs
    from kvdeploy.model.reports import RungReport
    from kvdeploy.model.routing import Engine
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.questions import Question
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.controls import Freezer
    from kvdeploy.stages.ground import Ground

AT_ONCE: Final = 8
LONG_BLOCKS: Final = 4.5
"""The long prompt has more than 4 KV blocks, and its last one is not full."""


class Smoke:
    """One climb. `spec` is the cluster file that the fleet was brought up with."""

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelOutputs,
        fleet: FleetOutputs,
        freezer: Freezer | None,
        step: Step,
        *,
        ground: Ground | None = None,
    ) -> None:
        self.spec, self.freezer, self.step, self.ground = spec, freezer, step, ground
        self.model = model
        self.asker = Asker(fleet)
        self.ledger = Ledger(spec, model)
        self.nonce = f"n{time.time_ns() // 1000 % 10**9:x}"
        self.started = time.monotonic()
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")

    def climb(self) -> SmokeReport:
        """Every rung that this target can show."""
        self.step.update("waiting for a quiet fleet")
        self.asker.wait_quiet()
        words_long = self._words_long()
        if self.ground is not None:
            self.ledger.take(self.ground.rungs(self.step, self.nonce))
        before = self.asker.counters()
        for prefill, decode in self.asker.pairs:
            # What differs comes first: a block in common would be in decode's cache already.
            nonce = f"{len(self.ledger.rungs)}{self.nonce}"
            asked = questions.pair_questions(nonce, words_long=words_long)
            self._pair(prefill, decode, asked)
        self._at_once(questions.concurrent_questions(self.nonce, AT_ONCE, words_long=words_long))
        self._carried(before)
        StoppedPrefill(self).run(before)
        return self.report()

    def prove(self) -> SmokeReport:
        """One push over every pair: what `up` ends with."""
        words_long = min(self._words_long(), 3 * self._words_that_fit())
        for i, (prefill, decode) in enumerate(self.asker.pairs):
            asked = (questions.proof_question(f"{self.nonce}{i}", words_long=words_long),)
            self._pair(prefill, decode, asked)
        return self.report()

    def ask_pair(
        self, prefill: Engine, decode: Engine, *, timeout_s: float
    ) -> tuple[RungReport, ...]:
        """What one pair is asked in a climb, each question with a deadline: for a pair that may be
        broken. An engine that does not even tell its counters is red.
        """
        try:
            asked = questions.pair_questions(self.nonce, words_long=self._words_long())
            self._pair(prefill, decode, asked, timeout_s=timeout_s)
        except KvdeployError as e:
            self.ledger.note("asked", _name(prefill, decode), Verdict.FAILED, e.message)
        return tuple(self.ledger.rungs)

    def moved_since(self, before: Mapping[str, EngineCounters]) -> dict[str, int]:
        """Bytes of KV by the engines that write."""
        after = self.asker.counters()
        return {w: (after[w] - before[w]).pushed_bytes for w in self._writers()}

    def report(self) -> SmokeReport:
        return SmokeReport(
            cluster=self.spec.name,
            target=self.spec.kind,
            started_at=self.started_at,
            seconds=round(time.monotonic() - self.started, 2),
            pairs=tuple(_name(p, d) for p, d in self.asker.pairs),
            rungs=tuple(self.ledger.rungs),
        )

    # --- one pair --------------------------------------------------------------------------

    def _pair(
        self,
        prefill: Engine,
        decode: Engine,
        asked: Sequence[Question],
        *,
        timeout_s: float | None = None,
    ) -> None:
        pair = _name(prefill, decode)
        before, expected = self.asker.counters(), 0
        for question in self.fitting(pair, asked):
            self.step.update(f"{pair}: {question.rung}")
            with self.ledger.timed():
                reference = self.asker.reference(question)
                answer = self.asker.ask(question, pair, timeout_s)
                self.ledger.judge_tokens(question.rung, pair, reference, answer)
            expected += self._expected_bytes(question)
        self.step.update(f"{pair}: counters")
        with self.ledger.timed():
            writer = self._writer(prefill, decode)
            after = self.asker.settled(
                lambda seen: (seen[writer] - before[writer]).pushed_bytes >= expected
            )
            delta = {name: after[name] - before[name] for name in after}
            self.ledger.judge_moved(pair, delta[writer], expected)
            both = delta[prefill.name] + delta[decode.name]
            self.ledger.add(verdicts.judge_failures(pair, both))
            self.ledger.judge_local(pair, delta[decode.name])

    # --- the fleet ------------------------------------------------------------------------

    def _at_once(self, asked: Sequence[Question]) -> None:
        self.step.update(f"router: {len(asked)} requests at once")
        fitting = list(self.fitting("router", asked))
        if not fitting:
            return
        with self.ledger.timed():
            references = [self.asker.reference(q) for q in fitting]
            before = self.asker.counters()
            answers = self.asker.ask_at_once(fitting)
            with self.ledger.merged():
                for question, reference, answer in zip(fitting, references, answers, strict=True):
                    self.ledger.judge_tokens(question.rung, "router", reference, answer)
            expected = sum(self._expected_bytes(q) for q in fitting)
            writers = self._writers()

            def moved(seen: dict[str, EngineCounters]) -> int:
                return sum((seen[w] - before[w]).pushed_bytes for w in writers)

            after = self.asker.settled(lambda seen: moved(seen) >= expected)
            total = _sum([after[w] - before[w] for w in writers])
            self.ledger.judge_moved("router", total, expected)
            self.ledger.add(
                verdicts.judge_failures("router", _sum([after[n] - before[n] for n in after]))
            )

    def _carried(self, before: Mapping[str, EngineCounters]) -> None:
        if self.ground is None:
            return
        self.step.update("nodes: what their devices moved")
        self.ledger.take(self.ground.carried(self.moved_since(before)))

    # --- small things ----------------------------------------------------------------------

    def fitting(self, subject: str, asked: Sequence[Question]) -> Iterator[Question]:
        """The questions that the model's length has room for; the others are said."""
        room = self.spec.model.max_length - questions.ANSWER_TOKENS
        for question in asked:
            if reason := self.asker.why_not(question):
                message = f"the model cannot be asked this: {reason}"
                self.ledger.note(question.rung, subject, Verdict.NOT_APPLICABLE, message)
                continue
            count = max(len(self.asker.tokens_of(q)) for q in (question, *_earlier(question)))
            if count <= room:
                yield question
                continue
            message = f"needs {count} tokens, and model.max_length leaves room for {room}"
            self.ledger.note(question.rung, subject, Verdict.NOT_APPLICABLE, message)

    def _words_long(self) -> int:
        return math.ceil(LONG_BLOCKS * self.spec.connector.block_size / self._tokens_a_word())

    def _words_that_fit(self) -> int:
        """Words of a prompt that model.max_length surely has room for, beside its nonce."""
        room = self.spec.model.max_length - questions.ANSWER_TOKENS
        return max(1, int(room / self._tokens_a_word()) - 4)

    def _tokens_a_word(self) -> float:
        sample = questions.Question(rung="", salt="", text=questions.words(self.nonce, 64))
        return len(self.asker.tokens_of(sample)) / 65

    def _expected_bytes(self, question: Question) -> int:
        tokens = self.asker.tokens_of(question)
        shared = 0
        for earlier in _earlier(question):
            pairs = zip(tokens, self.asker.tokens_of(earlier), strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        if self._caches_nothing():
            shared = 0
        return self.ledger.bytes_of(len(tokens), shared)

    def _caches_nothing(self) -> bool:
        """Whether decode was started without its prefix cache."""
        flag = f"--{NO_PREFIX_CACHING}"
        return any(flag in e.argv for e in self.asker.fleet.engines if e.role == "decode")

    def _writer(self, prefill: Engine, decode: Engine) -> str:
        """Who counts the bytes: the one that moves them."""
        return prefill.name if self.spec.connector.mode == "push" else decode.name

    def _writers(self) -> list[str]:
        return sorted({self._writer(p, d) for p, d in self.asker.pairs})


def _earlier(question: Question) -> tuple[Question, ...]:
    """The question whose blocks decode must hold when `question` is asked; none for most."""
    if not question.follows:
        return ()
    return (
        questions.Question(rung="", salt="", text=question.follows, endpoint=question.endpoint),
    )


def _name(prefill: Engine, decode: Engine) -> str:
    return f"{prefill.name}/{decode.name}"


def _sum(counters: Sequence[EngineCounters]) -> EngineCounters:
    first, *others = counters
    for other in others:
        first = first + other
    return first
