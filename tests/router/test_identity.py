"""An engine is used only if it says that it is the one that the table means."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from kvdeploy.model.routing import Engine
from kvdeploy.router import health
from kvdeploy.router.identity import find_stranger
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.table import Table
from tests.router.harness import build_config, run_fleet
from tests.router.scripted import Fabric, ScriptedEngine

if TYPE_CHECKING:
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback
PAIR = "prefill-0/decode-0"
FOREIGN = (
    "prefill-0 says that it is other.prefill-0.1; its id should begin with prefill-0-: "
    "another engine listens at "
)


async def until_refused(fleet: Fleet) -> None:
    state = fleet.service.table.engines["prefill-0"]
    await fleet.until(lambda: state.refused, "prefill-0 is refused")


def become_foreign(fleet: Fleet) -> None:
    """Its answers alone tell."""
    fleet.prefill.lists = False
    fleet.fabric.engine_ids.discard(fleet.prefill.engine_id)
    fleet.prefill.engine_id = "other.prefill-0.1"
    fleet.fabric.engine_ids.add("other.prefill-0.1")


async def test_an_engine_of_another_cluster_is_never_warmed_nor_used_and_told_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_fleet(warm=False) as fleet:
        become_foreign(fleet)
        await until_refused(fleet)
        asked = len(fleet.prefill.seen)
        status, answer, _ = await fleet.post()
        alive, health_answer = await fleet.get("/health")
        _, ready = await fleet.get("/ready")
        why = FOREIGN + fleet.prefill.describe().url
        state = 'kvdeploy_router_engine_state{engine="prefill-0",state="%s"}'
        assert (await fleet.metric(state % "refused"), await fleet.metric(state % "up")) == (1, 0)
        assert await fleet.metric('kvdeploy_router_refusals_total{engine="prefill-0"}') == 1
        assert (asked, len(fleet.prefill.seen), fleet.decode.seen) == (1, 1, [])

    assert (status, answer["error"]["code"]) == (503, "no_pair_ready")
    assert alive == 200
    assert health_answer["engines"]["prefill-0"] == {"state": "refused", "reason": why}
    assert health_answer["engines"]["decode-0"] == {
        "state": "up",
        "reason": "",
        "lost_blocks": 0,
    }
    assert ready["pairs"] == {PAIR: "refused"}
    assert ready["reasons"] == {PAIR: f"prefill-0: {why}"}
    refused = [r for r in caplog.records if r.getMessage().startswith("refused engine=")]
    assert [(r.levelno, r.getMessage()) for r in refused] == [
        (logging.ERROR, f"refused engine=prefill-0: {why}")
    ]


async def test_a_place_that_another_engine_has_taken_fails_one_request_and_is_refused() -> None:
    async with run_fleet() as fleet:
        become_foreign(fleet)
        status, answer, _ = await fleet.post()
        assert (status, answer["error"]["code"]) == (502, "prefill_wrong_engine")
        assert (await fleet.post())[0] == 503


@pytest.mark.parametrize(("nameless", "told"), [
    (False, "other.decode-0.1"), (True, "an engine without an id"),
])  # fmt: skip
async def test_a_decode_that_is_anothers_is_never_warmed_nor_used(
    *, nameless: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PARDON_S", 0.1)
    async with run_fleet(warm=False) as fleet:
        own, fleet.decode.engine_id = fleet.decode.engine_id, "other.decode-0.1"
        fleet.decode.nameless = nameless
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: state.refused, "decode-0 is refused")
        refusals = 'kvdeploy_router_refusals_total{engine="decode-0"}'
        while await fleet.metric(refusals) < 3:  # it was asked again, and again refused
            await asyncio.sleep(0.02)
        _, ready = await fleet.get("/ready")
        assert ready["reasons"] == {
            PAIR: f"decode-0: decode-0 says that it is {told}; its id should begin with decode-0-: "
            f"another engine listens at {fleet.decode.describe().url}"
        }
        assert (fleet.prefill.seen, fleet.decode.seen) == ([], [])

        fleet.decode.engine_id, fleet.decode.nameless = own, False
        await fleet.until_ready()


async def test_a_place_that_another_decode_has_taken_is_refused() -> None:
    async with run_fleet() as fleet:
        state = fleet.service.table.engines["decode-0"]
        await fleet.decode.stop()
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        fleet.decode.engine_id = "other.decode-0.1"
        warmed = len(fleet.decode.seen)
        await fleet.decode.start()
        await fleet.until(lambda: state.refused, "decode-0 is refused")
        assert (await fleet.post())[0] == 503
        assert len(fleet.decode.seen) == warmed


async def test_an_engine_that_lists_no_names_is_judged_by_its_answers() -> None:
    async with run_fleet(warm=False) as fleet:
        fleet.decode.lists = fleet.prefill.lists = False
        await fleet.until_ready()
        assert (await fleet.post())[0] == 200


@pytest.mark.parametrize("page", ["", "null", "[]", '{"data": 3}', '{"data": []}', "\x00"])
def test_a_page_that_tells_no_names_is_not_judged(page: str) -> None:
    engine = Engine(name="d", role="decode", url="http://h:1", engine_id="demo.d.@generation@")
    assert find_stranger(engine, "tiny", page) == ""
    assert find_stranger(engine, "tiny", None) == ""


async def test_a_refused_engine_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PARDON_S", 0.1)
    async with run_fleet(warm=False) as fleet:
        become_foreign(fleet)
        await until_refused(fleet)
        fleet.prefill.engine_id = "prefill-0-g2"
        fleet.fabric.engine_ids.add("prefill-0-g2")
        await fleet.until_ready()

        assert (await fleet.post())[0] == 200


async def test_a_refused_engine_that_restarts_as_the_right_one_is_adopted() -> None:
    async with run_fleet(warm=False) as fleet:
        become_foreign(fleet)
        await until_refused(fleet)
        await fleet.prefill.stop()
        state = fleet.service.table.engines["prefill-0"]
        await fleet.until(lambda: not state.up, "prefill-0 is ejected")
        fleet.prefill.engine_id = "prefill-0-g2"
        await fleet.prefill.start()
        await fleet.until_ready()


@pytest.mark.parametrize(("planned", "begins"), [
    ("demo.prefill-0.@generation@", "demo.prefill-0."),
    ("fixed", "fixed"),
    ("", ""),
])  # fmt: skip
def test_what_an_id_must_begin_with_is_what_stands_before_its_generation(
    planned: str, begins: str
) -> None:
    engine = Engine(name="p", role="prefill", url="http://h:1", engine_id=planned)
    assert engine.id_prefix == begins


def test_every_counter_of_every_engine_is_there_before_it_counts() -> None:
    fabric = Fabric()
    names = (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode"))
    metrics = Metrics()
    Table(build_config([ScriptedEngine(name, role, fabric) for name, role in names]), metrics)
    lines = metrics.render().decode().splitlines()

    for line in (
        'kvdeploy_router_ejections_total{engine="prefill-0"} 0.0',
        'kvdeploy_router_refusals_total{engine="decode-1"} 0.0',
        'kvdeploy_router_lost_writes_total{decode="decode-1"} 0.0',
        'kvdeploy_router_in_flight{engine="decode-1"} 0.0',
        'kvdeploy_router_leg_seconds_count{engine="decode-1",role="decode"} 0.0',
        'kvdeploy_router_engine_state{engine="decode-1",state="down"} 1.0',
        'kvdeploy_router_pair_ready{decode="decode-1",prefill="prefill-0"} 0.0',
        'kvdeploy_router_errors_total{code="prefill_deadline"} 0.0',
        'kvdeploy_router_requests_total{endpoint="/v1/completions",status="502"} 0.0',
        'kvdeploy_router_ttft_seconds_count{endpoint="/v1/chat/completions"} 0.0',
    ):
        assert line in lines
    assert not [row for row in lines if 'lost_writes_total{decode="prefill' in row]
