"""The controls for which engines of a pair are started otherwise, and the cluster's own again.

They cost the fleet its service for minutes, so a climb makes them only when it is asked to.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from kvdeploy.errors import FleetError, KvdeployError
from kvdeploy.model.reports import Verdict
from kvdeploy.model.routing import WARMUP_FAILED
from kvdeploy.planning import controls, questions
from kvdeploy.polling import wait_for
from kvdeploy.stages.asking import Asker, ask_ready
from kvdeploy.stages.smoke import Smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvdeploy.adapters import http
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.reports import RungReport
    from kvdeploy.model.routing import Engine
    from kvdeploy.planning.controls import Fault
    from kvdeploy.stages.base import Step

CURE: Final = "'kvdeploy up' starts them as the cluster file says, and proves them."
DEADLINE_S: Final = 10.0
"""For each question to a pair that was broken on purpose."""
SLACK_S: Final = 30.0
"""What counters may take to settle, and the reference to be asked."""
OPINION_S: Final = 150.0
"""For the router to try the pair: one warm-up takes 60 s at most, and may be the second."""


class Screen(Protocol):
    """What the user sees."""

    def step(self, title: str) -> AbstractContextManager[Step]: ...

    def say(self, text: str) -> None: ...


class Starter(Protocol):
    """Starts a cluster's engines otherwise, and its own again. A run that is killed in between
    leaves a record by which the next `up` does the latter.
    """

    def spoil(self, engines: Sequence[LaunchSpec], step: Step) -> None:
        """Start these in the place of those of the same names, until they are ready.

        Raises KvdeployError.
        """

    def serve_pull(self) -> FleetOutputs:
        """The cluster's fleet with the pull connector, proven. Raises KvdeployError."""

    def restore(self) -> FleetOutputs:
        """The cluster's own fleet, proven. Raises KvdeployError."""


class Efa(Protocol):
    """The EFA devices of the nodes."""

    mocked: bool
    why_not: str
    """Why KV is not meant to go over them; '' when it is."""

    def look(self) -> dict[str, int]:
        """Bytes that those of each node have counted."""

    def judge(self, before: Mapping[str, int], pushed: Mapping[str, int]) -> RungReport:
        """The climb's own verdict on KV that was moved since, EFA being expected."""


class Site:
    """The fleet as it is at the moment, in the hands of whoever starts it otherwise."""

    def __init__(
        self, smoke: Smoke, restarting: Starter, screen: Screen, efa: Efa | None = None
    ) -> None:
        self.smoke, self.restarting, self.screen, self.efa = smoke, restarting, screen, efa
        self.fleet = smoke.asker.fleet

    @property
    def pair(self) -> tuple[Engine, Engine]:
        """The first: everything is shown on it."""
        return Asker(self.fleet).pairs[0]

    @property
    def pair_name(self) -> str:
        prefill, decode = self.pair
        return f"{prefill.name}/{decode.name}"

    @contextmanager
    def restored(self, what: str) -> Iterator[None]:
        """Whatever happens within, the cluster gets its own engines back.

        Raises:
            FleetError: it did not.
        """
        interrupted = False
        try:
            yield
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:
            self._bring_back(what, interrupted=interrupted)

    def _bring_back(self, what: str, *, interrupted: bool) -> None:
        if interrupted:
            self.screen.say(
                f"interrupted in {what!r}: the cluster's own engines are started again; Ctrl-C "
                "once more leaves that to 'kvdeploy up'"
            )
        try:
            self.fleet = self.restarting.restore()
        except KeyboardInterrupt:
            if interrupted:
                self.screen.say(f"engines are left as {what!r} had them: {CURE}")
            else:
                self._bring_back(what, interrupted=True)
            raise
        except KvdeployError as e:
            msg = f"after {what!r} the cluster did not get its own engines back: {e.message}"
            raise FleetError(msg, hint=CURE, log=e.log) from e


class RestartControls:
    """Break the pair in one way after another; each must make the climb's own judges go red."""

    def __init__(self, site: Site) -> None:
        self._site, self._smoke, self._ledger = site, site.smoke, site.smoke.ledger

    def run(self) -> None:
        """Raises FleetError: the cluster did not get its own engines back."""
        for fault in controls.FAULTS:
            self._break(fault, self._judge)
        self._efa()

    def _efa(self) -> None:
        efa, subject = self._site.efa, controls.FORCED_TCP
        why_not = "there is no EFA on this machine" if efa is None else efa.why_not
        if efa is None or (why_not and not efa.mocked):
            self._ledger.note(controls.RUNG, subject, Verdict.NOT_APPLICABLE, why_not)
        elif why_not:  # KV goes over TCP as it is
            with self._ledger.timed(), self._site.screen.step(f"control: {subject}") as step:
                self._judge_efa(efa, step)
        else:
            self._break(controls.EFA_FAULT, lambda _fault, step: self._judge_efa(efa, step))

    def _break(self, fault: Fault, judge: Callable[[Fault, Step], None]) -> None:
        pair = {engine.name for engine in self._site.pair}
        try:
            broken = fault.spoil(self._site.fleet.engines, pair)
        except ValueError as e:
            self._cannot(fault.subject, str(e))
            return
        title = f"control: {fault.subject}"
        with (
            self._site.restored(title),
            self._ledger.timed(),
            self._site.screen.step(title) as step,
        ):
            try:
                self._site.restarting.spoil(broken, step)
            except KvdeployError as e:
                self._cannot(fault.subject, e.message)
                return
            judge(fault, step)

    def _cannot(self, subject: str, why: str) -> None:
        message = f"nothing was shown: {why}"
        self._ledger.note(controls.RUNG, subject, Verdict.NOT_APPLICABLE, message)

    def _judge(self, fault: Fault, step: Step) -> None:
        """Ask the pair what every pair is asked, and bring the evidence to the same judges."""
        if (why := self._opinion(fault.subject, step)) is None:
            return
        smoke, began = self._smoke_of(step), time.monotonic()
        asked = smoke.ask_pair(*self._site.pair, timeout_s=DEADLINE_S)
        self._ledger.add(
            controls.judge_broken(
                fault.subject,
                asked,
                seconds=round(time.monotonic() - began, 2),
                limit_s=len(questions.KINDS) * DEADLINE_S + SLACK_S,
                why=why,
            )
        )

    def _judge_efa(self, efa: Efa, step: Step) -> None:
        """What the judge of EFA says of the pair's KV, EFA being expected."""
        if self._opinion(controls.FORCED_TCP, step) is None:
            return
        smoke = self._smoke_of(step)
        counted, before = efa.look(), smoke.asker.counters()
        smoke.ask_pair(*self._site.pair, timeout_s=DEADLINE_S)
        seen = efa.judge(counted, smoke.moved_since(before))
        self._ledger.add(controls.judge_efa_control(seen, mocked=efa.mocked))

    def _opinion(self, subject: str, step: Step) -> str | None:
        """Why the router will not use the pair, once it has tried; '' when it will. None, and a
        rung that says so, when it does not try: what is red then is so for another reason.
        """
        why = ""
        step.update("the router tries the pair")

        def look() -> bool | None:
            nonlocal why
            state, why = _standing(ask_ready(self._site.fleet), self._site.pair_name)
            return True if state == "ready" or why.startswith(WARMUP_FAILED) else None

        if wait_for(look, timeout_s=OPINION_S, interval_s=0.5) is None:
            self._cannot(subject, f"the router did not try the pair in {OPINION_S:.0f} s: {why}")
            return None
        return why

    def _smoke_of(self, step: Step) -> Smoke:
        """One that asks with new questions, and keeps its rungs to itself."""
        return Smoke(self._smoke.spec, self._smoke.model, self._site.fleet, None, step)


def _standing(answer: http.Answer, pair: str) -> tuple[str, str]:
    """What the router says of a pair: its state, and why it is not ready."""
    body = answer.body if isinstance(answer.body, dict) else {}
    pairs, reasons = body.get("pairs"), body.get("reasons")
    state = pairs.get(pair, "") if isinstance(pairs, dict) else ""
    return str(state), str(reasons.get(pair, "") if isinstance(reasons, dict) else "")
