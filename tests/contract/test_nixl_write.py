"""Rung `write`: two real ends that speak to each other. NIXL alone is stood in for, so that it can
be broken; real NIXL is written with by tests/e2e and by a rehearsal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.reports import Verdict
from kvdeploy.planning import writing
from kvdeploy.stages.writing import program, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.reports import RungReport

pytestmark = pytest.mark.real_process

STANDIN = Path(__file__).parents[1] / "data/nixl"
PAIR = "prefill-0/decode-0"


def engine(name: str) -> LaunchSpec:
    return LaunchSpec(
        name=name,
        role="prefill" if name.startswith("prefill") else "decode",
        argv=(sys.executable,),
        ready=Readiness(url="x", timeout_s=1),
    )


class Place:
    """Starts the program in an engine's place; `faults` break NIXL, `lies` change the order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: dict[str, str] = {}
        self.lies: dict[str, dict[str, object]] = {}
        self.running: dict[str, Dialogue] = {}

    def begin(self, there: LaunchSpec) -> Dialogue:
        env = {"PYTHONPATH": str(STANDIN), "FAULT": self.faults.get(there.name, "")}
        argv = (there.argv[0], "-c", program())
        found = Told(argv, env=env, log=self.folder / "log")
        found.lie = self.lies.get(there.name, {})
        self.running[there.name] = found
        return found

    def write(self) -> list[RungReport]:
        ends = engine("prefill-0"), engine("decode-0")
        return list(write(*ends, self.begin, device="cpu", nonce="n1", mocked=False))


class Told(Dialogue):
    lie: Mapping[str, object]

    def say(self, document: Mapping[str, object]) -> None:
        super().say({**document, **self.lie} if "role" in document else document)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setitem(writing.LARGE_BYTES, "cpu", 2**20)
    monkeypatch.setattr(writing, "DEADLINE_S", 10.0)
    return Place(tmp_path)


def test_what_is_written_comes_whole(place: Place) -> None:
    rungs = place.write()
    assert [(r.rung, r.subject, r.verdict) for r in rungs] == [
        (f"write/{shape}", PAIR, Verdict.PASSED) for shape in ("small", "many", "large")
    ]
    assert "16,777,216 bytes in 4,096 descriptors came as sent, DRAM to DRAM over UCX, in " in (
        rungs[1].message
    )
    assert rungs[0].message.endswith(" ms")
    assert rungs[2].message.endswith(" GB/s)")
    wrote, found = rungs[2].evidence["wrote"], rungs[2].evidence["found"]
    assert isinstance(wrote, dict)
    assert isinstance(found, dict)
    assert (wrote["bytes"], found["pieces"], found["wrong"], found["touched"]) == (2**20, 256, 0, 0)
    assert [p.hear(1) for p in place.running.values()] == [{"error": "ended (0)"}] * 2


@pytest.mark.parametrize(
    ("fault", "rung", "message"),
    [
        ("corrupt", "small", "1 of 1 pieces of 4096 bytes are not as sent, the first from byte "),
        (
            *("astray", "small"),
            "memory beside what was written was changed: 1 pieces of 4096 bytes, the first from ",
        ),
        ("failing", "small", "prefill-0: RuntimeError: NIXL ended WRITE 'small' with ERR"),
        ("elsewhere", "small", "NIXL wrote over POSIX, not over UCX"),
    ],
)
def test_a_write_that_is_not_right_is_seen(
    place: Place, fault: str, rung: str, message: str
) -> None:
    place.faults["prefill-0"] = fault
    (found,) = place.write()
    assert (found.rung, found.verdict) == (f"write/{rung}", Verdict.FAILED)
    assert found.message.startswith(message)


def test_a_target_that_looks_for_something_else_does_not_find_it(place: Place) -> None:
    place.lies["decode-0"] = {"nonce": "another"}
    (found,) = place.write()
    assert found.message.startswith("1 of 1 pieces of 4096 bytes are not as sent, the first from")


@pytest.mark.parametrize(
    ("who", "fault", "message"),
    [
        (
            *("prefill-0", "unnotified"),
            "decode-0: TimeoutError: the notification of 'small' did not come in time",
        ),
        (
            *("prefill-0", "stuck"),
            "prefill-0: TimeoutError: the end of WRITE 'small' did not come in time",
        ),
    ],
)
def test_what_never_comes_is_waited_for_as_long_as_was_said(
    place: Place, who: str, fault: str, message: str
) -> None:
    place.lies = {name: {"deadline_s": 1.0} for name in ("prefill-0", "decode-0")}
    place.faults[who] = fault
    (found,) = place.write()
    assert (found.verdict, found.message) == (Verdict.FAILED, message)


def test_a_backend_that_nixl_does_not_have_is_named(place: Place) -> None:
    place.lies["decode-0"] = {"backend": "LIBFABRIC"}
    (found,) = place.write()
    assert found.message == "decode-0: RuntimeError: NIXL has no plugin LIBFABRIC; it has UCX"


def test_a_runtime_without_nixl_is_told(place: Place, tmp_path: Path) -> None:
    def begin(there: LaunchSpec) -> Dialogue:
        return Dialogue((there.argv[0], "-I", "-c", program()), env={}, log=tmp_path / "log")

    ends = engine("prefill-0"), engine("decode-0")
    (found,) = write(*ends, begin, device="cpu", nonce="n1", mocked=False)
    assert found.message == "decode-0: ModuleNotFoundError: No module named 'nixl'"


def test_without_room_on_a_gpu_ordinary_memory_is_taken_and_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(writing.LARGE_BYTES, "cuda", 2**20)
    ends = engine("prefill-0"), engine("decode-0")
    rungs = list(write(*ends, place.begin, device="cuda", nonce="n1", mocked=False))
    assert [r.verdict for r in rungs] == [Verdict.PASSED] * 3
    assert "DRAM to DRAM" in rungs[0].message
    assert rungs[0].message.endswith(" ms; not from GPU memory: No module named 'torch'")


def test_a_writer_that_is_killed_is_seen_at_once(place: Place) -> None:
    place.faults["prefill-0"] = "stuck"
    ends = engine("prefill-0"), engine("decode-0")
    began = time.monotonic()

    def begin(there: LaunchSpec) -> Dialogue:
        found = place.begin(there)
        if there.name == "prefill-0":
            os.kill(found.pid, signal.SIGKILL)
        return found

    (found,) = write(*ends, begin, device="cpu", nonce="n1", mocked=False)
    assert (found.verdict, found.message) == (
        Verdict.FAILED,
        "prefill-0: was killed by SIGKILL",
    )
    assert time.monotonic() - began < 9
    assert [p._process.poll() is None for p in place.running.values()] == [False, False]


def test_a_target_that_never_answers_is_given_up(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "DEADLINE_S", 0.5)
    monkeypatch.setattr("kvdeploy.adapters.dialogue.LEAVE_S", 0.1)

    def begin(there: LaunchSpec) -> Dialogue:
        if there.name == "prefill-0":
            return place.begin(there)
        return Dialogue(("sleep", "60"), env={"PATH": os.defpath}, log=tmp_path / "log")

    ends = engine("prefill-0"), engine("decode-0")
    (found,) = write(*ends, begin, device="cpu", nonce="n1", mocked=False)
    assert found.message == "decode-0: said nothing for 0 s"
