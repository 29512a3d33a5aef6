"""Takes the router's samples from a real router process before scripted engines, which fail in
every way that its metrics tell. README.md says how.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import aiohttp

from tests.data.metrics.renew import keep
from tests.router.harness import PROMPT, Fleet, run_fleet
from tests.router.test_lost_blocks import page
from tests.router.test_process import read_until, run_router, write_config

HERE = Path(__file__).parent
LIMITS = {
    "decode_at_once": 2,
    "queue_size": 1,
    "queue_wait_s": 0.5,
    "block_size": 4,
    "drain_lost_share": 0.1,
}


async def ask(fleet: Fleet, url: str, *, stream: bool = False) -> int:
    body = {**PROMPT, "stream": stream}
    async with fleet.session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def crowd(fleet: Fleet, url: str) -> None:
    """More at once than engines and queue take."""
    gates = [engine.gate for name, engine in fleet.engines.items() if name.startswith("decode")]
    for gate in gates:
        gate.clear()
    asked = [asyncio.create_task(ask(fleet, url)) for _ in range(8)]
    await asyncio.sleep(1)
    for gate in gates:
        gate.set()
    print("crowd:", sorted(await asyncio.gather(*asked)))


async def fail(fleet: Fleet, url: str) -> None:
    """A prefill fails until it is ejected and decode's blocks for it add up; then one is gone."""
    fleet.decode.metrics = page(used=0.5)
    fleet.engines["prefill-1"].fail = 500
    print("fail:", [await ask(fleet, url, stream=i % 2 == 0) for i in range(12)])
    await fleet.engines["decode-1"].stop()
    await asyncio.sleep(0.5)


async def record(fleet: Fleet, url: str, turn: int) -> None:
    async with fleet.session.get(f"{url}/metrics") as answer:
        text = keep(await answer.text())
    path = HERE / f"router-{turn}.prom"
    path.write_text(text)
    print(f"{path.name}: {len(text.splitlines())} lines, {len(text)} bytes")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with run_fleet(2, 2) as fleet:
            config = write_config(Path(folder) / "router.json", fleet, **LIMITS)
            async with run_router(config) as process:
                listening = await read_until(process, "listening")
                url = f"http://127.0.0.1:{listening.split(' port=')[1].split()[0]}"
                while not await is_complete(fleet, url):
                    await asyncio.sleep(0.05)
                drained = asyncio.create_task(drain(process))
                for i in range(12):
                    await ask(fleet, url, stream=i % 2 == 0)
                await record(fleet, url, 1)
                await crowd(fleet, url)
                await fail(fleet, url)
                await record(fleet, url, 2)
                drained.cancel()


async def is_complete(fleet: Fleet, url: str) -> bool:
    try:
        async with fleet.session.get(f"{url}/ready?complete=1") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def drain(process: asyncio.subprocess.Process) -> None:
    """Its log must not fill the pipe."""
    assert process.stderr is not None
    async for _ in process.stderr:
        pass


if __name__ == "__main__":
    asyncio.run(main())
