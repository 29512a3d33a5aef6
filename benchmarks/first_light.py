"""Measure first light on this machine: start-up, memory, `--help`, and what the router adds.

    python benchmarks/first_light.py [--cold] [--requests N] [--json FILE] [--set PATH=VALUE ...]

Starts the built-in cluster in a scratch folder, on a port of its own, and takes it down again.
`--cold` also measures an `up` with an empty cache: the runtime is built, its wheels come from
wherever pip finds them. Prints a table; takes about three minutes, five with --cold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvdeploy.adapters.local import machine

PROMPT = "The harbour lights went out one by one, and nobody on the pier said a word. " * 3
KV = (sys.executable, "-m", "kvdeploy")


def kvdeploy(*words: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run([*KV, *words], cwd=cwd, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"kvdeploy {' '.join(words)} ended with {done.returncode}")
    return done.stdout


def help_ms() -> list[float]:
    times = []
    for _ in range(21):
        started = time.perf_counter()
        subprocess.run([*KV, "--help"], stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - started) * 1e3)
    return times[1:]  # the first reads files from disk


def up_to_first_token(url: str, sets: list[str], cwd: Path, env: dict[str, str]) -> float:
    started = time.perf_counter()
    kvdeploy("up", *sets, cwd=cwd, env=env)
    asyncio.run(one_stream(url))
    return time.perf_counter() - started


async def one_stream(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        await ttft_ms(session, url, body(), {})


def body() -> dict[str, Any]:
    """A prompt that no cache holds."""
    return {
        "model": "tiny",
        "prompt": f"{uuid.uuid4().hex} {PROMPT}",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def ttft_ms(
    session: aiohttp.ClientSession, url: str, asked: dict[str, Any], headers: dict[str, str]
) -> float:
    started = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=asked, headers=headers) as answer:
        if answer.status != 200:
            sys.exit(f"{url}: {answer.status} {await answer.text()}")
        first = None
        async for line in answer.content:
            if first is None and line.startswith(b"data: {"):
                first = time.perf_counter()
    if first is None:
        sys.exit(f"{url}: no token")
    return (first - started) * 1e3


async def direct_ms(
    session: aiohttp.ClientSession, prefill: str, decode: str, at: dict[str, Any]
) -> float:
    """The router's own dispatch, made by this client: both legs at once."""
    asked, request_id = body(), uuid.uuid4().hex
    headers = {"X-Request-Id": request_id}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    leg = asked | {"stream": False, "max_tokens": 1, "kv_transfer_params": params}

    async def prefill_leg() -> None:
        async with session.post(f"{prefill}/v1/completions", json=leg, headers=headers) as answer:
            await answer.read()

    to = at | {"remote_request_id": f"cmpl-{request_id}-0"}
    other = asyncio.create_task(prefill_leg())
    found = await ttft_ms(session, decode, asked | {"kv_transfer_params": to}, headers)
    await other
    return found


async def coordinates(session: aiohttp.ClientSession, prefill: str) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    asked = body() | {"stream": False, "max_tokens": 1, "kv_transfer_params": params}
    async with session.post(f"{prefill}/v1/completions", json=asked) as answer:
        told = (await answer.json())["kv_transfer_params"]
    keys = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
    return {"do_remote_prefill": True, "do_remote_decode": False} | {k: told[k] for k in keys}


async def compare(url: str, prefill: str, decode: str, count: int) -> dict[str, list[float]]:
    """One after the other, A B B A: what slows the machine down slows both."""
    found: dict[str, list[float]] = {"router": [], "direct": []}
    async with aiohttp.ClientSession() as session:
        at = await coordinates(session, prefill)
        for i in range(count + 5):
            for who in ("direct", "router") if i % 2 else ("router", "direct"):
                if who == "direct":
                    taken = await direct_ms(session, prefill, decode, at)
                else:
                    taken = await ttft_ms(session, url, body(), {})
                if i >= 5:  # the first ones open connections
                    found[who].append(taken)
    return found


def quantile(values: list[float], q: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(q * 100) - 1]


def memory_gib(pid: int) -> dict[str, float]:
    """Of an engine's session: resident, and proportional (shared pages divided)."""
    members = machine.session_members(pid)
    pss = sum(psutil.Process(p).memory_full_info().pss for p in members) / 2**30
    return {"rss": machine.resident_gib(members), "pss": pss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="sets")
    options = parser.parse_args()
    sets = [word for value in options.sets for word in ("--set", value)]
    port = next(machine.free_ports(28400))
    url = f"http://127.0.0.1:{port}"
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {len(machine.cores())} cores",
        "load_at_start": os.getloadavg()[0],
        "help_ms": help_ms(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "cluster.yaml").write_text(f"name: bench\nrouter: {{port: {port}}}\n")
        env = dict(os.environ)
        try:
            if options.cold:
                cold = env | {"KVDEPLOY_CACHE": str(root / "cache")}
                found["up_cold_s"] = up_to_first_token(url, sets, root, cold)
                kvdeploy("down", cwd=root, env=cold)
            kvdeploy("up", *sets, cwd=root, env=env)  # builds what the user's cache lacks
            kvdeploy("down", cwd=root, env=env)
            found["up_warm_s"] = up_to_first_token(url, sets, root, env)
            status = json.loads(kvdeploy("status", "--json", cwd=root, env=env))
            rows = {p["name"]: p for p in status["processes"]}
            found["memory_gib"] = {name: memory_gib(p["pid"]) for name, p in rows.items()}
            prefill = f"http://127.0.0.1:{rows['prefill-0']['ports'][0]}"
            decode = f"http://127.0.0.1:{rows['decode-0']['ports'][0]}"
            found["ttft_ms"] = asyncio.run(compare(url, prefill, decode, options.requests))
        finally:
            kvdeploy("down", cwd=root, env=env)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    ttft = found["ttft_ms"]
    print(f"\n{found['machine']}, load {found['load_at_start']:.2f} at the start\n")
    print("| what | measured | aim |\n|---|---|---|")
    print(
        f"| `kvdeploy --help` (p50 of 20) | {statistics.median(found['help_ms']):.0f} ms | 150 ms |"
    )
    if "up_cold_s" in found:
        print(
            f"| `up`, empty cache, to first token | {found['up_cold_s']:.0f} s | 120 s + download |"
        )
    print(f"| `up`, warm, to first token | {found['up_warm_s']:.1f} s | 60 s |")
    for name, gib in found["memory_gib"].items():
        print(f"| memory of {name} | {gib['rss']:.2f} GiB RSS, {gib['pss']:.2f} GiB PSS | - |")
    for q in (0.5, 0.9, 0.99):
        router, direct = quantile(ttft["router"], q), quantile(ttft["direct"], q)
        aim = "2 ms" if q == 0.5 else "-"
        print(
            f"| TTFT p{q * 100:.0f}, router / direct / added | {router:.1f} / {direct:.1f} / "
            f"{router - direct:+.1f} ms | {aim} |"
        )


if __name__ == "__main__":
    main()
