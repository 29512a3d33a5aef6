"""Rung `fabric`: what libfabric's own programs said on a good node and on bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.model.reports import Verdict
from kvdeploy.planning.fabric import build_order, judge_domains, judge_rails, parse_domains

SAID: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/rungs/fabric.json").read_text()
)
FI_INFO, PING = SAID["fi_info"], SAID["ping"]
PAIR = "prefill-0/decode-0"


def test_a_domain_counts_once_whatever_fabrics_it_is_in() -> None:
    domains = parse_domains(FI_INFO["good"])
    assert FI_INFO["good"].count("domain: rdmap85s0-rdm") == 2
    assert len(domains) == 16
    assert domains[0] == "rdmap110s0-rdm"


def test_a_domain_of_another_provider_is_none() -> None:
    assert parse_domains("provider: tcp\n    domain: eth0\nprovider: efa\n    domain: a-rdm\n") == (
        "a-rdm",
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("one down", "libfabric has 15 of 16 domains of provider efa"),
        (
            "no driver",
            "libfabric has 0 of 16 domains of provider efa: fi_getinfo: -61 (No data available)",
        ),
    ],
)
def test_a_node_on_which_a_device_cannot_be_used_is_red(said: str, message: str) -> None:
    rung = judge_domains("decode-0", FI_INFO[said], 16, mocked=True)
    assert (rung.rung, rung.subject, rung.verdict) == ("fabric", "decode-0", Verdict.FAILED)
    assert rung.message == message


@pytest.mark.parametrize(("mocked", "verdict"), [(False, Verdict.PASSED), (True, Verdict.MOCKED)])
def test_a_node_with_all_devices_is_good(*, mocked: bool, verdict: Verdict) -> None:
    rung = judge_domains("decode-0", FI_INFO["good"], 16, mocked=mocked)
    assert rung.verdict is verdict
    assert rung.message.startswith("libfabric has 16 domains of provider efa")
    assert rung.evidence["wanted"] == 16


def test_a_program_that_is_not_there_is_told() -> None:
    said = "bash: line 1: /opt/amazon/efa/bin/fi_info: No such file or directory\n"
    rung = judge_domains("decode-0", said, 16, mocked=False)
    assert rung.message.endswith("No such file or directory")


# --- a ping over every rail ------------------------------------------------------------------
def rails(*said: str, code: int = 0) -> dict[str, Any]:
    return {
        "rails": [
            {"domain": f"rdmap{i}s0-rdm", "code": code if text != PING["good"] else 0, "said": text}
            for i, text in enumerate(said)
        ]
    }


def test_all_rails_answer() -> None:
    both = rails(PING["good"], PING["good"])
    rung = judge_rails(PAIR, 2, both, both, mocked=False)
    assert (rung.rung, rung.verdict) == ("fabric/rails", Verdict.PASSED)
    assert rung.message == "all 2 rails answer, rdmap0s0-rdm last, in 966.8 us"
    assert rung.evidence["microseconds"] == {"rdmap0s0-rdm": 966.76, "rdmap1s0-rdm": 966.76}
    assert judge_rails(PAIR, 2, both, both, mocked=True).verdict is Verdict.MOCKED


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (
            rails(PING["good"], PING["refused"], code=111),
            "1 of 2 rails answer; rdmap1s0-rdm: failed to connect: Connection refused",
        ),
        (
            rails(PING["late"], PING["good"], code=-9),
            "1 of 2 rails answer; rdmap0s0-rdm: no end in time",
        ),
        (rails(PING["good"]), "1 of 2 rails answer"),
        (rails(PING["good"], ""), "1 of 2 rails answer; rdmap1s0-rdm: no answer"),
        ({"error": "said nothing for 45 s"}, "prefill-0: said nothing for 45 s"),
    ],
)
def test_a_rail_that_does_not_answer_is_red(client: dict[str, Any], message: str) -> None:
    server = rails(PING["good"], PING["good"])
    rung = judge_rails(PAIR, 2, client, server, mocked=True)
    assert (rung.verdict, rung.message) == (Verdict.FAILED, message)


def test_a_ping_that_ended_badly_is_red_whatever_it_measured() -> None:
    good = rails(PING["good"])
    bad = {"rails": [good["rails"][0] | {"code": 1}]}
    assert judge_rails(PAIR, 1, bad, good, mocked=False).verdict is Verdict.FAILED
    assert judge_rails(PAIR, 1, good, good, mocked=False).verdict is Verdict.PASSED


def test_an_end_that_could_not_listen_is_red() -> None:
    gone = {"error": "/opt/amazon/efa/bin/fi_pingpong: No such file or directory"}
    rung = judge_rails(PAIR, 2, {}, gone, mocked=False)
    assert rung.verdict is Verdict.FAILED
    assert rung.message.startswith("decode-0: /opt/amazon/efa/bin/fi_pingpong: ")


def test_one_end_waits_and_the_other_is_told_where() -> None:
    server = build_order(("a", "b"))
    client = build_order(("a", "b"), peer="10.0.0.1", ports=[1, 2])
    assert server == {
        "program": "/opt/amazon/efa/bin/fi_pingpong",
        "domains": ["a", "b"],
        "deadline_s": 40.0,
        "port_base": 19600,
    }
    assert {k: client[k] for k in client.keys() - server.keys()} == {
        "peer": "10.0.0.1",
        "ports": [1, 2],
    }
