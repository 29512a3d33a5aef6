"""How a request is served: both legs at once, one after the other, or by decode alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.router.harness import run_fleet

if TYPE_CHECKING:
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback
SENT = 'kvdeploy_router_sent_total{mode="%s"}'


async def watch(fleet: Fleet, **how: Any) -> str:
    """What a request looks like from the engines' side."""
    prefilled, decoded = len(fleet.prefill.clients), len(fleet.decode.clients)
    fleet.prefill.gate.clear()
    request = asyncio.create_task(fleet.post(**how))
    await fleet.until(
        lambda: len(fleet.prefill.clients) > prefilled or len(fleet.decode.seen) > decoded + 1,
        "a leg has arrived",
    )
    await asyncio.sleep(0.3)
    early = len(fleet.decode.clients) > decoded
    fleet.prefill.gate.set()
    status, _, _ = await request
    assert status == 200
    assert len(fleet.decode.clients) == decoded + 1
    if len(fleet.prefill.clients) == prefilled:
        assert "kv_transfer_params" not in fleet.decode.clients[-1].body
        return "alone"
    return "at once" if early else "in turn"


@pytest.mark.parametrize(("connector", "dispatch", "seen"), [
    ("push", None, "at once"),
    ("push", "push", "at once"),
    ("push", "push-sequential", "in turn"),
    ("push", "aggregated", "alone"),
    ("pull", None, "in turn"),
    ("pull", "pull", "in turn"),
    ("pull", "aggregated", "alone"),
])  # fmt: skip
async def test_the_configured_mode_is_how_requests_are_served(
    connector: str, dispatch: str | None, seen: str
) -> None:
    async with run_fleet(mode=connector, dispatch=dispatch) as fleet:
        assert await watch(fleet) == seen
        assert await fleet.metric(SENT % (dispatch or connector)) == 1


@pytest.mark.parametrize(("mode", "seen"), [
    ("push", "at once"), ("push-sequential", "in turn"), ("aggregated", "alone"),
])  # fmt: skip
async def test_a_header_chooses_the_mode_where_that_is_allowed(mode: str, seen: str) -> None:
    async with run_fleet(mode_header=True, dispatch="push-sequential") as fleet:
        assert await watch(fleet, headers={"X-Kvdeploy-Mode": mode}) == seen


async def test_a_mode_that_the_engines_cannot_do_is_refused_with_those_that_they_can() -> None:
    async with run_fleet(mode_header=True) as fleet:
        for mode in ("pull", "", "PUSH"):
            status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Mode": mode})
            assert (status, answer["error"]["code"]) == (400, "bad_mode")
            assert answer["error"]["message"] == (
                f"There is no mode {mode!r} here; there are push, push-sequential, aggregated."
            )
        assert fleet.decode.clients == []


async def test_a_mode_header_is_refused_where_it_is_not_allowed() -> None:
    async with run_fleet() as fleet:
        status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Mode": "push"})

    assert status == 400
    assert answer["error"]["message"] == "`X-Kvdeploy-Mode` is switched off in this service."


async def test_decode_alone_serves_while_no_prefill_is_up() -> None:
    async with run_fleet(
        2, 2, dispatch="aggregated", mode_header=True, decode_at_once=1, eject_after=1
    ) as fleet:
        await fleet.prefill.stop()
        await fleet.engines["prefill-1"].stop()
        pairs = fleet.service.table.pairs.values()
        await fleet.until(lambda: {p.state for p in pairs} == {"down"}, "no pair is left")
        assert (await fleet.get("/ready"))[1]["ready"] is True
        assert (await fleet.get("/ready?complete=1"))[0] == 503
        answers = [await fleet.post() for _ in range(4)]
        assert {answer[1]["by"] for answer in answers} == {"decode-0", "decode-1"}
        pinned = {"X-Kvdeploy-Pair": "prefill-1/decode-1"}
        assert (await fleet.post(headers=pinned))[1]["by"] == "decode-1"
        status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Mode": "push"})
        assert (status, answer["error"]["code"]) == (503, "no_pair_ready")

        table = fleet.service.table
        for decode in table.open_decodes:
            decode.requests += 1
        waiting = asyncio.create_task(fleet.post())
        await fleet.until(lambda: fleet.service.attempts.queued == 1, "it waits for room")
        for decode in table.open_decodes:
            decode.requests -= 1
        table.on_change()
        assert (await waiting)[0] == 200

        fleet.decode.fail = 500
        assert {(await fleet.post())[1]["by"] for _ in range(3)} == {"decode-1"}
        await fleet.decode.stop()
        await fleet.engines["decode-1"].stop()
        await fleet.until(lambda: not table.open_decodes, "no decode is left")
        assert (await fleet.get("/ready"))[0] == 503
        assert (await fleet.post())[0] == 503


@pytest.mark.parametrize(("letters", "seen"), [(39, "alone"), (40, "at once")])
async def test_prompts_below_a_length_go_to_decode_alone(letters: int, seen: str) -> None:
    async with run_fleet(aggregate_below_tokens=10) as fleet:
        assert await watch(fleet, prompt="x" * letters) == seen
