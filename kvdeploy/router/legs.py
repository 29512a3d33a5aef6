"""Build the two legs of one request: bodies, headers and transfer parameters. Pure.

Owns what P and D are told. Never sends a decode leg with a coordinate missing: D's process
exits without `remote_request_id` (vllm 0.32, push_scheduler.update_state_after_alloc and
metadata.add_new_req_to_recv index the dictionary).
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kvdeploy.model.routing import Mode
    from kvdeploy.router.prefix import Key

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

ID_PREFIX: dict[Endpoint, str] = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
}
MAX_CLIENT_ID = 128
_encode = json.JSONEncoder(separators=(",", ":")).encode
# P generates one token that nobody reads: what only shapes the answer is dropped from its leg.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where D finds one data parallel rank of P, as P itself answered."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One client request, checked and ready to be sent."""

    endpoint: Endpoint
    raw: bytes
    """The client's body, a JSON object in UTF-8 without `kv_transfer_params`."""
    body: dict[str, Any]
    request_id: str
    """Ours: never the same for two requests, and the same on both legs."""
    stream: bool = False
    prompt_tokens: int = 1
    """An estimate, for balancing only."""
    prefix: tuple[Key, ...] = ()
    """Names of the prompt's beginnings, for finding who has them in its cache."""
    total_s: float = 600.0
    mode: Mode = "push"

    @property
    def needs_prefill(self) -> bool:
        """False when decode computes the prompt itself."""
        return self.mode != "aggregated"


def build_request_id(client_id: str | None) -> str:
    """A unique id that starts with the client's.

    vllm 0.32 joins ids with commas in heartbeats and strips a trailing `-<8 hex>` when it
    matches legs (nixl/base_worker.py, nixl/utils.py): neither may come from a client.
    """
    unique = uuid.uuid4().hex
    if not client_id:
        return unique
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', client_id[:MAX_CLIENT_ID])}.{unique}"


def parse_client_id(header: str | None) -> str | None:
    """The client's X-Request-Id as it may be echoed: printable ASCII of a bounded length."""
    return re.sub(r"[^\x21-\x7e]", "_", header.strip()[:MAX_CLIENT_ID]) if header else None


def predict_remote_request_id(endpoint: Endpoint, request_id: str) -> str:
    """The id that P will use, which D's heartbeats renew P's lease by.

    Exact when engines run with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1. Completions number their
    prompts (vllm 0.32, openai/completion/serving.py); only the first prompt's lease is renewed.
    """
    suffix = "-0" if endpoint == "/v1/completions" else ""
    return f"{ID_PREFIX[endpoint]}{request_id}{suffix}"


def build_prefill_body(job: Job) -> bytes:
    body = {key: value for key, value in job.body.items() if key not in _NOT_FOR_PREFILL}
    body["stream"] = False
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_request_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": job.request_id,
    }
    return _encode(body).encode()


def build_push_params(job: Job, at: Coordinates) -> dict[str, Any]:
    """What D is told when both legs leave at once.

    `remote_block_ids` is left out: push seeds it itself, and a D that runs the pull connector by
    mistake must not be handed an empty list (its process exits, vllm 0.32).
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": at.engine_id,
        "remote_request_id": predict_remote_request_id(job.endpoint, job.request_id),
        "remote_host": at.host,
        "remote_port": at.port,
        "tp_size": at.tp_size,
        "pp_size": at.pp_size,
        "dcp_size": at.dcp_size,
        "transfer_id": job.request_id,
    }


def build_answered_params(job: Job, answered: dict[str, Any]) -> dict[str, Any]:
    """What D is told when P has already answered."""
    return {**answered, "transfer_id": job.request_id}


def build_decode_body(job: Job, params: dict[str, Any] | None) -> bytes:
    """The client's own bytes with the transfer parameters, if any, put in before the last brace."""
    if params is None:
        return job.raw
    head = job.raw.rstrip()[:-1]
    return head + b',"kv_transfer_params":' + _encode(params).encode() + b"}"


def build_headers(job: Job, rank: int | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Request-Id": job.request_id}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    return headers


def parse_answered_params(body: bytes) -> dict[str, Any] | None:
    """P's `kv_transfer_params`, or None when it did not prepare a transfer."""
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict) or parse_coordinates(params) is None:
        return None
    return params


def parse_coordinates(params: dict[str, Any]) -> Coordinates | None:
    match params:
        case {
            "remote_engine_id": str(engine_id),
            "remote_request_id": str(),
            "remote_host": str(host),
            "remote_port": int(port),
            "tp_size": int(tp_size),
        }:
            return Coordinates(
                engine_id=engine_id,
                host=host,
                port=port,
                tp_size=tp_size,
                pp_size=params.get("pp_size") or 1,
                dcp_size=params.get("dcp_size") or 1,
            )
        case _:
            return None
