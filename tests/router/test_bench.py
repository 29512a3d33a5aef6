"""make bench-router, in small: it runs, and all its answers are right."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real_process
async def test_the_bench_measures_both_ways_and_every_answer_is_right(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.router_speed", "--levels=2", "--tokens=4"),
        *("--seconds=0.4", "--warm-s=0.1", "--rounds=1", "--firsts=1", f"--json={found}"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()
    told = json.loads(found.read_text())
    for arm in ("direct", "kvdeploy"):
        seen = told["levels"]["2"][arm]
        assert seen["faults"] == {}
        assert seen["right"] == seen["asked"] > 0
    assert told["levels"]["2"]["kvdeploy"]["router_cpu_ms_per_request"] > 0
    assert isinstance(told["first_request_ttft_ms"]["kvdeploy"][0], float)
