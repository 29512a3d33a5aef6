"""How long check, plan, up and down take on AWS, without AWS: real Terraform and provider against
the double of tests/double, whose answers come at once. What EC2 itself takes comes on top.

    python benchmarks/aws.py [NODES ...]      default: 4 64
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.double.client import Double

KVDEPLOY = (sys.executable, "-m", "kvdeploy")


def cluster(nodes: int) -> str:
    """So many GPU nodes, half of each role, and the router's."""
    half = f"{{count: {nodes // 2}, tensor_parallel: 8}}"
    return (
        "name: bench\ntarget: aws\nmodel: {id: org/m, max_length: 4096}\n"
        f"fleet: {{prefill: {half}, decode: {half}}}\n"
        "aws: {region: us-west-2, zone: us-west-2a}\n"
    )


def timed(root: Path, *argv: str) -> float:
    """Nodes are made and not reached: no way to them is needed."""
    if argv[0] != "down":
        argv = (*argv, "--allow", "access-tool-missing")
    started = time.monotonic()
    done = subprocess.run([*KVDEPLOY, *argv], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kvdeploy {' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")
    return round(time.monotonic() - started, 1)


def resource_times(root: Path) -> dict[str, float]:
    """Seconds by type of resource, the slowest of each, from the log of `up`."""
    slowest: dict[str, float] = {}
    for log in sorted(root.glob(".kvdeploy/bench/runs/*-up/terraform.log")):
        for line in log.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("type") == "apply_complete":
                hook = event["hook"]
                kind, seconds = hook["resource"]["resource_type"], hook["elapsed_seconds"]
                slowest[kind] = max(slowest.get(kind, 0.0), float(seconds))
    return dict(sorted(slowest.items(), key=lambda one: -one[1])[:6])


def measure(nodes: int) -> dict[str, object]:
    with Double() as aws, tempfile.TemporaryDirectory() as folder:
        os.environ.update(aws.env)
        aws.quota("L-417A185B", 192.0 * (nodes + 1))
        root = Path(folder)
        (root / "cluster.yaml").write_text(cluster(nodes))
        seconds: dict[str, float] = {}
        for name, argv in {
            "check": ["check"],
            "plan": ["plan"],
            "up": ["up", "--until", "provision"],
            "up again": ["up", "--until", "provision"],
            "plan again": ["plan"],
            "down": ["down", "--yes"],
        }.items():
            seconds[name] = timed(root, *argv)
            print(f"{nodes:>3} nodes  {name:<10} {seconds[name]:6.1f} s", flush=True)
        counts = aws.counts()
        return {
            "nodes": nodes,
            "seconds": seconds,
            "calls": sum(counts.values()),
            "slowest": resource_times(root),
        }


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [4, 64]
    print(json.dumps([measure(size) for size in sizes], indent=2))
