"""Blocks of decode that wait for a WRITE which will not come: counted, shown, at last drained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.router import table
from kvdeploy.router.gauges import KvGauges, parse_kv
from tests.router.harness import run_fleet

if TYPE_CHECKING:
    from kvdeploy.router.states import EngineState
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback
LOST = 'kvdeploy_router_lost_blocks{decode="decode-0"}'
PAIR = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
SAMPLES = Path(__file__).parents[1] / "data/metrics"


def page(*, used: float, blocks: int = 8, running: int = 0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
        f'vllm:cache_config_info{{block_size="4",num_gpu_blocks="{blocks}"}} 1.0\n'
    )


def test_a_real_engines_page_tells_its_blocks() -> None:
    text = (SAMPLES / "decode-1.prom").read_text()
    assert parse_kv(text) == KvGauges(used_share=0.0, blocks=512, busy=0)


def test_data_parallel_ranks_are_taken_together() -> None:
    text = page(used=0.5, running=2) + page(used=1.0, running=1)
    assert parse_kv(text) == KvGauges(used_share=0.75, blocks=16, busy=3)


def test_what_waits_for_kv_is_told_from_what_waits_for_room() -> None:
    text = (SAMPLES / "decode-1.prom").read_text()
    for reason, count in (("deferred", 2), ("capacity", 5)):
        text = text.replace(f'reason="{reason}"}} 0.0', f'reason="{reason}"}} {count}.0')
    found = parse_kv(text)
    assert found is not None
    assert found.deferred == 2


@pytest.mark.parametrize("text", [
    "", "vllm:kv_cache_usage_perc{} soon\n", page(used=7), page(used=float("nan")), "\x00",
])  # fmt: skip
def test_a_page_that_does_not_tell_is_not_believed(text: str) -> None:
    assert parse_kv(text) is None


async def lose(fleet: Fleet, times: int) -> None:
    """Requests whose prefill fails; each has a prompt of 16 letters, 4 tokens, one block."""
    fleet.prefill.fail = 500
    for _ in range(times):
        assert (await fleet.post(headers=PAIR))[0] == 502
    fleet.prefill.fail = 0


async def watch_half_full(fleet: Fleet) -> EngineState:
    """Decode 0 as the router knows it, once it has read that half of its cache is in use."""
    for engine in fleet.engines.values():
        engine.metrics = page(used=0.5)
    state = fleet.service.table.engines["decode-0"]
    await fleet.until(lambda: state.kv, "decode's metrics are read")
    return state


async def test_blocks_of_a_prompt_whose_write_never_comes_are_counted() -> None:
    async with run_fleet(block_size=3, eject_after=99) as fleet:
        await lose(fleet, 2)
        assert await fleet.metric(LOST) == 4
        _, told = await fleet.get("/health")

    assert told["engines"]["decode-0"]["lost_blocks"] == 4
    assert told["engines"]["decode-0"]["state"] == "up"


async def test_a_decode_that_has_lost_too_much_gets_no_requests_and_is_flagged() -> None:
    async with run_fleet(1, 2, block_size=4, eject_after=99) as fleet:
        state = await watch_half_full(fleet)
        await lose(fleet, 1)
        assert state.condition == "up"
        await lose(fleet, 1)
        why = "about 2 of 8 KV blocks are held for requests whose KV never came: restart it"
        _, told = await fleet.get("/health")
        assert told["engines"]["decode-0"] == {
            "state": "draining", "reason": why, "lost_blocks": 2,
        }  # fmt: skip
        _, ready = await fleet.get("/ready")
        assert ready["pairs"]["prefill-0/decode-0"] == "draining"
        assert ready["reasons"] == {"prefill-0/decode-0": f"decode-0: {why}"}
        shown = 'kvdeploy_router_engine_state{engine="decode-0",state="draining"}'
        assert await fleet.metric(shown) == 1
        for _ in range(4):
            _, answer, _ = await fleet.post()
            assert answer["by"] == "decode-1"


async def test_a_drained_decode_that_was_restarted_is_used_again() -> None:
    async with run_fleet(1, 2, block_size=4, eject_after=99) as fleet:
        state = await watch_half_full(fleet)
        await lose(fleet, 2)
        assert state.condition == "draining"
        engine = fleet.engines["decode-0"]
        await engine.stop()
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        engine.metrics = page(used=0.0)
        await engine.start()
        await fleet.until_ready()

        assert await fleet.metric(LOST) == 0
        assert (await fleet.post(headers=PAIR))[0] == 200


@pytest.mark.parametrize(("came_back", "lost"), [("decode-0-g2", 0), ("decode-0-g1", 2)])
async def test_what_a_decode_held_is_free_when_it_was_started_again_and_not_when_it_was_away(
    came_back: str, lost: int
) -> None:
    """It is never idle, so that its metrics do not tell."""
    async with run_fleet(block_size=4, eject_after=99) as fleet:
        fleet.decode.metrics = page(used=0.5, running=1, blocks=99)
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: state.kv, "decode's metrics are read")
        await lose(fleet, 2)
        await fleet.decode.stop()
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        fleet.decode.engine_id = came_back
        await fleet.decode.start()
        await fleet.until_ready()

        assert state.lost_blocks == lost
        assert await fleet.metric(LOST) == lost


async def test_the_last_decode_is_flagged_and_goes_on() -> None:
    async with run_fleet(block_size=4, eject_after=99) as fleet:
        state = await watch_half_full(fleet)
        await lose(fleet, 2)
        assert state.overdrawn
        assert state.reason.startswith("about 2 of 8 KV blocks are held")
        assert (await fleet.post())[0] == 200


async def test_what_an_idle_decode_goes_on_holding_is_lost_whoever_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a router finds it that was started after another was killed."""
    monkeypatch.setattr(table, "SETTLED_S", 0.2)
    async with run_fleet(block_size=4) as fleet:
        fleet.decode.metrics = page(used=0.5, running=1)
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: state.kv, "decode's metrics are read")
        await asyncio.sleep(0.3)
        assert state.lost_blocks == 0, "a busy decode holds what it works on"

        began = asyncio.get_running_loop().time()
        fleet.decode.metrics = page(used=0.5)
        await fleet.until(lambda: state.lost_blocks, "what is held is counted")
        assert state.lost_blocks == 4
        assert asyncio.get_running_loop().time() - began >= 0.2
        assert await fleet.metric(LOST) == 4

        fleet.decode.metrics = page(used=0.25)
        await fleet.until(lambda: state.lost_blocks == 2, "a late WRITE has freed two")


async def test_a_decode_that_others_use_is_not_taken_for_whole() -> None:
    async with run_fleet(block_size=4, eject_after=99) as fleet:
        fleet.decode.metrics = page(used=0.0, running=1)
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: state.kv, "decode's metrics are read")
        await lose(fleet, 1)
        state.kv = None
        await fleet.until(lambda: state.kv, "decode's metrics are read again")
        assert state.lost_blocks == 1

        fleet.decode.metrics = page(used=0.0)
        await fleet.until(lambda: not state.lost_blocks, "an idle decode that holds nothing")
