"""The rungs of one climb, as they come in: evidence goes to its judge, the verdict is kept."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvdeploy.model.geometry import KvGeometry
from kvdeploy.model.reports import PUSHED, RungReport, Verdict
from kvdeploy.planning import sizing, verdicts
from kvdeploy.stages.asking import read_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvdeploy.adapters import http
    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.model.outputs import ModelOutputs
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.verdicts import TokenRun


def _geometry(model: ModelOutputs, dtype: str) -> KvGeometry:
    """The model's KV geometry; one that foretells nothing where config.json says too little."""
    try:
        return sizing.parse_geometry(model.config, dtype=dtype)
    except ValueError as e:
        return KvGeometry(
            layers=1, kv_heads=1, head_dim=1, dtype_bytes=1, uniform=False, reason=str(e)
        )


class Ledger:
    def __init__(self, spec: ClusterSpec, model: ModelOutputs) -> None:
        self.spec = spec
        self.geometry = _geometry(model, model.dtype)
        self.near_tie = verdicts.near_tie(model.dtype)
        self.rungs: list[RungReport] = []

    @property
    def bytes_per_block(self) -> int:
        return sizing.bytes_per_block(
            self.geometry,
            self.spec.connector.block_size,
            tensor_parallel=self.spec.fleet.decode.tensor_parallel,
        )

    def bytes_of(self, prompt_tokens: int, cached_tokens: int) -> int:
        """What prefill must push for a prompt of which decode holds a part."""
        return sizing.pushed_bytes(
            self.geometry,
            prompt_tokens,
            self.spec.connector.block_size,
            cached_tokens,
            tensor_parallel=self.spec.fleet.decode.tensor_parallel,
        )

    def add(self, rung: RungReport) -> None:
        self.rungs.append(rung)

    def note(self, rung: str, subject: str, verdict: Verdict, message: str) -> None:
        self.add(RungReport(rung=rung, subject=subject, verdict=verdict, message=message))

    def take(self, rungs: Iterable[RungReport]) -> None:
        """Add rungs as they are climbed, each with the time that it took."""
        started = time.monotonic()
        for rung in rungs:
            now = time.monotonic()
            self.add(rung.model_copy(update={"seconds": round(now - started, 2)}))
            started = now

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Write the time that was spent on each rung that is added within."""
        started, known = time.monotonic(), len(self.rungs)
        yield
        spent = round(time.monotonic() - started, 2)
        self.rungs[known:] = [
            r.model_copy(update={"seconds": r.seconds or spent}) for r in self.rungs[known:]
        ]

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Make one rung of many of a kind: the failed ones stay as they are, else one counts."""
        known = len(self.rungs)
        yield
        new = self.rungs[known:]
        failed = [r for r in new if r.verdict is Verdict.FAILED]
        if new and not failed:
            message = f"{len(new)} at once: {new[0].message}"
            evidence: dict[str, object] = {"answers": [r.message for r in new]}
            failed = [new[0].model_copy(update={"message": message, "evidence": evidence})]
        self.rungs[known:] = failed

    def judge_tokens(
        self, rung: str, subject: str, reference: TokenRun, answer: http.Answer
    ) -> None:
        if answer.status != 200:
            message = f"the router answered {answer.status or 'nothing'}: {answer.message}"
            self.note(rung, subject, Verdict.FAILED, message)
        elif self.spec.model.load_format == "dummy":
            message = "dummy weights: every token is as likely as any, so equal ones prove nothing"
            self.note(rung, subject, Verdict.NOT_APPLICABLE, message)
        elif answer.events and not answer.done:
            self.note(rung, subject, Verdict.FAILED, "the stream ended without [DONE]")
        else:
            got = read_run(answer)
            self.add(
                verdicts.judge_tokens(
                    rung, subject, reference=reference, got=got, near_tie=self.near_tie
                )
            )

    def judge_moved(self, subject: str, writer: EngineCounters, expected: int) -> None:
        """That bytes moved at all, and that they are as many as the geometry says."""
        if not expected:
            message = "no question fits model.max_length, so none was asked"
            self.note(PUSHED, subject, Verdict.NOT_APPLICABLE, message)
            return
        if writer.pushed_bytes > 0:
            message = f"{writer.pushed_bytes:,} bytes moved"
            self.note(PUSHED, subject, Verdict.PASSED, message)
        else:
            message = "no KV bytes moved: decode did without prefill"
            self.note(PUSHED, subject, Verdict.FAILED, message)
        if not self.geometry.uniform:
            message = f"the size cannot be foretold: {self.geometry.reason}"
            self.note("bytes", subject, Verdict.NOT_APPLICABLE, message)
            return
        self.add(
            verdicts.judge_bytes(
                subject, expected=expected, pushed=writer, block_bytes=self.bytes_per_block
            )
        )

    def judge_local(self, subject: str, decode: EngineCounters) -> None:
        """That decode computed no prompt token itself."""
        if "prompt_tokens_by_source" not in decode.present:
            message = "this vLLM does not say where the KV of its prompts came from"
            self.note("local-compute", subject, Verdict.NOT_APPLICABLE, message)
            return
        self.add(verdicts.judge_local_compute(subject, local_tokens=decode.local_tokens, allowed=0))
