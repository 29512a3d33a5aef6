"""Several router processes behind one port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from kvdeploy.model.routing import RouterConfig
from tests.router.harness import PROMPT, Fleet, run_fleet
from tests.router.scripted import CHUNKS
from tests.router.test_process import read_until, run_router, run_to_end, write_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.loopback, pytest.mark.real_process]


class Crew:
    """A router of several workers, and clients of a known one."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def get(self, path: str) -> tuple[int, Any]:
        """Over a connection of its own: whichever worker gets it."""
        async with fresh() as client, client.get(self.url + path) as answer:
            return answer.status, await answer.json(content_type=None)

    async def metric(self, line: str) -> float:
        async with fresh() as client, client.get(self.url + "/metrics") as answer:
            text = await answer.text()
        return next(float(r.split()[-1]) for r in text.splitlines() if r.startswith(line + " "))

    async def client_of(self, worker: int) -> aiohttp.ClientSession:
        """One whose only connection leads to that worker."""
        for _ in range(200):
            client = fresh()
            async with client.get(self.url + "/health") as answer:
                if (await answer.json())["worker"] == worker:
                    return client
            await client.close()
        pytest.fail(f"no connection led to worker {worker}")

    def pid_of(self, worker: int) -> int:
        workers = psutil.Process(self.process.pid).children()
        return next(w.pid for w in workers if f"--worker {worker} " in " ".join(w.cmdline()))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def fresh() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=1)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30))


@asynccontextmanager
async def run_crew(path: Path, fleet: Fleet, **changes: Any) -> AsyncIterator[Crew]:
    async with run_router(write_config(path, fleet, workers=2, **changes)) as process:
        listening = await read_until(process, "listening")
        port = listening.split(" port=")[1].split()[0]
        await read_until(process, "every pair is warm in each of 2 workers")
        yield Crew(process, f"http://127.0.0.1:{port}")
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                await process.wait()


async def test_requests_spread_over_workers_and_their_counts_add_up(tmp_path: Path) -> None:
    async with run_fleet() as fleet, run_crew(tmp_path / "r.json", fleet) as crew:
        seen = set()
        for _ in range(30):
            async with fresh() as client:
                async with client.get(crew.url + "/health") as answer:
                    seen.add((await answer.json())["worker"])
                async with client.post(crew.url + "/v1/completions", json=PROMPT) as answer:
                    assert answer.status == 200
        counted = 'kvdeploy_router_requests_total{endpoint="/v1/completions",status="200"}'
        told = {await crew.metric(counted) for _ in range(10)}
        ready = 'kvdeploy_router_pair_ready{decode="decode-0",prefill="prefill-0"}'
        gauges = [await crew.metric(ready), await crew.metric("kvdeploy_router_workers")]
        assert (await crew.get("/ready?complete=1"))[0] == 200

    assert seen == {0, 1}
    assert told == {30}, "whichever worker is asked"
    assert gauges == [1, 2]


async def test_a_killed_worker_takes_its_own_streams_only_and_is_replaced(tmp_path: Path) -> None:
    async with run_fleet() as fleet, run_crew(tmp_path / "r.json", fleet) as crew:
        counted = 'kvdeploy_router_requests_total{endpoint="/v1/completions",status="200"}'
        clients = [await crew.client_of(0), await crew.client_of(1)]
        for client in clients:
            async with client.post(crew.url + "/v1/completions", json=PROMPT) as answer:
                assert answer.status == 200
        fleet.decode.gate.clear()
        streams = [
            await client.post(crew.url + "/v1/completions", json={**PROMPT, "stream": True})
            for client in clients
        ]
        firsts = [await stream.content.readany() for stream in streams]
        first_pid = crew.pid_of(0)
        os.kill(first_pid, signal.SIGKILL)
        said = await read_until(crew.process, "another in")
        fleet.decode.gate.set()
        with pytest.raises(aiohttp.ClientError):
            await streams[0].content.read()
        streams[0].close()
        rest = await streams[1].content.read()
        await read_until(crew.process, "unready")
        await read_until(crew.process, "every pair is warm in each of 2 workers")
        replaced = await crew.client_of(0)
        async with replaced.post(crew.url + "/v1/completions", json=PROMPT) as answer:
            assert answer.status == 200
        total = await crew.metric(counted)
        in_flight = await crew.metric('kvdeploy_router_in_flight{engine="decode-0"}')
        assert crew.pid_of(0) != first_pid
        for client in (*clients, replaced):
            await client.close()

    assert "worker=0 was killed by SIGKILL" in said
    assert firsts == [CHUNKS[0]] * 2
    assert rest == b"".join(CHUNKS[1:])
    assert total == 4, "what the killed one had counted is not lost"
    assert in_flight == 0, "what it held is not held"


async def test_a_hangup_reaches_every_worker(tmp_path: Path) -> None:
    async with run_fleet(1, 2) as fleet, run_crew(tmp_path / "r.json", fleet) as crew:
        del fleet.engines["decode-1"]
        write_config(tmp_path / "r.json", fleet, workers=3)
        crew.process.send_signal(signal.SIGHUP)
        said = [await read_until(crew.process, "reloaded engines=") for _ in range(2)]
        for worker in (0, 1):
            async with await crew.client_of(worker) as client:
                async with client.get(crew.url + "/ready") as answer:
                    assert list((await answer.json())["pairs"]) == ["prefill-0/decode-0"]
                async with client.get(crew.url + "/metrics") as answer:
                    text = await answer.text()
                assert 'engine_state{engine="decode-0",state="up"} 1.0' in text
                assert 'engine_state{engine="decode-1"' not in text
        assert (await crew.get("/ready?complete=1"))[0] == 200
    assert {line.split("worker=")[1][0] for line in said} == {"0", "1"}


async def test_a_stop_lets_every_worker_finish_its_streams(tmp_path: Path) -> None:
    async with run_fleet() as fleet, run_crew(tmp_path / "r.json", fleet) as crew:
        clients = [await crew.client_of(0), await crew.client_of(1)]
        fleet.decode.gate.clear()
        streams = [
            await client.post(crew.url + "/v1/completions", json={**PROMPT, "stream": True})
            for client in clients
        ]
        assert [await stream.content.readany() for stream in streams] == [CHUNKS[0]] * 2
        crew.process.send_signal(signal.SIGTERM)
        for _ in clients:
            await read_until(crew.process, "no new connections")
        fleet.decode.gate.set()
        rest = [await stream.content.read() for stream in streams]
        async with asyncio.timeout(20):
            code = await crew.process.wait()
        for client in clients:
            await client.close()

    assert (rest, code) == ([b"".join(CHUNKS[1:])] * 2, 0)


async def test_workers_do_not_outlive_a_killed_parent_and_clear_up_after_it(tmp_path: Path) -> None:
    async with run_fleet() as fleet, run_crew(tmp_path / "r.json", fleet) as crew:
        pids = [crew.pid_of(0), crew.pid_of(1)]
        words = psutil.Process(pids[0]).cmdline()
        folder = Path(words[words.index("--folder") + 1])
        assert folder.is_dir()
        crew.process.kill()
        await crew.process.wait()
        try:
            async with asyncio.timeout(10):
                while any(is_alive(pid) for pid in pids):
                    await asyncio.sleep(0.05)
        finally:
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)
        assert not folder.exists()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_port_that_others_share_is_taken_all_the_same(tmp_path: Path) -> None:
    async with run_fleet() as fleet, run_crew(tmp_path / "one.json", fleet) as crew:
        port = int(crew.url.rpartition(":")[2])
        other = write_config(tmp_path / "two.json", fleet, workers=2, port=port)
        code, lines = await run_to_end(other)

    assert code == 9
    assert f"the router cannot listen on 127.0.0.1:{port}: the port is taken" in lines[-1]


def drained(told: dict[str, Any], engine: str) -> dict[str, bool]:
    """By worker."""
    return {n: worker["engines"][engine]["drained"] for n, worker in told["workers"].items()}


async def test_an_operator_is_heard_by_every_worker_and_by_those_that_come_later(
    tmp_path: Path,
) -> None:
    port = free_port()
    async with (
        run_fleet() as fleet,
        run_crew(tmp_path / "r.json", fleet, admin_port=port) as crew,
        fresh() as operator,
    ):

        async def admin(method: str, path: str) -> tuple[int, Any]:
            url = f"http://127.0.0.1:{port}/admin/{path}"
            async with operator.request(method, url) as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await answer.json() if is_json else await answer.text()

        status, told = await admin("POST", "engines/decode-0/drain")
        assert (status, set(told["workers"])) == (200, {"0", "1"})
        both = {"0": True, "1": True}
        assert drained((await admin("GET", "state"))[1], "decode-0") == both

        # Who takes another's place holds it back too, from its first request.
        os.kill(crew.pid_of(1), signal.SIGKILL)
        await read_until(crew.process, "worker=1 was killed")
        await read_until(crew.process, "worker=1 listening")
        assert drained((await admin("GET", "state"))[1], "decode-0") == both

        await admin("POST", "engines/decode-0/undrain")
        await read_until(crew.process, "every pair is warm in each of 2 workers")
        none = {"0": False, "1": False}
        assert drained((await admin("GET", "state"))[1], "decode-0") == none

        status, said = await admin("POST", "engines/decode-7/drain")
        assert (status, said) == (
            404,
            "There is no engine 'decode-7'; there are prefill-0, decode-0.\n",
        )
        (tmp_path / "r.json").write_text("{")
        status, told = await admin("POST", "reload")
        assert status == 409
        assert {told["workers"][n]["reloaded"] for n in ("0", "1")} == {False}


async def test_a_worker_that_is_gone_is_said_and_hears_of_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    port = free_port()
    async with (
        run_fleet() as fleet,
        run_crew(tmp_path / "r.json", fleet, admin_port=port) as crew,
        fresh() as operator,
    ):
        os.kill(crew.pid_of(0), signal.SIGKILL)
        await read_until(crew.process, "worker=0 was killed")
        url = f"http://127.0.0.1:{port}/admin/"
        async with operator.post(f"{url}engines/prefill-0/drain") as answer:
            told = await answer.json()
            assert answer.status == 200
        assert "does not answer" in told["workers"]["0"]["error"]
        await read_until(crew.process, "worker=0 listening")
        async with operator.get(f"{url}state") as answer:
            assert drained(await answer.json(), "prefill-0") == {"0": True, "1": True}


def test_workers_divide_what_is_meant_for_all_of_them() -> None:
    config = RouterConfig(
        host="h", port=1, served_model="m", engines=(), decode_at_once=9, queue_size=100,
        drain_lost_share=0.4, workers=4,
    )  # fmt: skip
    part = config.share(4)
    assert (part.decode_at_once, part.queue_size, part.drain_lost_share) == (3, 25, 0.1)
    assert part.prefill_at_once is None
    auto = config.model_copy(update={"prefill_at_once": "auto"})
    assert auto.share(4).prefill_at_once == "auto"
    assert config.share(1) is config
