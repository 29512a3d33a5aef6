"""What an operator may see and do, from this machine only."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.router.harness import PROMPT, Fleet, run_fleet
from tests.router.scripted import CHUNKS
from tests.router.test_process import read_until, run_router, write_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.loopback


async def ask(fleet: Fleet, method: str, path: str, **headers: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{fleet.service.admin_port}{path}"
    async with fleet.session.request(method, url, headers=headers) as answer:
        json = answer.content_type == "application/json"
        return answer.status, await answer.json() if json else await answer.text()


async def test_the_state_of_engines_pairs_and_queue_is_shown() -> None:
    async with run_fleet(admin_port=0) as fleet:
        fleet.prefill.gate.clear()
        request = asyncio.create_task(fleet.post())
        await fleet.until(lambda: fleet.prefill.clients, "prefill has its leg")
        status, told = await ask(fleet, "GET", "/admin/state")
        fleet.prefill.gate.set()
        await request

    assert status == 200
    assert told == {
        "engines": {
            "prefill-0": {
                "state": "up",
                "reason": "",
                "drained": False,
                "url": fleet.prefill.describe().url,
                "requests": 1,
                "epoch": 0,
                "limit": None,
                "prompt_tokens": 4,
                "engine_ids": ["prefill-0-g1"],
            },
            "decode-0": {
                "state": "up",
                "reason": "",
                "drained": False,
                "url": fleet.decode.describe().url,
                "requests": 1,
                "epoch": 0,
                "lost_blocks": 0,
                "kv_used_share": None,
                "kv_blocks": None,
            },
        },
        "pairs": {"prefill-0/decode-0": {"state": "ready", "reason": ""}},
        "queued": 0,
    }


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_drained_engine_gets_no_requests_finishes_its_own_and_comes_back_warm(
    name: str,
) -> None:
    async with run_fleet(2, 2, admin_port=0) as fleet:
        fleet.decode.gate.clear()
        body = {**PROMPT, "stream": True}
        pair = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
        url = fleet.url + "/v1/completions"
        async with fleet.session.post(url, json=body, headers=pair) as answer:
            assert await answer.content.readany() == CHUNKS[0]
            status, told = await ask(fleet, "POST", f"/admin/engines/{name}/drain")
            assert (status, told[name]["state"]) == (200, "draining")
            assert told[name]["reason"] == "drained by an operator"
            for _ in range(4):
                assert name not in (await fleet.post())[2]["X-Kvdeploy-Pair"]
            _, ready = await fleet.get("/ready")
            assert ready["pairs"]["prefill-0/decode-0"] == "draining"
            assert ready["reasons"]["prefill-0/decode-0"] == f"{name}: drained by an operator"
            fleet.decode.gate.set()
            assert await answer.content.read() == b"".join(CHUNKS[1:])

        _, told = await ask(fleet, "POST", f"/admin/engines/{name}/undrain")
        assert told[name]["state"] == "up"
        assert set(fleet.service.table.states().values()) == {"ready"}, "no second warm-up"


async def test_an_engine_that_is_not_there_is_refused_with_those_that_are() -> None:
    async with run_fleet(admin_port=0) as fleet:
        status, text = await ask(fleet, "POST", "/admin/engines/decode-7/drain")

    assert (status, text) == (
        404,
        "There is no engine 'decode-7'; there are prefill-0, decode-0.\n",
    )


@pytest.mark.parametrize("headers", [
    {"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "10.0.0.1:8001"},
    {"Host": "[::"},
])  # fmt: skip
async def test_what_a_web_page_may_have_sent_is_refused(headers: dict[str, str]) -> None:
    async with run_fleet(admin_port=0) as fleet:
        status, _ = await ask(fleet, "POST", "/admin/engines/decode-0/drain", **headers)
        assert fleet.service.table.engines["decode-0"].condition == "up"

    assert status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8001", "[::1]:8001"])
async def test_names_of_this_machine_are_good(host: str) -> None:
    async with run_fleet(admin_port=0) as fleet:
        assert (await ask(fleet, "GET", "/admin/state", Host=host))[0] == 200


async def test_admin_is_not_on_the_clients_port_and_nowhere_unless_asked_for() -> None:
    async with run_fleet() as fleet:
        assert (await fleet.get("/admin/state"))[0] == 404
        assert fleet.service.admin_port == 0
    async with run_fleet(admin_port=0, host="0.0.0.0") as fleet:
        assert (await fleet.get("/admin/state"))[0] == 404
        with socket.socket() as other:
            # Every address of this machine but the one that admin has is free to be taken.
            other.bind(("127.0.0.2", fleet.service.admin_port))


@pytest.mark.real_process
async def test_admin_reloads_the_file_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    async with run_fleet() as fleet:
        write_config(path, fleet, admin_port=0)
        async with run_router(path) as process:
            listening = await read_until(process, "listening admin")
            port = listening.split(" port=")[1].split()[0]
            url = f"http://127.0.0.1:{port}/admin/reload"
            async with fleet.session.post(url) as answer:
                assert (answer.status, (await answer.json())["reloaded"]) == (200, True)
            path.write_text("{")
            async with fleet.session.post(url) as answer:
                told = await answer.json()
                assert (answer.status, told["reloaded"]) == (409, False)
                assert "is not a router configuration" in told["reason"]
