"""How many requests engines are given at once, and what becomes of the others."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.router.admission import Admission
from kvdeploy.router.choose import Chooser
from kvdeploy.router.loads import find_limit
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.pacing import weigh
from kvdeploy.router.reading import Reading
from tests.router.harness import run_fleet
from tests.router.test_choose import anyone, build_table, job

if TYPE_CHECKING:
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback
QUEUED = "kvdeploy_router_queued"
Reply = tuple[int, Any, Any]


def ask(fleet: Fleet, count: int, **how: Any) -> list[asyncio.Task[Reply]]:
    return [asyncio.create_task(fleet.post(**how)) for _ in range(count)]


async def until_queued(fleet: Fleet, count: int) -> None:
    for _ in range(200):
        if await fleet.metric(QUEUED) == count:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never were {count} requests queued")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_is_given_so_many_requests_at_once_and_the_others_in_turn(
    role: str,
) -> None:
    caps: dict[str, Any] = {f"{role}_at_once": 2}
    async with run_fleet(**caps) as fleet:
        engine = fleet.engines[f"{role}-0"]
        engine.gate.clear()
        asked = ask(fleet, 5)
        await until_queued(fleet, 3)
        # Prefill has no lease to keep for a request that waits: neither leg was sent.
        engines = fleet.engines.values()
        await fleet.until(lambda: all(len(e.clients) == 2 for e in engines), "two were sent")
        await asyncio.sleep(0.05)
        assert len(fleet.prefill.clients) == len(fleet.decode.clients) == 2

        engine.gate.set()
        assert [(await one)[0] for one in asked] == [200] * 5
        assert await fleet.metric(QUEUED) == 0
        assert await fleet.metric("kvdeploy_router_queue_seconds_count") == 3


async def test_a_burst_never_overfills_an_engine() -> None:
    async with run_fleet(2, 2, prefill_at_once=1) as fleet:
        for engine in fleet.engines.values():
            engine.gate.clear()
        asked = ask(fleet, 12)
        await until_queued(fleet, 10)
        prefills = [e for e in fleet.engines.values() if e.role == "prefill"]
        await fleet.until(lambda: all(e.clients for e in prefills), "each has a request")
        await asyncio.sleep(0.05)
        held = [len(engine.clients) for engine in prefills]
        for engine in fleet.engines.values():
            engine.gate.set()
        assert [(await one)[0] for one in asked] == [200] * 12

    assert held == [1, 1]


async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    async with run_fleet(prefill_at_once=1) as fleet:
        fleet.prefill.gate.clear()
        asked = []
        for number in range(4):
            asked += ask(fleet, 1, headers={"X-Request-Id": f"nr{number}"})
            await until_queued(fleet, number)
        fleet.prefill.gate.set()
        await asyncio.gather(*asked)
        order = [leg.request_id.split(".")[0] for leg in fleet.prefill.clients]

    assert order == ["nr0", "nr1", "nr2", "nr3"]


async def test_a_full_queue_is_429_with_the_time_to_try_again() -> None:
    async with run_fleet(prefill_at_once=1, queue_size=2) as fleet:
        fleet.prefill.gate.clear()
        asked = ask(fleet, 3)
        await until_queued(fleet, 2)
        status, answer, headers = await fleet.post()
        fleet.prefill.gate.set()
        await asyncio.gather(*asked)

    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"] == {
        "message": "All engines are busy, and 2 requests wait already.",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


async def test_the_wait_for_room_is_bounded() -> None:
    async with run_fleet(prefill_at_once=1, queue_wait_s=0.1) as fleet:
        fleet.prefill.gate.clear()
        [held] = ask(fleet, 1)
        await fleet.until(lambda: fleet.prefill.clients, "prefill is busy")
        status, answer, headers = await fleet.post()
        fleet.prefill.gate.set()
        assert (await held)[0] == 200
        assert len(fleet.prefill.clients) == 1

    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"]["message"] == "No engine had room for the request within 0.1 s."


async def test_a_queue_before_engines_that_have_gone_is_503() -> None:
    async with run_fleet(decode_at_once=1) as fleet:
        fleet.decode.gate.clear()
        held = ask(fleet, 1)
        await fleet.until(lambda: fleet.decode.clients, "decode is busy")
        waiting = ask(fleet, 1)
        await until_queued(fleet, 1)
        await fleet.prefill.stop()
        status, answer, _ = await waiting[0]
        fleet.decode.gate.set()
        await asyncio.gather(*held)

    assert (status, answer["error"]["code"]) == (503, "no_pair_ready")


async def test_who_leaves_the_queue_leaves_no_trace() -> None:
    async with run_fleet(prefill_at_once=1) as fleet:
        fleet.prefill.gate.clear()
        asked = ask(fleet, 3)
        await until_queued(fleet, 2)
        waiting = next(task for task in asked[1:])
        waiting.cancel()
        await until_queued(fleet, 1)
        fleet.prefill.gate.set()
        done = await asyncio.gather(asked[0], asked[2])
        assert [status for status, _, _ in done] == [200, 200]
        assert len(fleet.prefill.clients) == 2


async def test_a_pair_that_a_header_chose_does_not_wait() -> None:
    async with run_fleet(prefill_at_once=1, queue_size=0) as fleet:
        fleet.prefill.gate.clear()
        held = ask(fleet, 2, headers={"X-Kvdeploy-Pair": "prefill-0/decode-0"})
        await fleet.until(lambda: len(fleet.prefill.clients) == 2, "both were sent")
        fleet.prefill.gate.set()
        assert [(await one)[0] for one in held] == [200, 200]


async def test_who_comes_when_there_is_room_again_does_not_overtake_who_waits() -> None:
    table = build_table(1, 1, prefill_at_once=1)
    admission = Admission(table, Chooser(table, Metrics()), Metrics())
    until = asyncio.get_running_loop().time() + 5
    prefill = table.engines["prefill-0"]
    prefill.requests = 1
    first = asyncio.create_task(admission.enter(job(), anyone, until=until))
    await asyncio.sleep(0.01)
    prefill.requests = 0
    second = asyncio.create_task(admission.enter(job(), anyone, until=until))
    await asyncio.sleep(0.01)
    assert not second.done()

    table.on_change()
    done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    assert first in done
    assert await second


LIMIT = 'kvdeploy_router_prefill_limit{engine="prefill-0"}'


async def test_an_automatic_limit_begins_with_one_and_rises_with_the_queue() -> None:
    async with run_fleet(prefill_at_once="auto", admin_port=0) as fleet:
        assert await fleet.metric(LIMIT) == 1
        fleet.prefill.gate.clear()
        asked = ask(fleet, 40)
        await until_queued(fleet, 39)
        await fleet.until(lambda: len(fleet.prefill.clients) == 1, "one was sent")
        fleet.prefill.gate.set()
        assert [(await one)[0] for one in asked] == [200] * 40
        limit = await fleet.metric(LIMIT)
        prefill = fleet.service.table.engines["prefill-0"]
        assert limit > 1
        assert find_limit(fleet.service.config, prefill) == limit
        assert fleet.service.table.backlog.work == 0


async def test_each_prefill_has_a_limit_of_its_own() -> None:
    async with run_fleet(2, 1, prefill_at_once="auto") as fleet:
        for engine in fleet.engines.values():
            engine.gate.clear()
        asked = ask(fleet, 5)
        await until_queued(fleet, 3)
        prefills = [e for e in fleet.engines.values() if e.role == "prefill"]
        await fleet.until(lambda: [len(e.clients) for e in prefills] == [1, 1], "each has one")
        # Half of what waits is each one's share.
        assert fleet.service.table.backlog.work == weigh(3, 12) / 2
        for engine in fleet.engines.values():
            engine.gate.set()
        assert [(await one)[0] for one in asked] == [200] * 5


async def test_a_prompt_that_hangs_in_prefill_does_not_hold_up_the_others() -> None:
    async with run_fleet(prefill_at_once="auto") as fleet:
        prefill = fleet.service.table.engines["prefill-0"]
        assert prefill.pacer is not None
        for _ in range(30):
            assert (await fleet.post())[0] == 200
        fleet.prefill.gate.clear()
        asked = ask(fleet, 2)
        # Nothing happens that would wake the queue: it must look by itself.
        await fleet.until(lambda: len(fleet.prefill.clients) == 32, "the second was sent as well")
        fleet.prefill.gate.set()
        assert [(await one)[0] for one in asked] == [200] * 2


async def test_what_decode_computes_alone_does_not_wait_for_prefill() -> None:
    async with run_fleet(prefill_at_once="auto", mode_header=True, decode_at_once=2) as fleet:
        fleet.prefill.gate.clear()
        held = ask(fleet, 2)
        await until_queued(fleet, 1)
        status, _, _ = await fleet.post(headers={"X-Kvdeploy-Mode": "aggregated"})
        fleet.prefill.gate.set()
        assert status == 200
        assert [(await one)[0] for one in held] == [200, 200]


@pytest.mark.parametrize(("given", "shown"), [(None, math.inf), (3, 3.0), ("auto", 1.0)])
async def test_the_limit_is_shown(given: object, shown: float) -> None:
    async with run_fleet(prefill_at_once=given) as fleet:
        assert await fleet.metric(LIMIT) == shown


async def test_a_limit_that_was_found_survives_a_reload() -> None:
    async with run_fleet(prefill_at_once="auto") as fleet:
        fleet.prefill.gate.clear()
        asked = ask(fleet, 40)
        await until_queued(fleet, 39)
        fleet.prefill.gate.set()
        await asyncio.gather(*asked)
        found = await fleet.metric(LIMIT)
        fixed = fleet.config.model_copy(update={"prefill_at_once": 99})
        fleet.service.reload(Reading(config=fixed, keys=fleet.service.keys, tls=None))
        assert await fleet.metric(LIMIT) == 99
        fleet.service.reload(Reading(config=fleet.config, keys=fleet.service.keys, tls=None))
        assert await fleet.metric(LIMIT) == found > 1


async def test_a_prefill_that_is_gone_has_no_limit_any_more() -> None:
    gone = LIMIT.replace("prefill-0", "prefill-1")
    async with run_fleet(2, 1, prefill_at_once=3) as fleet:
        assert await fleet.metric(gone) == 3
        kept = tuple(e for e in fleet.config.engines if e.name != "prefill-1")
        fewer = fleet.config.model_copy(update={"engines": kept})
        fleet.service.reload(Reading(config=fewer, keys=fleet.service.keys, tls=None))
        assert await fleet.metric(gone) == 0
        assert await fleet.metric(LIMIT) == 3
