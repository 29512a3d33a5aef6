from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.router.harness import run_fleet

if TYPE_CHECKING:
    from tests.router.harness import Fleet

pytestmark = pytest.mark.loopback


async def test_the_router_is_ready_only_after_a_pair_was_warmed() -> None:
    async with run_fleet(warm=False) as fleet:
        fleet.prefill.gate.clear()
        await fleet.until(lambda: fleet.prefill.seen, "the warm-up is on its way")
        status, answer = await fleet.get("/ready")
        assert (status, answer) == (
            503,
            {
                "ready": False,
                "complete": False,
                "pairs": {"prefill-0/decode-0": "warming"},
                "reasons": {},
            },
        )
        refused, error, headers = await fleet.post()
        assert (refused, headers["Retry-After"]) == (503, "1")
        assert error["error"]["message"] == (
            "No prefill and decode pair is ready: prefill-0/decode-0 is warming."
        )
        assert (await fleet.get("/health"))[0] == 200

        fleet.prefill.gate.set()
        await fleet.until_ready()
        assert await fleet.get("/ready") == (
            200,
            {
                "ready": True,
                "complete": True,
                "pairs": {"prefill-0/decode-0": "ready"},
                "reasons": {},
            },
        )


async def test_the_warm_up_has_the_configured_length_and_never_the_same_prompt() -> None:
    async with run_fleet(2, 1, warmup_tokens=33) as fleet:
        prompts = [leg.body["prompt"] for leg in fleet.decode.seen]

    assert [len(prompt) for prompt in prompts] == [33, 33]
    assert prompts[0][:4] != prompts[1][:4]
    assert all(0 < token < 250 for prompt in prompts for token in prompt)


async def test_a_prefill_that_hangs_in_its_warm_up_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdeploy.router.warmup.PATIENCE_S", 0.1)
    async with run_fleet(3, 1, warm=False) as fleet:
        fleet.prefill.gate.clear()
        states = fleet.service.table.states
        wanted = {"prefill-0/decode-0": "warming", "prefill-1/decode-0": "ready",
                  "prefill-2/decode-0": "ready"}  # fmt: skip
        await fleet.until(lambda: states() == wanted, "the others are ready")
        tried = len(fleet.prefill.seen)
        await asyncio.sleep(0.2)
        assert len(fleet.prefill.seen) == tried, "it is not tried again beside itself"
        fleet.prefill.gate.set()
        await fleet.until_ready()


async def test_one_usable_pair_is_ready_but_not_complete() -> None:
    async with run_fleet(1, 2, warm=False) as fleet:
        fleet.engines["decode-1"].fail = 500
        pairs = fleet.service.table.pairs
        await fleet.until(
            lambda: (
                pairs["prefill-0/decode-0"].state == "ready"
                and pairs["prefill-0/decode-1"].state == "down"
            ),
            "one pair is ready and one has failed",
        )
        status, answer = await fleet.get("/ready")
        complete, _ = await fleet.get("/ready?complete=1")
        assert (status, complete) == (200, 503)
        assert answer["reasons"] == {
            "prefill-0/decode-1": "warm-up failed: decode-1 answered 500: scripted 500"
        }

        fleet.engines["decode-1"].fail = 0
        await fleet.until_ready()
        assert (await fleet.get("/ready?complete=1"))[0] == 200


async def test_a_pair_that_moves_nothing_fails_its_warm_up_and_is_counted() -> None:
    deadlines = {"prefill_s": 0.05, "first_token_s": 0.05}
    async with run_fleet(warm=False, deadlines=deadlines) as fleet:
        fleet.fabric.engine_ids.clear()
        pair = fleet.service.table.pairs["prefill-0/decode-0"]
        await fleet.until(lambda: pair.failures, "the warm-up has failed")
        lost = await fleet.metric('kvdeploy_router_lost_writes_total{decode="decode-0"}')

        assert pair.state == "down"
        assert pair.reason == (
            "warm-up failed: the request did not finish within 0.1 s: decode-0 had not answered"
        )
    assert lost == 1


async def test_a_warm_up_is_judged_by_how_it_finished() -> None:
    async with run_fleet(warm=False) as fleet:
        fleet.decode.finish = "content_filter"
        pair = fleet.service.table.pairs["prefill-0/decode-0"]
        await fleet.until(lambda: pair.failures, "the warm-up has failed")

        assert pair.reason == "warm-up failed: decode-0 ended the warm-up with 'content_filter'"


async def test_pairs_of_a_decode_are_warmed_one_after_the_other() -> None:
    async with run_fleet(3, 1, warm=False) as fleet:
        fleet.engines["prefill-0"].gate.clear()
        await fleet.until(lambda: fleet.engines["prefill-0"].seen, "the first warm-up has begun")
        await asyncio.sleep(0.05)
        begun = sum(bool(fleet.engines[f"prefill-{i}"].seen) for i in range(3))
        fleet.engines["prefill-0"].gate.set()
        await fleet.until_ready()

    assert begun == 1


async def test_a_pair_of_different_connectors_is_never_used() -> None:
    async with run_fleet(warm=False) as fleet:
        fleet.prefill.mode = "pull"
        pair = fleet.service.table.pairs["prefill-0/decode-0"]
        await fleet.until(lambda: pair.failures, "the warm-up has failed")

        assert pair.reason == (
            "warm-up failed: prefill-0 runs the pull connector; the router is set to push"
        )
        assert not fleet.decode.seen


async def restart(fleet: Fleet, name: str, engine_id: str) -> None:
    engine = fleet.engines[name]
    await engine.stop()
    await fleet.until(lambda: not fleet.service.table.engines[name].up, f"{name} is ejected")
    engine.engine_id = engine_id
    await engine.start()


async def test_a_restarted_prefill_is_ejected_and_adopted_under_its_new_engine_id() -> None:
    async with run_fleet() as fleet:
        await fleet.post()
        await restart(fleet, "prefill-0", "prefill-0-g2")
        await fleet.until_ready()
        status, _, _ = await fleet.post()
        adopted = fleet.decode.clients[-1].params["remote_engine_id"]
        ejected = await fleet.metric('kvdeploy_router_ejections_total{engine="prefill-0"}')

    assert (status, adopted, ejected) == (200, "prefill-0-g2", 1)


async def test_a_prefill_that_restarted_unseen_fails_one_request_and_is_adopted() -> None:
    async with run_fleet() as fleet:
        fleet.fabric.engine_ids.clear()
        fleet.prefill.engine_id = "prefill-0-g2"
        fleet.fabric.engine_ids.add("prefill-0-g2")
        status, answer, _ = await fleet.post()
        assert (status, answer["error"]["message"]) == (
            502,
            "prefill-0 was restarted: it is prefill-0-g2 now, was prefill-0-g1",
        )
        await fleet.until_ready()
        warmed = [leg.params["remote_engine_id"] for leg in fleet.decode.seen]
        assert warmed == ["prefill-0-g1", "prefill-0-g1", "prefill-0-g2"]

        assert (await fleet.post())[0] == 200


async def test_an_engine_that_is_gone_is_named_and_comes_back_by_itself() -> None:
    async with run_fleet() as fleet:
        await restart(fleet, "decode-0", "decode-0-g2")
        await fleet.until_ready()
        assert (await fleet.post())[0] == 200
        await fleet.decode.stop()
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        status, answer = await fleet.get("/ready")

    assert status == 503
    assert answer["pairs"] == {"prefill-0/decode-0": "down"}
    assert answer["reasons"]["prefill-0/decode-0"].startswith("decode-0: no connection: ")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_finds_nobody_ejects_the_engine_before_health_looks(role: str) -> None:
    async with run_fleet(health_interval_s=30) as fleet:
        await fleet.engines[f"{role}-0"].stop()
        status, answer, _ = await fleet.post()

        assert (status, answer["error"]["code"]) == (502, f"{role}_unreachable")
        assert not fleet.service.table.engines[f"{role}-0"].up
        assert (await fleet.post())[0] == 503


async def test_an_unhealthy_answer_ejects_only_when_repeated() -> None:
    async with run_fleet() as fleet:
        fleet.decode.health = 503
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        assert state.reason == "/health answered 503"

        fleet.decode.health = 200
        await fleet.until_ready()


async def test_a_header_chooses_the_pair() -> None:
    async with run_fleet(2, 2) as fleet:
        for name in ("prefill-1/decode-0", "prefill-0/decode-1"):
            for _ in range(2):
                _, answer, headers = await fleet.post(headers={"X-Kvdeploy-Pair": name})
                assert headers["X-Kvdeploy-Pair"] == name
                assert answer["by"] == name.split("/")[1]


async def test_a_header_that_names_no_pair_is_told_the_good_ones() -> None:
    async with run_fleet(1, 2) as fleet:
        status, answer, _ = await fleet.post(headers={"X-Kvdeploy-Pair": "prefill-9/decode-0"})

    assert status == 400
    assert answer["error"]["message"] == (
        "There is no pair 'prefill-9/decode-0'; there are prefill-0/decode-0, prefill-0/decode-1."
    )


async def test_a_header_cannot_choose_a_pair_that_is_down_or_where_it_is_switched_off() -> None:
    header = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
    async with run_fleet() as fleet:
        await fleet.decode.stop()
        state = fleet.service.table.engines["decode-0"]
        await fleet.until(lambda: not state.up, "decode-0 is ejected")
        status, answer, _ = await fleet.post(headers=header)
        assert status == 503
        assert answer["error"]["message"].startswith(
            "The pair prefill-0/decode-0 is down (decode-0"
        )
    async with run_fleet(pair_header=False) as fleet:
        status, answer, _ = await fleet.post(headers=header)
        assert status == 400
        assert answer["error"]["message"] == "`X-Kvdeploy-Pair` is switched off in this service."


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
async def test_four_idle_pairs_take_turns(policy: str) -> None:
    async with run_fleet(2, 2, policy=policy) as fleet:
        used = [(await fleet.post())[2]["X-Kvdeploy-Pair"] for _ in range(8)]

    assert Counter(used) == dict.fromkeys(fleet.service.table.pairs, 2)


async def test_a_busy_prefill_is_passed_over() -> None:
    async with run_fleet(2, 1) as fleet:
        fleet.prefill.gate.clear()
        header = {"X-Kvdeploy-Pair": "prefill-0/decode-0"}
        held = asyncio.create_task(fleet.post(headers=header))
        await fleet.until(lambda: fleet.prefill.clients, "prefill-0 is busy")
        used = {(await fleet.post())[2]["X-Kvdeploy-Pair"] for _ in range(4)}
        fleet.prefill.gate.set()
        await held

    assert used == {"prefill-1/decode-0"}


async def test_data_parallel_ranks_take_turns_and_are_told_by_their_own_names() -> None:
    async with run_fleet(dp_size=2) as fleet:
        for _ in range(4):
            assert (await fleet.post())[0] == 200
        prefill, decode = fleet.prefill.clients, fleet.decode.clients

    assert [leg.rank for leg in prefill] == ["0", "1", "0", "1"]
    assert [leg.rank for leg in decode] == ["0", "1", "0", "1"]
    for leg in decode:
        [mate] = [p for p in prefill if p.request_id == leg.request_id]
        assert leg.params["remote_engine_id"] == f"prefill-0-g1_dp{mate.rank}"
        assert leg.params["remote_port"] == 26601 + int(mate.rank or 0)


async def test_every_combination_of_ranks_is_warmed() -> None:
    async with run_fleet(dp_size=2) as fleet:
        met = {(leg.params["remote_engine_id"][-1], leg.rank) for leg in fleet.decode.seen}

    assert met == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}


async def test_pull_mode_sends_decode_what_prefill_answered() -> None:
    async with run_fleet(mode="pull") as fleet:
        fleet.prefill.gate.clear()
        request = asyncio.create_task(fleet.post())
        await fleet.until(lambda: fleet.prefill.clients, "prefill has its leg")
        await asyncio.sleep(0.05)
        assert fleet.decode.clients == []
        fleet.prefill.gate.set()
        status, _, _ = await request
        [leg] = fleet.decode.clients

    assert status == 200
    assert leg.params["remote_block_ids"] == [[1, 2]]
    assert leg.params["transfer_mode"] == "pull"


async def test_pull_mode_answers_a_prefill_that_fails_without_troubling_decode() -> None:
    async with run_fleet(mode="pull") as fleet:
        fleet.prefill.fail = 500
        status, answer, _ = await fleet.post()

        assert (status, answer["error"]["code"]) == (502, "prefill_failed")
        assert fleet.decode.clients == []
