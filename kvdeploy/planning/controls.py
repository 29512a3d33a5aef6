"""Negative controls: how a pair is broken on purpose, and whether smoke saw it. Pure.

A control passes when the judges of a good climb say FAILED. One that they let pass says that no
green above it means anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.catalog import CONNECTORS
from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvdeploy.model.launch import LaunchSpec, Role

RUNG: Final = "control"
PULL_DECODE: Final = "decode in pull mode"
OTHER_BLOCKS: Final = "other block size"
FORCED_TCP: Final = "TCP in place of EFA"
TRANSFER: Final = "--kv-transfer-config"
BLOCK_SIZE: Final = "--block-size"
MARK: Final = "KVDEPLOY_CONTROL"
"""A variable that means nothing to an engine, and makes it another one."""
TCP: Final = {"UCX_TLS": "tcp,cuda_copy,self"}
"""Blocks go over the plain network interface; cuda_copy brings them to and from the GPU."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to start engines of a pair so that smoke must go red."""

    subject: str
    roles: tuple[Role, ...]
    """Which of the pair's engines are changed."""
    change: Callable[[LaunchSpec], LaunchSpec]

    def spoil(self, engines: Sequence[LaunchSpec], pair: Collection[str]) -> tuple[LaunchSpec, ...]:
        """What is to be started of a fleet's `engines` to break the `pair`, by their names.

        Every prefill is started anew, with it and after it: KV that it keeps for a broken peer
        would run out of its lease, and be counted, while something else is judged.

        Raises:
            ValueError: an engine is not started so that this fault could be made of it.
        """
        return tuple(
            self.change(e) if e.role in self.roles and e.name in pair else self._anew(e)
            for e in engines
            if e.role == "prefill" or e.name in pair
        )

    def _anew(self, engine: LaunchSpec) -> LaunchSpec:
        return engine.model_copy(update={"env": {**engine.env, MARK: self.subject}})


def pull(engine: LaunchSpec) -> LaunchSpec:
    """The same engine, which waits to fetch blocks that its peer means to send."""
    return _configured(engine, lambda config: config | {"kv_connector": CONNECTORS["pull"]})


def double_blocks(engine: LaunchSpec) -> LaunchSpec:
    """The same engine with KV blocks of twice as many tokens: every backend takes them."""
    size = int(_word(engine, BLOCK_SIZE))
    return _with_word(engine, BLOCK_SIZE, str(2 * size))


def force_tcp(engine: LaunchSpec) -> LaunchSpec:
    """The same engine, whose blocks cannot go over EFA."""

    def over_ucx(config: dict[str, Any]) -> dict[str, Any]:
        extra = config.get("kv_connector_extra_config", {})
        return config | {"kv_connector_extra_config": extra | {"backends": ["UCX"]}}

    changed = _configured(engine, over_ucx)
    return changed.model_copy(update={"env": {**changed.env, **TCP}})


FAULTS: Final = (
    Fault(subject=PULL_DECODE, roles=("decode",), change=pull),
    Fault(subject=OTHER_BLOCKS, roles=("decode",), change=double_blocks),
)
"""What any fleet can be broken with."""
EFA_FAULT: Final = Fault(subject=FORCED_TCP, roles=("prefill", "decode"), change=force_tcp)
"""Both ends: engines without a transport in common would not meet at all."""


def judge_broken(
    subject: str, rungs: Sequence[RungReport], *, seconds: float, limit_s: float, why: str = ""
) -> RungReport:
    """Judge what the judges of a good climb said of a pair that was broken on purpose.

    Args:
        subject: how it was broken.
        rungs: their verdicts.
        seconds: what the pair's questions took in all.
        limit_s: what their deadlines allow.
        why: what the router says of the pair, when it will not use it.
    """
    red = [r for r in rungs if r.verdict is Verdict.FAILED]
    judged = [r.model_dump(mode="json", exclude={"evidence"}) for r in rungs]
    evidence: dict[str, object] = {"router": why, "rungs": judged}
    if not red:
        verdict = Verdict.FAILED
        message = (
            f"every rung was green with {subject}: smoke cannot be trusted to see it, and no green "
            "above means anything"
        )
    elif seconds > limit_s:
        verdict = Verdict.FAILED
        message = (
            f"red, but only after {seconds:.1f} s, {limit_s:.0f} s allowed: clients would hang"
        )
    else:
        verdict = Verdict.PASSED
        told = f"the router refuses the pair: {why}" if why else red[0].message
        message = f"{', '.join(sorted({r.rung for r in red}))} went red, as they must; {told}"
    return RungReport(
        rung=RUNG,
        subject=subject,
        verdict=verdict,
        message=message,
        evidence=evidence,
        seconds=seconds,
    )


def judge_efa_control(seen: RungReport, *, mocked: bool) -> RungReport:
    """Judge what the judge of EFA said of KV that went over TCP, where EFA was expected.

    In a rehearsal KV goes over TCP anyway, beside devices that are mocked: that its judge goes red
    there shows the judge and no hardware.
    """
    evidence: dict[str, object] = {"efa": seen.message, **seen.evidence}
    if not seen.evidence.get("pushed_bytes"):
        # Red for another reason: nothing went anywhere.
        verdict, message = Verdict.FAILED, "no KV was moved over TCP, so nothing was shown"
    elif seen.verdict is not Verdict.FAILED:
        verdict = Verdict.FAILED
        message = f"the efa rung was green with {FORCED_TCP}: {seen.message}"
    elif mocked:
        verdict = Verdict.MOCKED
        message = f"the efa rung would go red: {seen.message}; devices are mocked here"
    else:
        verdict, message = Verdict.PASSED, f"efa went red, as it must: {seen.message}"
    return RungReport(
        rung=RUNG, subject=FORCED_TCP, verdict=verdict, message=message, evidence=evidence
    )


def _configured(
    engine: LaunchSpec, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> LaunchSpec:
    changed = change(json.loads(_word(engine, TRANSFER)))
    return _with_word(engine, TRANSFER, json.dumps(changed, separators=(",", ":")))


def _word(engine: LaunchSpec, flag: str) -> str:
    """What follows a flag. Raises ValueError: the engine has none."""
    if flag not in engine.argv:
        msg = f"{engine.name} is not started with {flag}"
        raise ValueError(msg)
    return engine.argv[engine.argv.index(flag) + 1]


def _with_word(engine: LaunchSpec, flag: str, word: str) -> LaunchSpec:
    at = engine.argv.index(flag) + 1
    return engine.model_copy(update={"argv": (*engine.argv[:at], word, *engine.argv[at + 1 :])})
