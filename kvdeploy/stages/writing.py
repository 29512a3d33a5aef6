"""Rung `write`: two programs in the engines' own runtime, one of which writes into the other's
memory with NIXL. What they have to tell each other is carried between them here.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvdeploy import probes
from kvdeploy.planning import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import Device
    from kvdeploy.model.reports import RungReport

TOLD_AFTER_S: Final = 5.0
"""Seconds that a target is given to tell, once its writer could not write."""


class Talker(Protocol):
    """A program that runs: adapters/dialogue.py."""

    def say(self, document: Mapping[str, object]) -> None: ...

    def hear(self, timeout_s: float) -> dict[str, Any]: ...


def program() -> str:
    return (resources.files(probes) / "nixl_write.py").read_text(encoding="utf-8")


def write(
    prefill: LaunchSpec,
    decode: LaunchSpec,
    begin: Callable[[LaunchSpec], AbstractContextManager[Talker]],
    *,
    device: Device,
    nonce: str,
    mocked: bool,
) -> Iterator[RungReport]:
    """Every shape from one engine's place to another's; the first that fails is the last.

    Args:
        prefill: in whose place it is written.
        decode: into whose place.
        begin: starts the program where an engine is, as that engine was started.
        device: what engines compute on.
        nonce: of this pair alone.
        mocked: whether the fabric that it was meant for is not there.
    """
    shapes, subject = writing.shapes_for(device), f"{prefill.name}/{decode.name}"
    with begin(decode) as target, begin(prefill) as writer:
        for talker, engine, role in ((target, decode, "target"), (writer, prefill, "writer")):
            order = writing.build_order(engine, role, nonce=nonce, shapes=shapes, device=device)
            talker.say(order)
        ready = target.hear(writing.DEADLINE_S)
        if "error" not in ready:
            writer.say(ready)
        known = {k: ready[k] for k in ("memory", "why_not_vram") if k in ready}
        for shape in shapes:
            if "error" in ready:
                wrote, found = {}, ready
            else:
                wrote = writer.hear(writing.DEADLINE_S)
                wait_s = TOLD_AFTER_S if "error" in wrote else writing.DEADLINE_S
                found = known | target.hear(wait_s)
            rung = writing.judge_write(
                subject,
                shape,
                wrote=wrote,
                found=found,
                way=writing.way_of(prefill),
                mocked=mocked,
            )
            yield rung
            if rung.verdict is rung.verdict.FAILED:
                return
