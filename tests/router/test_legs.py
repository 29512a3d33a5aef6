from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvdeploy.router.legs import (
    Coordinates,
    Job,
    build_answered_params,
    build_decode_body,
    build_headers,
    build_prefill_body,
    build_push_params,
    build_request_id,
    parse_answered_params,
    parse_client_id,
)

AT = Coordinates(engine_id="P-g1", host="10.0.0.1", port=5600, tp_size=2)


def job(endpoint: Any = "/v1/completions", **body: Any) -> Job:
    body = {"model": "tiny", "prompt": "x", **body}
    return Job(endpoint=endpoint, raw=json.dumps(body).encode(), body=body, request_id="abc")


def test_the_prefill_leg_is_the_request_cut_down_to_one_token() -> None:
    sent = job(
        stream=True,
        stream_options={"include_usage": True},
        min_tokens=5,
        max_tokens=64,
        logprobs=3,
        temperature=0.5,
        n=2,
    )

    assert json.loads(build_prefill_body(sent)) == {
        "model": "tiny",
        "prompt": "x",
        "stream": False,
        "max_tokens": 1,
        "temperature": 0.5,
        "n": 2,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_request_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_id": "abc",
        },
    }


def test_a_chat_prefill_leg_limits_the_newer_name_of_max_tokens_as_well() -> None:
    body = json.loads(build_prefill_body(job("/v1/chat/completions", max_completion_tokens=64)))

    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)


def test_a_prefill_leg_gets_no_field_that_its_endpoint_does_not_have() -> None:
    assert "max_completion_tokens" not in json.loads(build_prefill_body(job()))


def test_the_decode_leg_is_the_clients_own_bytes_and_the_coordinates_of_prefill() -> None:
    raw = b' {"model":"tiny", "prompt":"\\u00e4 {}", "logit_bias":{}} \n'
    sent = Job(endpoint="/v1/completions", raw=raw, body=json.loads(raw), request_id="abc")

    body = build_decode_body(sent, build_push_params(sent, AT))

    assert body.startswith(b' {"model":"tiny", "prompt":"\\u00e4 {}", "logit_bias":{},')
    assert json.loads(body)["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P-g1",
        "remote_request_id": "cmpl-abc-0",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_id": "abc",
    }


def test_chat_requests_are_predicted_under_the_name_that_chat_gives_them() -> None:
    params = build_push_params(job("/v1/chat/completions"), AT)

    assert params["remote_request_id"] == "chatcmpl-abc"


def test_a_sequential_decode_leg_repeats_all_that_prefill_answered() -> None:
    answered = {"remote_block_ids": [[1]], "remote_num_tokens": 7}

    assert build_answered_params(job(), answered) == {**answered, "transfer_id": "abc"}


@pytest.mark.parametrize(
    "missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"]
)
def test_prefill_parameters_with_a_hole_are_never_passed_to_decode(missing: str) -> None:
    whole = {
        "remote_engine_id": "P",
        "remote_request_id": "cmpl-abc-0",
        "remote_host": "h",
        "remote_port": 1,
        "tp_size": 1,
    }
    assert parse_answered_params(json.dumps({"kv_transfer_params": whole}).encode()) == whole

    del whole[missing]

    assert parse_answered_params(json.dumps({"kv_transfer_params": whole}).encode()) is None


@pytest.mark.parametrize("body", [b"not json", b"[]", b"{}", b'{"kv_transfer_params":null}'])
def test_an_answer_without_parameters_is_no_transfer(body: bytes) -> None:
    assert parse_answered_params(body) is None


def test_both_legs_carry_one_request_id_and_their_own_rank() -> None:
    assert build_headers(job(), None) == {
        "Content-Type": "application/json",
        "X-Request-Id": "abc",
    }
    assert build_headers(job(), 3)["X-data-parallel-rank"] == "3"


def test_a_request_id_is_never_the_same_twice_and_starts_with_the_clients() -> None:
    first, second = build_request_id("order 7,x"), build_request_id("order 7,x")

    assert first != second
    assert re.fullmatch(r"order_7_x\.[0-9a-f]{32}", first)


@pytest.mark.parametrize("client_id", [None, "", "run-0badcafe", "a" * 500])
def test_a_request_id_is_one_that_engines_do_not_shorten(client_id: str | None) -> None:
    built = build_request_id(client_id)

    assert re.search(r"-[0-9a-f]{8}$", built) is None
    assert len(built) <= 128 + 1 + 32


def test_a_clients_id_is_echoed_only_as_far_as_a_header_may_hold_it() -> None:
    assert parse_client_id(" job-1:b ") == "job-1:b"
    assert parse_client_id("tab\tand \u00e4") == "tab_and__"
    assert parse_client_id("x" * 300) == "x" * 128
    assert parse_client_id(None) is None
