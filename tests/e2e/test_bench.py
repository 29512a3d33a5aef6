"""Benches that start engines anew, and what is left when one is cut: real engines, real kills.

The tests are one story in the order of the file; each leaves the fleet whole for the next.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.polling import wait_for
from tests.e2e.test_local import UP_TIMEOUT_S, Cluster

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real_process, pytest.mark.e2e]

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""Layers, K and V, heads, numbers, float32."""
ASKED = ("--input", "200", "--output", "4", "--concurrency", "1", "--rounds", "1")
PROMPT_BYTES = 7 * 32 * TOKEN_BYTES
"""200 tokens are 7 blocks of 32."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("bench"))
    ran = cluster.up()
    assert ran.code == 0, ran.err
    yield cluster
    cluster.run("down")


def reports(cluster: Cluster) -> list[Path]:
    return sorted((cluster.root / ".kvdeploy" / "e2e" / "runs").glob("*-bench/reports/bench.json"))


def last_report(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reports(cluster)[-1].read_text())
    return found


def connector(cluster: Cluster) -> str:
    """Of decode as it runs now."""
    launch = cluster.root / ".kvdeploy" / "e2e" / "processes" / "decode-0" / "launch.json"
    argv = json.loads(launch.read_text())["argv"]
    told: str = json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector"]
    return told


def begin(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    """A long bench that has made its first run."""
    known = len(reports(cluster))
    process = cluster.start("bench", *ASKED, "--scenario", "unique,shared,repeat,turns", *words)
    started = wait_for(
        lambda: (len(reports(cluster)) > known or process.poll() is not None) or None,
        timeout_s=UP_TIMEOUT_S,
        interval_s=0.05,
    )
    assert started
    assert process.poll() is None, process.communicate()[1]
    return process


def ended(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=300)
    return said


def test_a_decode_that_is_killed_ends_its_mode_and_is_repaired(cluster: Cluster) -> None:
    process = begin(cluster, "--mode", "push", "--requests", "100000", "--seconds", "6")
    before = cluster.process("decode-0")
    os.kill(before["pid"], signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 9, said
    assert "not measured to the end: push: " in said
    report = last_report(cluster)
    assert report["runs"], "what was measured before stays"
    assert report["failed"].keys() == {"push"}
    assert cluster.status()["whole"], "the bench has brought its fleet back"
    assert cluster.process("decode-0")["pid"] != before["pid"]
    assert cluster.up().document["done"] == []


def test_pull_and_cold_pairs_take_engines_that_are_started_anew(cluster: Cluster) -> None:
    pids = cluster.started()
    ran = cluster.run(
        *("bench", *ASKED, "--scenario", "unique,cold", "--mode", "push,pull", "--restart"),
        *("--requests", "1", "--json", "pull.json", "--assert", "bytes.pull == bytes.push"),
        timeout_s=UP_TIMEOUT_S,
    )
    assert ran.code == 0, ran.err
    report = json.loads((cluster.root / "pull.json").read_text())
    seen = [(r["mode"], r["cell"]["scenario"], len(r["samples"])) for r in report["runs"]]
    assert seen == [
        *(("push", "unique", 1), ("push", "cold", 1), ("pull", "unique", 1), ("pull", "cold", 1)),
    ]
    for run in report["runs"]:
        assert [s["error"] for s in run["samples"]] == [""]
        assert run["moved"]["kv_bytes"] == PROMPT_BYTES
    assert not any("cold pair was not measured" in note for note in report["notes"])

    now = cluster.started()
    assert now is not None
    assert pids is not None
    assert now["router"] == pids["router"]
    assert now["decode-0"] != pids["decode-0"]
    assert connector(cluster) == "NixlPushConnector"
    assert cluster.up().document["done"] == [], "the cluster has its own again"


def test_ctrl_c_gives_the_cluster_its_own_engines_back(cluster: Cluster) -> None:
    process = begin(cluster, "--mode", "pull", "--restart", "--seconds", "4")
    assert connector(cluster) == "NixlConnector"
    process.send_signal(signal.SIGINT)
    said = ended(process)
    assert process.returncode == 130, said
    report = last_report(cluster)
    assert [r["mode"] for r in report["runs"]] == ["pull"]
    assert "it did not come to its end: 1 of 4 runs were made" in report["notes"]
    assert connector(cluster) == "NixlPushConnector"
    assert cluster.status()["whole"]
    assert cluster.up().document["done"] == []


def test_up_repairs_what_a_killed_bench_has_left(cluster: Cluster) -> None:
    process = begin(cluster, "--mode", "pull", "--restart", "--seconds", "4")
    process.kill()
    ended(process)
    assert [r["mode"] for r in last_report(cluster)["runs"]] == ["pull"], "it is kept as well"
    assert connector(cluster) == "NixlConnector"
    record = json.loads((cluster.root / ".kvdeploy" / "e2e" / "record.json").read_text())
    assert record["spec"]["connector"]["mode"] == "push", "what was asked for is not forgotten"
    ran = cluster.up()
    assert (ran.code, ran.document["done"]) == (0, ["fleet", "proof"])
    assert connector(cluster) == "NixlPushConnector"
    assert cluster.run("bench", *ASKED, "--mode", "push", "--requests", "1").code == 0
