"""Send the two legs of a request and wait for decode's first byte, within the deadlines.

Owns the order in which legs leave, every deadline before the first byte, and the account of
writes that were lost. Never cancels a prefill leg once decode has taken the request: it keeps its
blocks until the WRITE lands (vllm 0.32), even when its own leg is closed. Nor does it close
decode's leg before prefill has answered: the WRITE must know where to land.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kvdeploy.router import legs
from kvdeploy.router.errors import (
    ApiError,
    EngineBusyError,
    EngineFailureError,
    EngineRefusalError,
    deadline,
)
from kvdeploy.router.flight import DecodeLeg, Prefilled, Wires, start_prefill
from kvdeploy.router.lives import Lives

if TYPE_CHECKING:
    from kvdeploy.model.routing import Deadlines
    from kvdeploy.router.background import Background
    from kvdeploy.router.states import Route
    from kvdeploy.router.wire import Sink

_SETTLE_S = 2.0
"""How long D may take to refuse what P has refused."""
_TICK_S = 0.005
"""How far a timer of the event loop may be early."""
_REGISTER_S = 1.0
"""How long D's leg is held after P's answer for a client that has left: until then D registers."""


class Answer:
    """Decode's answer: its first bytes, and how to get the rest."""

    def __init__(
        self, leg: DecodeLeg, first: bytes, *, ends_at: float, inter_token_s: float
    ) -> None:
        self.first = first
        self.ends_at = ends_at
        """On the event loop's clock."""
        self._leg = leg
        self._inter_token_s = inter_token_s

    @property
    def content_type(self) -> str:
        return self._leg.content_type

    async def pour(self, sink: Sink) -> None:
        """The rest of a stream into `sink`, as it comes. Raises ApiError."""
        if not await self._leg.pour(sink, self._inter_token_s):
            message = f"{self._leg.to.name} sent nothing more for {self._inter_token_s} s"
            raise deadline(message, code="inter_token_deadline")

    def hold(self, *, held: bool) -> None:
        """Let decode wait, or go on."""
        self._leg.hold(held=held)

    def close(self) -> None:
        self._leg.close()

    def build_given_up_error(self) -> ApiError:
        name = self._leg.to.name
        message = f"{name} gave the request up before its end: was it told to stop?"
        return EngineFailureError(502, "decode_broke_off", message, engine=name)

    def build_total_error(self, total_s: float) -> ApiError:
        return _total(total_s, f"{self._leg.to.name} was still generating")


class Dispatcher:
    def __init__(self, wires: Wires, background: Background) -> None:
        self._wires = wires
        self._background = background

    @property
    def _deadlines(self) -> Deadlines:
        return self._wires.table.config.deadlines

    async def open(self, job: legs.Job, route: Route, *, started: float) -> Answer:
        """Decode's first byte, in the job's mode. `started`, on the event loop's clock, is
        when the request's total began. Raises ApiError.
        """
        if not job.needs_prefill:
            return await self.send_alone(job, route, started=started)
        if job.mode == "push":
            return await self.send_at_once(job, route, started=started)
        return await self.send_in_turn(job, route, started=started)

    async def send_at_once(self, job: legs.Job, route: Route, *, started: float) -> Answer:
        """Push: neither leg waits for the other."""
        sent = route.prefill.identities[route.prefill_rank]
        lives = Lives(route.prefill.life, route.decode.life)
        decode = DecodeLeg(self._wires, job, route.decode, route.decode_rank)
        prefill = self._start_prefill(job, route, sent)
        prefill.add_done_callback(partial(self._account, decode))
        decode.start(legs.build_push_params(job, sent))
        try:
            await self._wait_first(job, route, started, prefill, decode, lives=lives)
            return self._build_answer(job, started, decode)
        except BaseException:
            self._background.detach(prefill)
            if _refused(decode):
                prefill.cancel()  # D refused before it could register: P's work has no taker
            self._background.start(self._release(decode, prefill))
            raise

    async def send_alone(self, job: legs.Job, route: Route, *, started: float) -> Answer:
        """Decode computes the prompt as well."""
        decode = DecodeLeg(self._wires, job, route.decode, route.decode_rank)
        decode.start(None)
        try:
            await self._wait_decode(job, route, started, decode, Lives(None, route.decode.life))
            return self._build_answer(job, started, decode)
        except BaseException:
            decode.close()
            raise

    async def send_in_turn(self, job: legs.Job, route: Route, *, started: float) -> Answer:
        """Pull, and the warm-up in every mode: decode is told what prefill answered."""
        lives = Lives(route.prefill.life, route.decode.life)
        prefill = self._start_prefill(job, route, None)
        try:
            await asyncio.wait(
                {prefill, *lives.watched},
                timeout=self._prefill_limit(job, started),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._background.detach(prefill)
        if not prefill.done():
            raise lives.find_ended(route) or self._build_prefill_error(job, route, started)
        done = prefill.result()
        if done.error is not None:
            raise done.error
        decode = DecodeLeg(self._wires, job, route.decode, route.decode_rank)
        decode.start(legs.build_answered_params(job, done.params))
        try:
            await self._wait_decode(job, route, started, decode, lives)
            return self._build_answer(job, started, decode)
        except BaseException:
            decode.close()
            raise

    def _start_prefill(
        self, job: legs.Job, route: Route, sent: legs.Coordinates | None
    ) -> asyncio.Task[Prefilled]:
        to, at = route.prefill, route.prefill_rank
        return start_prefill(self._wires, self._background, job, to, at, sent=sent)

    async def _wait_first(
        self,
        job: legs.Job,
        route: Route,
        started: float,
        prefill: asyncio.Task[Prefilled],
        decode: DecodeLeg,
        *,
        lives: Lives,
    ) -> None:
        """Until decode answers, prefill fails, one is found dead or a deadline breaks. Raises
        ApiError.
        """
        await asyncio.wait(
            {prefill, decode.task, *lives.watched},
            timeout=self._prefill_limit(job, started),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if decode.task.done():
            return
        if not prefill.done():
            raise lives.find_ended(route) or self._build_prefill_error(job, route, started)
        error = prefill.result().error
        if error is not None:
            raise error
        await self._wait_decode(job, route, started, decode, lives)

    async def _wait_decode(
        self, job: legs.Job, route: Route, started: float, decode: DecodeLeg, lives: Lives
    ) -> None:
        """The prompt is done: decode's own time runs from here. Raises ApiError."""
        left_s = max(0.0, started + job.total_s - _now())
        first_s = self._deadlines.first_token_s
        lives = await lives.wait(decode, min(left_s, first_s) if job.stream else left_s)
        if decode.task.done():
            return
        ended = lives.find_ended(route)
        owes = job.stream or job.body.get("max_tokens") == 1
        if not decode.settled and (owes or (ended and ended.engine == route.prefill.name)):
            # It owed a token and gave none. A longer answer may simply not have been finished.
            self._count_lost(decode)
        if ended:
            raise ended
        if job.stream and first_s <= left_s:
            message = f"{route.decode.name} sent no token within {first_s} s of the prompt's end"
            raise deadline(message, code="first_token_deadline")
        raise _total(job.total_s, f"{route.decode.name} had not answered")

    def _build_answer(self, job: legs.Job, started: float, decode: DecodeLeg) -> Answer:
        """Raises what decode's leg ended with."""
        first = decode.task.result()
        return Answer(
            decode,
            first,
            ends_at=started + job.total_s,
            inter_token_s=self._deadlines.inter_token_s,
        )

    def _prefill_limit(self, job: legs.Job, started: float) -> float:
        return min(self._deadlines.prefill_s, max(0.0, started + job.total_s - _now()))

    def _build_prefill_error(
        self, job: legs.Job, route: Route, started: float
    ) -> EngineFailureError:
        limit_s, name = self._deadlines.prefill_s, route.prefill.name
        if _now() >= started + job.total_s - _TICK_S:
            return _total(job.total_s, f"{name} was still working on the prompt")
        message = f"{name} did not finish the prompt within {limit_s} s"
        return deadline(message, code="prefill_deadline", engine=name)

    def _account(self, decode: DecodeLeg, prefill: asyncio.Task[Prefilled]) -> None:
        """P's leg has ended, whoever still waits: count the WRITE that a waiting D will not get."""
        if _refused(decode):
            return
        if prefill.cancelled() or prefill.exception() is not None:
            self._count_lost(decode)
            return
        error = prefill.result().error
        if error is None or decode.settled:
            return
        if isinstance(error, EngineRefusalError):
            decode.left_to_settle = True
            self._background.start(self._settle(decode))
        else:
            self._count_lost(decode)

    async def _release(self, decode: DecodeLeg, prefill: asyncio.Task[Prefilled]) -> None:
        """Close D's leg when nobody waits for it any more, but not before P can have found it.

        A D that aborts before it has registered leaves P holding its blocks until the lease ends.
        """
        await asyncio.wait({prefill, decode.task}, return_when=asyncio.FIRST_COMPLETED)
        written = prefill.done() and not prefill.cancelled() and prefill.result().error is None
        if written and not decode.task.done():
            await asyncio.wait({decode.task}, timeout=_REGISTER_S)
        if not decode.left_to_settle:
            decode.close()

    async def _settle(self, decode: DecodeLeg) -> None:
        await asyncio.wait({decode.task}, timeout=_SETTLE_S)
        if not decode.settled:
            self._count_lost(decode)
        decode.close()

    def _count_lost(self, decode: DecodeLeg) -> None:
        self._wires.metrics.lost_writes.labels(decode.to.name).inc()
        self._wires.table.lose(decode.to, decode.job.prompt_tokens)


def _refused(decode: DecodeLeg) -> bool:
    """Whether D would not have the request at all, so that it has registered nothing."""
    task = decode.task
    if not task.done() or task.cancelled():
        return False
    return isinstance(task.exception(), EngineRefusalError | EngineBusyError)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _total(total_s: float, state: str) -> EngineFailureError:
    return deadline(
        f"the request did not finish within {total_s} s: {state}", code="total_deadline"
    )
