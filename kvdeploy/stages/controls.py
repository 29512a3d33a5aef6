"""The control that every climb makes: prefill is stopped for a moment, and smoke must go red."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from kvdeploy.model.reports import Verdict
from kvdeploy.planning import questions, verdicts
from kvdeploy.planning.controls import RUNG
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.stages.smoke import Smoke

SUBJECT: Final = "prefill stopped"
DEADLINE_S: Final = 4.0
TOLERANCE_S: Final = 2.0
RECOVERY_S: Final = 60.0


class Freezer(Protocol):
    """Stops a process for a moment, as it is, and lets it go on."""

    def pause(self, name: str) -> None: ...

    def resume(self, name: str) -> None: ...


class StoppedPrefill:
    """Freeze every prefill: a request must fail, in words and in time. Then thaw them."""

    def __init__(self, smoke: Smoke) -> None:
        self._smoke, self._asker, self._ledger = smoke, smoke.asker, smoke.ledger

    def run(self, before: Mapping[str, EngineCounters]) -> None:
        """`before`: counters of the idle fleet, which must be as idle afterwards."""
        freezer = self._smoke.freezer
        if freezer is None:
            message = "this target's prefill cannot be stopped from here"
            self._ledger.note(RUNG, SUBJECT, Verdict.NOT_APPLICABLE, message)
            return
        question = questions.control_question(self._smoke.nonce)
        self._smoke.step.update("control: prefill is stopped, a request must fail")
        with self._ledger.timed():
            with self._frozen(freezer):
                answer = self._asker.ask(question, timeout_s=DEADLINE_S)
            self._ledger.add(
                verdicts.judge_control(
                    SUBJECT,
                    status=answer.status or None,
                    error_message=answer.message if answer.is_openai_error else None,
                    seconds=answer.seconds,
                    deadline_s=DEADLINE_S,
                    tolerance=TOLERANCE_S,
                )
            )
        self._recovery(before)

    @contextmanager
    def _frozen(self, freezer: Freezer) -> Iterator[None]:
        names = [p.name for p in self._asker.prefills]
        try:
            for name in names:
                freezer.pause(name)
            yield
        finally:
            for name in names:
                freezer.resume(name)

    def _recovery(self, before: Mapping[str, EngineCounters]) -> None:
        """The control must leave nothing behind: right answers, and every block given back."""
        self._smoke.step.update("recovery: prefill runs again")
        with self._ledger.timed():
            wait_for(
                lambda: True if self._asker.is_ready() else None,
                timeout_s=RECOVERY_S,
                interval_s=0.3,
            )
            asked = (questions.recovery_question(self._smoke.nonce),)
            for question in self._smoke.fitting("router", asked):
                reference = self._asker.reference(question)
                self._ledger.judge_tokens(
                    question.rung, "router", reference, self._asker.ask(question)
                )
            names = [d.name for d in self._asker.decodes]
            after = self._asker.settled(
                lambda seen: all(seen[n].kv_cache_usage <= before[n].kv_cache_usage for n in names)
            )
            for name in names:
                self._ledger.add(
                    verdicts.judge_leak(
                        name,
                        usage_before=before[name].kv_cache_usage,
                        usage_after=after[name].kv_cache_usage,
                    )
                )
