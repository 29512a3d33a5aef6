"""What clients see when engines die, freeze or lose their clients: real engines, real kills.

    python -m benchmarks.router_faults [--clients N] [--seconds S] [--json FILE]

Starts two prefill and two decode engines of the built-in model in a scratch folder. For each fault
N clients ask for S seconds, every other one streamed, and the fault happens after a third of that;
every answer is compared with what a prefill engine computes alone. Then the fleet is waited for,
and engines are asked for KV blocks that they still hold. Takes about a minute and a half a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from kvdeploy.adapters.local import machine
from kvdeploy.adapters.metrics import fetch_counters

if TYPE_CHECKING:
    from collections.abc import Callable

KV = (sys.executable, "-m", "kvdeploy")
PROMPTS = [f"The {n} lights went out along the harbour wall, and " * 6 for n in range(7)]
WHOLE_AGAIN_S = 180
BLOCKS_BACK_S = 150
"""A little over the lease that a lost block is held for."""


class Fleet:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        (folder / "cluster.yaml").write_text(
            f"name: faults\nrouter: {{port: {port}}}\nconnector: {{block_size: 32}}\n"
            "fleet: {prefill: {count: 2}, decode: {count: 2}}\n"
        )

    def kvdeploy(self, *words: str) -> str:
        done = subprocess.run([*KV, *words], cwd=self.folder, stdout=subprocess.PIPE, text=True)
        if done.returncode and words[0] != "status":
            sys.exit(f"kvdeploy {' '.join(words)} ended with {done.returncode}")
        return done.stdout

    def processes(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.kvdeploy("status", "--json"))["processes"]
        return {p["name"]: p for p in found}

    def pid(self, name: str) -> int:
        return int(self.processes()[name]["pid"])

    def engines(self) -> list[str]:
        """Their addresses, which stay as they are when an engine starts again."""
        found = self.processes()
        return [f"http://127.0.0.1:{found[n]['ports'][0]}" for n in found if n != "router"]

    def tell(self, name: str, number: signal.Signals) -> None:
        """Send every process of an engine a signal."""
        for pid in machine.session_members(self.pid(name)):
            os.kill(pid, number)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, *, stream: bool) -> str:
    """The answer's text; an error is told in angle brackets."""
    try:
        return await answer_of(session, url, prompt, stream=stream)
    except aiohttp.ClientError:
        await asyncio.sleep(0.1)
        return "<connection lost>"


async def answer_of(session: aiohttp.ClientSession, url: str, prompt: str, *, stream: bool) -> str:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=asked | {"stream": stream}) as answer:
        if answer.status != 200:
            return f"<{answer.status}>"
        if not stream:
            return str((await answer.json())["choices"][0]["text"])
        text = ""
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return "<broken off>"
                text += event["choices"][0]["text"] if event["choices"] else ""
        return text


async def under_load(
    fleet: Fleet, clients: int, seconds: float, fault: Callable[[Fleet], None]
) -> dict[str, Any]:
    limit = aiohttp.ClientTimeout(total=700)
    async with aiohttp.ClientSession(timeout=limit) as session:
        alone = fleet.engines()[-1]
        expected = {p: await ask(session, alone, p, stream=False) for p in PROMPTS}
        outcomes: Counter[str] = Counter()
        took: list[float] = []
        ends = time.monotonic() + seconds

        async def client(number: int) -> None:
            while time.monotonic() < ends:
                prompt = PROMPTS[number % len(PROMPTS)]
                started = time.monotonic()
                text = await ask(session, fleet.url, prompt, stream=number % 2 == 0)
                took.append(time.monotonic() - started)
                known = text if text.startswith("<") else "wrong"
                outcomes["right" if text == expected[prompt] else known] += 1
                number += clients + 1

        asking = [asyncio.create_task(client(n)) for n in range(clients)]
        await asyncio.sleep(seconds / 3)
        await asyncio.to_thread(fault, fleet)
        await asyncio.gather(*asking)
        return {"requests": len(took), **outcomes, "slowest_s": round(max(took), 2)}


async def whole_again_s(fleet: Fleet) -> float | None:
    """Seconds until every pair is ready."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while time.monotonic() - began < WHOLE_AGAIN_S:
            await asyncio.sleep(0.5)
            try:
                async with session.get(f"{fleet.url}/ready") as answer:
                    pairs = (await answer.json())["pairs"]
            except aiohttp.ClientError:
                continue
            if len(pairs) == 4 and set(pairs.values()) == {"ready"}:
                return round(time.monotonic() - began, 1)
    return None


def blocks_back_s(fleet: Fleet) -> float | None:
    """Seconds until no engine works on or holds anything."""
    engines, began = fleet.engines(), time.monotonic()
    while time.monotonic() - began < BLOCKS_BACK_S:
        found = [fetch_counters(url, timeout_s=5) for url in engines]
        if not any(f.running or f.waiting or f.kv_cache_usage for f in found):
            return round(time.monotonic() - began, 1)
        time.sleep(1)
    return None


def kill(name: str) -> Callable[[Fleet], None]:
    return lambda fleet: os.kill(fleet.pid(name), signal.SIGKILL)


def freeze(name: str, seconds: float) -> Callable[[Fleet], None]:
    def do(fleet: Fleet) -> None:
        fleet.tell(name, signal.SIGSTOP)
        time.sleep(seconds)
        fleet.tell(name, signal.SIGCONT)

    return do


def storm(clients: int) -> Callable[[Fleet], None]:
    """Clients that leave 0 to 0.2 s after they asked."""

    async def one(session: aiohttp.ClientSession, url: str, number: int) -> None:
        try:
            async with asyncio.timeout(number / clients / 5):
                await ask(session, url, PROMPTS[number % len(PROMPTS)], stream=number % 2 == 0)
        except TimeoutError:
            return

    async def all_of_them(url: str) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(one(session, url, n) for n in range(clients)))

    return lambda fleet: asyncio.run(all_of_them(fleet.url))


FAULTS: dict[str, Callable[[Fleet], None]] = {
    "none": lambda _: None,
    "kill -9 a prefill engine": kill("prefill-0"),
    "kill -9 a decode engine": kill("decode-0"),
    "prefill frozen for 10 s": freeze("prefill-0", 10),
    "decode frozen for 10 s": freeze("decode-0", 10),
    "200 clients that leave": storm(200),
    "kill -9 the router": kill("router"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        fleet = Fleet(Path(scratch), next(machine.free_ports(28200)))
        try:
            fleet.kvdeploy("up")
            for name, fault in FAULTS.items():
                seen = asyncio.run(under_load(fleet, chosen.clients, chosen.seconds, fault))
                seen["whole_again_s"] = asyncio.run(whole_again_s(fleet))
                seen["blocks_back_s"] = blocks_back_s(fleet)
                found[name] = seen
                print(f"{name}: {json.dumps(seen)}", flush=True)
        finally:
            fleet.kvdeploy("down")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
