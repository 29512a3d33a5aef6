"""How many prompts a prefill engine should be given at once: limits against load, measured.

    python -m benchmarks.admission --model NAME --prefill-url URL --decode-url URL --json FILE

The engines run already. For each limit (`router.prefill_at_once`: 1, 2, 4, 8, none, auto) a router
of its own is started before them, and for each load so many clients ask, stream, and ask again: 3 s
that do not count (12 s for auto, to find its limit), then 12 s. Prompts are token ids, a share of
them the same for all. With --url nothing is started, and that endpoint is measured. Needs what the
router needs: aiohttp, httptools, pydantic, uvloop and prometheus_client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

from kvdeploy import __version__
from kvdeploy.model.routing import Engine, RouterConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[1]
READY_S = 120.0
LATE_S = 30.0
"""For what is under way when the time of a cell is over."""
LOOK_S = 0.25
"""Between two looks at the limit that the router has found."""
VOCABULARY = range(100, 30_000)


@dataclass
class Samples:
    """What the clients of one cell saw, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


class Prompts:
    """Token ids: the same beginning, and then never the same again."""

    def __init__(self, seed: int, tokens: int, shared: float) -> None:
        self._random = random.Random(seed)
        self._tokens = tokens
        self._shared = self._pick(round(tokens * shared))

    def build(self) -> list[int]:
        return self._shared + self._pick(self._tokens - len(self._shared))

    def _pick(self, count: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=count)


class Load:
    """So many clients, each of which asks again when it is answered."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        options: argparse.Namespace,
        prompts: Prompts,
    ) -> None:
        self._session, self._url, self._options = session, url, options
        self._prompts = prompts

    async def run(self, clients: int, warm_up_s: float) -> dict[str, Any]:
        counted = Samples()
        begins = time.perf_counter() + warm_up_s
        ends = begins + self._options.seconds_each

        async def client() -> None:
            while time.perf_counter() < ends:
                await self._ask(counted, begins, ends)

        watching = asyncio.create_task(self._watch(counted, begins))
        asking = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            limit_s = warm_up_s + self._options.seconds_each + LATE_S
            done, late = await asyncio.wait(asking, timeout=limit_s)
        finally:
            for task in (watching, *asking):
                task.cancel()
        for task in done:
            task.result()
        for _ in late:
            counted.fail(f"not answered {LATE_S:.0f} s after the end")
        return summarize(counted, clients, self._options.seconds_each)

    async def _ask(self, counted: Samples, begins: float, ends: float) -> None:
        """Counted is what is answered within the time: so much was really carried."""
        body = {
            "model": self._options.model,
            "prompt": self._prompts.build(),
            "max_tokens": self._options.output,
            "min_tokens": self._options.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body).encode()
        started = time.perf_counter()
        first = last = 0.0
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                data=data,
                headers={"Content-Type": "application/json"},
            ) as answer:
                if answer.status != 200:
                    counted.fail(f"status {answer.status}: {(await answer.text())[:200]}")
                    await asyncio.sleep(0.1)
                    return
                async for line in answer.content:
                    if line.startswith(b'data: {"error"'):
                        counted.fail(line.decode()[:200])
                        return
                    if line.startswith(b"data: {"):
                        last = time.perf_counter()
                        first = first or last
        except (aiohttp.ClientError, TimeoutError) as e:
            counted.fail(type(e).__name__)
            await asyncio.sleep(0.1)
            return
        if not first:
            counted.fail("no token")
        elif begins <= last <= ends:
            counted.ttft.append(first - started)
            counted.tpot.append((last - first) / max(1, self._options.output - 1))

    async def _watch(self, counted: Samples, begins: float) -> None:
        """The limit that a router of ours has at the time."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(f"{self._url}/metrics") as answer:
                    for line in (await answer.text()).splitlines():
                        is_it = line.startswith("kvdeploy_router_prefill_limit{")
                        if is_it and time.perf_counter() >= begins:
                            counted.limits.append(float(line.rpartition(" ")[2]))
            await asyncio.sleep(LOOK_S)


def summarize(seen: Samples, clients: int, seconds: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "concurrency": clients,
        "requests": len(seen.ttft),
        "requests_per_s": round(len(seen.ttft) / seconds, 2),
        "errors": seen.errors,
    }
    if seen.ttft:
        told["ttft_ms"] = {f"p{p}": find_percentile(seen.ttft, p) for p in (50, 90, 99)}
        told["ttft_ms"]["mean"] = round(statistics.mean(seen.ttft) * 1e3, 2)
        told["tpot_ms"] = {f"p{p}": find_percentile(seen.tpot, p) for p in (50, 90)}
    finite = [limit for limit in seen.limits if math.isfinite(limit)]
    if finite:
        told["limit_seen"] = {
            "least": min(finite),
            "mean": round(statistics.mean(finite), 2),
            "most": max(finite),
        }
    return told


def find_percentile(seconds: list[float], percent: int) -> float:
    """The nearest rank, in milliseconds."""
    rank = max(0, math.ceil(len(seconds) * percent / 100) - 1)
    return round(sorted(seconds)[rank] * 1e3, 2)


def build_config(options: argparse.Namespace, limit: str, port: int) -> RouterConfig:
    urls = [("prefill", url) for url in options.prefill_url]
    urls += [("decode", url) for url in options.decode_url]
    counts = {"prefill": 0, "decode": 0}
    engines = []
    for role, url in urls:
        name = f"{role}-{counts[role]}"
        counts[role] += 1
        engines.append(Engine.model_validate({"name": name, "role": role, "url": url.rstrip("/")}))
    return RouterConfig(
        host="127.0.0.1",
        port=port,
        served_model=options.model,
        mode=options.connector,
        engines=tuple(engines),
        block_size=options.block_size,
        prefill_at_once=parse_limit(limit),
        warmup_tokens=options.block_size + 1,
    )


def parse_limit(word: str) -> int | Literal["auto"] | None:
    """Raises ValueError."""
    if word == "none":
        return None
    if word == "auto":
        return "auto"
    if int(word) < 1:
        raise ValueError
    return int(word)


@asynccontextmanager
async def run_router(
    session: aiohttp.ClientSession, options: argparse.Namespace, limit: str, folder: Path
) -> AsyncIterator[str]:
    """Its address, once every pair has been warmed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    config, log = folder / f"router-{limit}.json", folder / f"router-{limit}.log"
    config.write_text(build_config(options, limit, port).model_dump_json())
    argv = (sys.executable, "-m", "kvdeploy.router", "--config", str(config.resolve()))
    with log.open("ab") as out:
        router = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        await wait_ready(session, url, router, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            router.terminate()
        try:
            await asyncio.wait_for(router.wait(), 20)
        except TimeoutError:
            router.kill()
            await router.wait()


async def wait_ready(
    session: aiohttp.ClientSession, url: str, router: asyncio.subprocess.Process, log: Path
) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and router.returncode is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/ready?complete=1") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    sys.exit(f"the router was not ready within {READY_S:.0f} s; its log ends:\n{tail}")


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    limits = ["given"] if options.url else options.limits
    prompts = Prompts(options.seed, options.input, options.shared)
    wait = aiohttp.ClientTimeout(total=600, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=wait, connector=connector) as session:
        for number in range(options.rounds):
            # There and back: what changes with time is then no limit's alone.
            for limit in reversed(limits) if number % 2 else limits:
                warm_up_s = options.settle_s if limit == "auto" else options.warm_up_s
                async with contextlib.AsyncExitStack() as stack:
                    url = options.url or await stack.enter_async_context(
                        run_router(session, options, limit, folder)
                    )
                    load = Load(session, url.rstrip("/"), options, prompts)
                    for clients in options.concurrency:
                        cell = {
                            "limit": limit,
                            "round": number,
                            **await load.run(clients, warm_up_s),
                        }
                        cells.append(cell)
                        print(render_cell(cell), flush=True)
    return cells


HEADER = "limit   clients   TTFT p50     p90     p99   TPOT p50    p90   req/s   found   errors"


def render_cell(cell: dict[str, Any]) -> str:
    ttft, tpot = cell.get("ttft_ms", {}), cell.get("tpot_ms", {})
    numbers = [ttft.get("p50"), ttft.get("p90"), ttft.get("p99"), tpot.get("p50"), tpot.get("p90")]
    shown = [f"{n:8.1f}" if n is not None else "       -" for n in numbers]
    found = cell["limit_seen"]["mean"] if cell["limit"] == "auto" and "limit_seen" in cell else "-"
    return (
        f"{cell['limit']:>5} {cell['concurrency']:>9}   {''.join(shown[:3])}   {''.join(shown[3:])}"
        f"{cell['requests_per_s']:8.1f}{found:>8} {sum(cell['errors'].values()):>8}"
    )


def compare(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """For each load: the best fixed limit by TTFT p50, and auto's over it, means over rounds."""
    told: dict[str, Any] = {}
    for clients in sorted({cell["concurrency"] for cell in cells}):
        by_limit: dict[str, list[float]] = {}
        for cell in cells:
            if cell["concurrency"] == clients and "ttft_ms" in cell:
                by_limit.setdefault(cell["limit"], []).append(cell["ttft_ms"]["p50"])
        p50 = {limit: statistics.mean(values) for limit, values in by_limit.items()}
        auto = p50.pop("auto", None)
        if p50 and auto is not None:
            best = min(p50, key=p50.__getitem__)
            told[str(clients)] = {
                "best_fixed": best,
                "best_fixed_ttft_p50_ms": round(p50[best], 2),
                "auto_over_best_fixed": round(auto / p50[best], 3),
            }
    return told


async def find_environment(options: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "kvdeploy": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [],
        "engines": {},
    }
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True)
        # Without the devices' serial numbers.
        told["gpus"] = [line.partition(" (UUID")[0] for line in listed.stdout.splitlines()]
    urls = [*options.prefill_url, *options.decode_url] if not options.url else [options.url]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for url in urls:
            try:
                async with session.get(f"{url.rstrip('/')}/version") as answer:
                    told["engines"][url] = await answer.json() if answer.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                told["engines"][url] = None
    return told


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the name that the engines serve")
    parser.add_argument("--prefill-url", action="append", default=[], metavar="URL")
    parser.add_argument("--decode-url", action="append", default=[], metavar="URL")
    parser.add_argument("--url", help="measure this endpoint instead, as it is")
    parser.add_argument("--connector", choices=("push", "pull"), default="push")
    parser.add_argument("--block-size", type=int, default=128, help="the engines'")
    parser.add_argument("--input", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--shared", type=float, default=0.9, help="share of a prompt, 0 to 1")
    parser.add_argument("--concurrency", default="4,16,48")
    parser.add_argument("--limits", default="1,2,4,8,none,auto")
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured")
    parser.add_argument("--seconds-each", type=float, default=12.0)
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--settle-s", type=float, default=12.0, help="warm-up for auto")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if not options.url and not (options.prefill_url and options.decode_url):
        parser.error("give --prefill-url and --decode-url, or --url")
    if not 0 <= options.shared <= 1:
        parser.error("--shared is from 0 to 1")
    try:
        options.concurrency = [int(word) for word in options.concurrency.split(",")]
        options.limits = options.limits.split(",")
        for word in options.limits:
            parse_limit(word)
    except ValueError:
        parser.error(
            "--concurrency is numbers, --limits numbers, none or auto, with commas between"
        )
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    environment = asyncio.run(find_environment(options))
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="kvdeploy-admission-") as folder:
        cells = asyncio.run(measure(options, Path(folder)))
    summary = compare(cells)
    for clients, told in summary.items():
        print(
            f"{clients} clients: auto is {told['auto_over_best_fixed']} times the best fixed limit "
            f"({told['best_fixed']}: {told['best_fixed_ttft_p50_ms']} ms)"
        )
    asked = {k: v for k, v in vars(options).items() if k != "json"}
    report = {"environment": environment, "options": asked, "cells": cells, "summary": summary}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(cell["requests"] for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
