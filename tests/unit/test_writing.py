"""Rung `write`: what is written, in whose place, and what is said of what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.model.reports import Verdict
from kvdeploy.planning.writing import (
    backend_told,
    build_order,
    judge_write,
    once_each,
    shapes_for,
    unit_argv,
    way_of,
)
from kvdeploy.stages.writing import program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.reports import RungReport

DATA = Path(__file__).parents[1] / "data"
PAIR = "prefill-0/decode-0"


def engine(name: str, **more: Any) -> LaunchSpec:
    return LaunchSpec(
        name=name,
        role="prefill" if name.startswith("prefill") else "decode",
        argv=(sys.executable, "-m", "vllm", *more.pop("argv", ())),
        ready=Readiness(url="x", timeout_s=1),
        **more,
    )


def test_a_large_write_is_larger_between_gpus() -> None:
    assert [(s.name, s.count, s.total) for s in shapes_for("cpu")] == [
        ("small", 1, 4096),
        ("many", 4096, 2**24),
        ("large", 1, 2**26),
    ]
    assert shapes_for("cuda")[2].total == 2**28


@pytest.mark.parametrize(
    ("prefills", "decodes", "pairs"),
    [
        ("p", "d", [("p", "d")]),
        ("pq", "d", [("p", "d"), ("q", "d")]),
        ("p", "de", [("p", "d"), ("p", "e")]),
        ("pqr", "de", [("p", "d"), ("q", "e"), ("r", "d")]),
    ],
)
def test_every_node_is_in_a_pair(prefills: str, decodes: str, pairs: list[tuple[str, str]]) -> None:
    assert list(once_each(prefills, decodes)) == pairs


def connector(**extra: Any) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})


def test_it_is_written_over_what_engines_push_over() -> None:
    plain = engine("prefill-0", argv=connector(), env={"UCX_TLS": "tcp", "FI_PROVIDER": "efa"})
    efa = engine("prefill-0", argv=connector(backends=["LIBFABRIC"]), env={"FI_PROVIDER": "efa"})
    assert (backend_told(plain), way_of(plain)) == ("UCX", "UCX (tcp)")
    assert (backend_told(efa), way_of(efa)) == ("LIBFABRIC", "LIBFABRIC (efa)")
    assert way_of(engine("prefill-0")) == "UCX"
    order = build_order(efa, "writer", nonce="n", shapes=(), device="cuda")
    assert (order["backend"], order["memory"], order["role"]) == ("LIBFABRIC", "VRAM", "writer")


def test_on_a_node_it_runs_as_the_engine_does() -> None:
    there = engine("prefill-0", env={"HF_TOKEN": "secret"})
    argv = unit_argv(there, "import this")
    assert argv[:4] == ("sudo", "-n", "systemd-run", "--quiet")
    assert "--property=EnvironmentFile=/etc/kvdeploy/engines/prefill-0.env" in argv
    assert {"--property=User=kvdeploy", "--property=LimitMEMLOCK=infinity"} <= set(argv)
    assert argv[-3:] == (sys.executable, "-c", "import this")
    assert "secret" not in " ".join(argv)


def test_systemd_has_nothing_to_expand_in_the_program() -> None:
    assert "$" not in program()


EVIDENCE: dict[str, Any] = json.loads((DATA / "rungs/write.json").read_text())


def judged(evidence: Mapping[str, Any], *, mocked: bool = False) -> RungReport:
    shape = next(s for s in shapes_for("cpu") if s.name == evidence["shape"])
    return judge_write(
        PAIR,
        shape,
        wrote=evidence["wrote"],
        found=evidence["found"],
        way="UCX (tcp)",
        mocked=mocked,
    )


@pytest.mark.parametrize("name", ["good", "wrong", "touched", "killed", "silent"])
def test_what_was_recorded_is_judged_as_it_was(name: str) -> None:
    """Of real NIXL over loopback: tests/data/rungs/renew.py."""
    rung = judged(EVIDENCE[name])
    assert (rung.verdict, rung.message) == (EVIDENCE[name]["verdict"], EVIDENCE[name]["message"])


def test_what_was_recorded_are_one_good_write_and_four_bad_ones() -> None:
    assert {name: recorded["verdict"] for name, recorded in EVIDENCE.items()} == {
        "good": "passed",
        "wrong": "failed",
        "touched": "failed",
        "killed": "failed",
        "silent": "failed",
    }


def test_a_write_without_its_fabric_is_no_proof_of_it() -> None:
    rung = judged(EVIDENCE["good"], mocked=True)
    assert rung.verdict is Verdict.MOCKED
    assert rung.message.endswith("; EFA is mocked: this shows nothing of hardware")


def test_memory_that_is_not_a_gpus_is_told() -> None:
    recorded = EVIDENCE["good"]
    wrote = recorded["wrote"] | {"why_not_vram": "the engine leaves 12 MiB of its GPU"}
    assert judged(recorded | {"wrote": wrote}).message.endswith(
        "; not from GPU memory: the engine leaves 12 MiB of its GPU"
    )


def test_less_than_was_to_be_written_is_not_enough() -> None:
    recorded = EVIDENCE["good"]
    found = recorded["found"] | {"pieces": 0}
    assert judged(recorded | {"found": found}).verdict is Verdict.FAILED
