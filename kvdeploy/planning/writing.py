"""Rung `write` of the smoke ladder: what is written from node to node, and what that shows. Pure.

The two ends are probes/nixl_write.py; their answers are what is judged here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvdeploy.model import layout
from kvdeploy.model.reports import RungReport, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.outputs import Device

T = TypeVar("T")

PIECE_BYTES: Final = 4096
LARGE_BYTES: Final[dict[str, int]] = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Less where engines share their cores and memory with what checks every byte."""
LARGE_ENOUGH_BYTES: Final = 2**20
"""From here on a WRITE says something of speed."""
DEADLINE_S: Final = 60.0
"""For the two ends of a pair, from their start to their last word."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one WRITE moves."""

    name: str
    count: int
    """Descriptors, scattered in the memory that they are written to."""
    bytes: int
    """Of each."""

    @property
    def total(self) -> int:
        return self.count * self.bytes


def shapes_for(device: Device) -> tuple[Shape, ...]:
    return (
        Shape(name="small", count=1, bytes=PIECE_BYTES),
        Shape(name="many", count=4096, bytes=PIECE_BYTES),
        Shape(name="large", count=1, bytes=LARGE_BYTES[device]),
    )


def once_each(prefills: Sequence[T], decodes: Sequence[T]) -> tuple[tuple[T, T], ...]:
    """Pairs that have every prefill and every decode in them, and no more than that takes."""
    most = max(len(prefills), len(decodes))
    return tuple((prefills[i % len(prefills)], decodes[i % len(decodes)]) for i in range(most))


def backend_told(engine: LaunchSpec) -> str:
    """NIXL's backend as an engine was started with it; vLLM's own choice is UCX."""
    words = dict(zip(engine.argv, engine.argv[1:], strict=False))
    connector = json.loads(words.get("--kv-transfer-config", "{}"))
    backends = connector.get("kv_connector_extra_config", {}).get("backends") or ["UCX"]
    return str(backends[0])


def way_of(engine: LaunchSpec) -> str:
    """What KV goes over, in words: 'UCX (tcp)', 'LIBFABRIC (efa)'."""
    backend = backend_told(engine)
    transport = engine.env.get("UCX_TLS" if backend == "UCX" else "FI_PROVIDER", "")
    return f"{backend} ({transport})" if transport else backend


def build_order(
    engine: LaunchSpec, role: str, *, nonce: str, shapes: Sequence[Shape], device: Device
) -> dict[str, object]:
    """What one end is told first.

    Args:
        engine: in whose place it stands.
        role: 'writer' or 'target'.
        nonce: of this pair alone; what is written follows from it.
        shapes: in the order in which they are written.
        device: what engines compute on. Their KV lies in its memory, and so does what is written.
    """
    return {
        "role": role,
        "nonce": nonce,
        "backend": backend_told(engine),
        "memory": "VRAM" if device == "cuda" else "DRAM",
        "shapes": [{"name": s.name, "count": s.count, "bytes": s.bytes} for s in shapes],
        "cpus": list(engine.cpus),
        "deadline_s": DEADLINE_S,
    }


def judge_write(
    subject: str,
    shape: Shape,
    *,
    wrote: Mapping[str, Any],
    found: Mapping[str, Any],
    way: str,
    mocked: bool,
) -> RungReport:
    """That what was written came whole, and that nothing else was touched.

    Args:
        subject: 'prefill-0/decode-0'.
        shape: what was to be written.
        wrote: what the writer said of it.
        found: what the target, which looked at every byte, said of it.
        way: from way_of.
        mocked: whether the fabric that it was meant for is not there.
    """
    wrong = _what_is_wrong(subject, shape, wrote, found, way)
    evidence: dict[str, object] = {"wrote": dict(wrote), "found": dict(found), "way": way}
    if wrong:
        verdict, message = Verdict.FAILED, wrong
    else:
        seconds = float(wrote["seconds"])
        evidence["gb_per_s"] = round(shape.total / seconds / 1e9, 3)
        many = f"{shape.count:,} descriptors" if shape.count > 1 else "1 descriptor"
        kind = f"{wrote['memory']} to {found['memory']}"
        message = (
            f"{shape.total:,} bytes in {many} came as sent, {kind} over {way}, "
            f"in {seconds * 1000:.1f} ms"
        )
        if shape.total >= LARGE_ENOUGH_BYTES:
            message += f" ({evidence['gb_per_s']} GB/s)"
        if why := wrote["why_not_vram"] or found["why_not_vram"]:
            message += f"; not from GPU memory: {why}"
        verdict = Verdict.MOCKED if mocked else Verdict.PASSED
        if mocked:
            message += "; EFA is mocked: this shows nothing of hardware"
    return RungReport(
        rung=f"write/{shape.name}",
        subject=subject,
        verdict=verdict,
        message=message,
        evidence=evidence,
    )


def _what_is_wrong(
    subject: str, shape: Shape, wrote: Mapping[str, Any], found: Mapping[str, Any], way: str
) -> str:
    """'' when nothing is."""
    writer, _, target = subject.partition("/")
    both = ((writer, wrote), (target, found))
    for name, said in both:
        if "error" in said:
            return f"{name}: {said['error']}"
    for name, said in both:
        if said.get("shape") != shape.name:
            return f"{name} told of {said.get('shape')!r}, not of {shape.name!r}"
    pieces = shape.total // PIECE_BYTES
    if found["wrong"]:
        return (
            f"{found['wrong']:,} of {pieces:,} pieces of {PIECE_BYTES} bytes are not as sent, "
            f"the first from byte {found['first']:,} on"
        )
    if found["touched"]:
        return (
            f"memory beside what was written was changed: {found['touched']:,} pieces of "
            f"{PIECE_BYTES} bytes, the first from byte {found['first']:,} on"
        )
    if (wrote["bytes"], found["pieces"]) != (shape.total, pieces):
        return (
            f"{wrote['bytes']:,} bytes were written and {found['pieces']:,} pieces of "
            f"{PIECE_BYTES} looked at, of {shape.total:,} bytes"
        )
    if wrote["backend"] != (backend := way.partition(" ")[0]):
        return f"NIXL wrote over {wrote['backend']}, not over {backend}"
    return ""


def unit_argv(engine: LaunchSpec, program: str) -> tuple[str, ...]:
    """The command that runs a program on an engine's node as systemd runs the engine: its user, its
    environment, its limits. It ends in time although nobody is there to end it.
    """
    properties = {
        "User": layout.USER,
        "EnvironmentFile": f"{layout.ETC}/engines/{engine.name}.env",
        "LimitMEMLOCK": "infinity",
        "RuntimeMaxSec": f"{DEADLINE_S + 30:.0f}",
    }
    told = (f"--property={name}={value}" for name, value in properties.items())
    unit = ("systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--service-type=exec")
    return ("sudo", "-n", *unit, *told, engine.argv[0], "-c", program)
