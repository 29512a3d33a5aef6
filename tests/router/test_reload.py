"""A new configuration is taken up while requests are under way."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.router.auth import Keys, read_keys
from kvdeploy.router.reading import Reading
from tests.router.harness import PROMPT, Fleet, run_fleet
from tests.router.scripted import CHUNKS, ScriptedEngine
from tests.router.test_process import read_until, run_router, write_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.loopback


def reload(fleet: Fleet, *names: str, **changes: Any) -> None:
    """To a fleet of these engines."""
    engines = tuple(fleet.engines[name].describe() for name in names)
    config = fleet.service.config.model_copy(update={"engines": engines, **changes})
    fleet.service.reload(Reading(config=config, keys=Keys([]), tls=None))


async def test_an_engine_that_is_taken_out_finishes_its_stream_and_gets_no_more() -> None:
    async with run_fleet(2, 2) as fleet:
        fleet.decode.gate.clear()
        pair = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
        body = {**PROMPT, "stream": True}
        url = fleet.url + "/v1/completions"
        async with fleet.session.post(url, json=body, headers=pair) as answer:
            assert await answer.content.readany() == CHUNKS[0]
            reload(fleet, "prefill-1", "decode-1")
            used = {(await fleet.post())[2]["X-Kvdeploy-Pair"] for _ in range(4)}
            assert used == {"prefill-1/decode-1"}
            fleet.decode.gate.set()
            rest = await answer.content.read()
        legs, looks = len(fleet.decode.seen), fleet.decode.looks
        assert (await fleet.get("/ready"))[1]["pairs"] == {"prefill-1/decode-1": "ready"}
        gauge = 'kvdeploy_router_pair_ready{decode="decode-%s",prefill="prefill-1"} '
        async with fleet.session.get(fleet.url + "/metrics") as page:
            text = await page.text()
        assert gauge % 1 in text
        assert gauge % 0 not in text
        assert 'engine_state{engine="decode-0"' not in text
        await asyncio.sleep(0.1)
        assert (len(fleet.decode.seen), fleet.decode.looks) == (legs, looks)

    assert rest == b"".join(CHUNKS[1:])


async def test_engines_that_stay_stay_warm_and_new_ones_are_warmed() -> None:
    async with run_fleet(1, 1) as fleet:
        new = ScriptedEngine("decode-1", "decode", fleet.fabric)
        await new.start()
        fleet.engines["decode-1"] = new
        warmed = len(fleet.decode.seen)
        reload(fleet, "prefill-0", "decode-0", "decode-1")
        assert (await fleet.post())[0] == 200, "while the new one is still cold"
        await fleet.until_ready()
        assert len(fleet.decode.seen) == warmed + 1, "the request, and no second warm-up"
        assert {(await fleet.post())[1]["by"] for _ in range(2)} == {"decode-0", "decode-1"}
        await new.stop()


async def test_an_engine_that_moved_is_another_engine() -> None:
    async with run_fleet(1, 1) as fleet:
        before = fleet.service.table.engines["decode-0"]
        moved = ScriptedEngine("decode-0", "decode", fleet.fabric)
        await moved.start()
        fleet.engines["decode-0"] = moved
        reload(fleet, "prefill-0", "decode-0")
        assert fleet.service.table.engines["decode-0"] is not before
        await fleet.until_ready()
        assert (await fleet.post())[0] == 200
        assert len(moved.clients) == 1
        await moved.stop()


async def test_what_fails_on_an_engine_that_is_gone_harms_no_other_of_its_name() -> None:
    async with run_fleet(1, 1, eject_after=1) as fleet:
        old, engine = fleet.service.table.engines["decode-0"], fleet.engines["decode-0"]
        engine.fail = 500
        engine.gate.clear()
        request = asyncio.create_task(fleet.post(stream=True))
        await fleet.until(lambda: engine.clients, "decode has its leg")
        moved = ScriptedEngine("decode-0", "decode", fleet.fabric)
        await moved.start()
        fleet.engines["decode-0"] = moved
        reload(fleet, "prefill-0", "decode-0")
        await fleet.until_ready()
        engine.gate.set()
        await request
        new = fleet.service.table.engines["decode-0"]
        fleet.service.table.eject(old, "late")
        fleet.service.table.lose(old, 9)
        assert new.up
        state = 'kvdeploy_router_engine_state{engine="decode-0",state="up"}'
        assert await fleet.metric(state) == 1
        assert await fleet.metric('kvdeploy_router_lost_blocks{decode="decode-0"}') == 0
        await engine.stop()
        await moved.stop()


async def test_deadlines_keys_and_caps_change_and_the_port_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_fleet() as fleet:
        keys = tmp_path / "keys"
        keys.write_text("new\n")
        config = fleet.service.config
        changed = config.model_copy(
            update={
                "port": 1,
                "deadlines": config.deadlines.model_copy(update={"prefill_s": 0.3, "connect_s": 9}),
            }
        )
        fleet.service.reload(Reading(config=changed, keys=read_keys(str(keys)), tls=None))
        assert (await fleet.post())[0] == 401
        fleet.prefill.gate.clear()
        status, answer, _ = await fleet.post(headers={"Authorization": "Bearer new"})
        fleet.prefill.gate.set()
        assert fleet.service.config.port == config.port

    assert (status, answer["error"]["code"]) == (504, "prefill_deadline")
    assert "changed at the next start only: port, deadlines.connect_s" in caplog.text


@pytest.mark.real_process
async def test_a_hangup_reads_the_file_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "router.json"
    async with run_fleet(1, 2) as fleet:
        write_config(path, fleet)
        async with run_router(path) as process:
            listening = await read_until(process, "listening")
            url = f"http://127.0.0.1:{listening.split(' port=')[1].split()[0]}"
            path.write_text("{")
            process.send_signal(signal.SIGHUP)
            assert "is not a router configuration" in await read_until(process, "not reloaded")
            del fleet.engines["decode-1"]
            write_config(path, fleet)
            process.send_signal(signal.SIGHUP)
            line = await read_until(process, "reloaded engines=")
            assert line.rstrip().endswith("engines=prefill-0,decode-0")
            async with fleet.session.get(url + "/ready") as answer:
                assert list((await answer.json())["pairs"]) == ["prefill-0/decode-0"]
            async with fleet.session.get(url + "/metrics") as answer:
                text = await answer.text()
            assert process.returncode is None
    assert 'reloads_total{outcome="done"} 1.0' in text
    assert 'reloads_total{outcome="refused"} 1.0' in text


async def test_pairs_that_are_to_stay_cold_serve_once_their_prefill_is_known() -> None:
    async with run_fleet(1, 1) as fleet:
        reload(fleet, "prefill-0", "decode-0", warm_pairs=False)
        await fleet.decode.stop()
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        fleet.decode.seen.clear()
        await fleet.decode.start()
        await fleet.until_ready()
        assert fleet.decode.seen == [], "nobody has asked it"
        assert (await fleet.post())[0] == 200
        assert len(fleet.decode.seen) == 1

        reload(fleet, "prefill-0", "decode-0", warm_pairs=True)
        await fleet.until(lambda: len(fleet.decode.seen) > 1, "what was left cold is warmed")
        await fleet.until_ready()


async def test_a_prefill_that_nobody_knows_is_warmed_all_the_same() -> None:
    async with run_fleet(1, 1, warm_pairs=False) as fleet:
        assert len(fleet.decode.seen) == 1
        assert (await fleet.post())[0] == 200
