"""Turn a client's HTTP request into a Job, or say what is wrong with it. Pure.

Owns every rule about what a client may send. Never lets `kv_transfer_params` through: a wrong
one ends the engine's process, not only the request.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from kvdeploy.model.routing import MODES
from kvdeploy.router import errors
from kvdeploy.router.legs import Endpoint, Job, build_request_id
from kvdeploy.router.prefix import CHARS_PER_TOKEN, build_keys

if TYPE_CHECKING:
    from kvdeploy.model.routing import Mode, RouterConfig

MODE_HEADER = "X-Kvdeploy-Mode"
_PROMPT: dict[Endpoint, str] = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
}


def parse_job(
    endpoint: Endpoint,
    raw: bytes,
    *,
    client_id: str | None,
    served_model: str,
    total_s: float,
    block_size: int,
    mode: Mode,
    aggregate_below: int = 0,
) -> Job:
    """`mode` is what is wanted; a prompt that decode must or had better compute itself goes to
    decode alone: a push would find no taker, or not be worth it. Raises ApiError.
    """
    body = _parse_object(raw)
    model = body.get("model")
    if not isinstance(model, str):
        raise _wrong(param="model", rule="must be given, as a string")
    if "kv_transfer_params" in body:
        raise _wrong(
            param="kv_transfer_params", rule="belongs to the router; a client cannot give it"
        )
    if body.get("use_beam_search"):
        # Each step of a beam search is a new request that no prefill leg matches: D would hang.
        raise _wrong(param="use_beam_search", rule="does not work with separate prefill and decode")
    if not isinstance(body.get("stream", False), bool | None):
        raise _wrong(param="stream", rule="must be true or false")
    prompt_tokens = _estimate(endpoint, body, len(raw))
    if model != served_model:
        raise errors.model_not_found(model, served_model)
    is_alone = prompt_tokens < aggregate_below or _wants_prompt_logprobs(endpoint, body)
    return Job(
        endpoint=endpoint,
        raw=raw,
        body=body,
        request_id=build_request_id(client_id),
        stream=bool(body.get("stream")),
        prompt_tokens=prompt_tokens,
        prefix=build_keys(body.get(_PROMPT[endpoint]), block_size),
        total_s=total_s,
        mode="aggregated" if is_alone else mode,
    )


def parse_mode(header: str | None, config: RouterConfig) -> Mode:
    """The client's X-Kvdeploy-Mode, if it may have one. Raises ApiError."""
    if header is None:
        return config.usual_mode
    if not config.mode_header:
        raise errors.mode_header_off(MODE_HEADER)
    good = MODES[config.mode]
    for mode in good:
        if mode == header:
            return mode
    raise errors.unknown_mode(header, good)


def _wants_prompt_logprobs(endpoint: Endpoint, body: dict[str, Any]) -> bool:
    """Log probabilities of the prompt come from computing it: decode takes no KV for such a
    request (vllm 0.32), and prefill's blocks would wait for their lease to end.
    """
    if body.get("prompt_logprobs") is not None:
        return True
    echoes = endpoint == "/v1/completions" and bool(body.get("echo"))
    return echoes and body.get("logprobs") is not None


def parse_total_s(header: str | None, limit_s: float) -> float:
    """A client may shorten its own deadline, never lengthen it. Raises ApiError."""
    if header is None:
        return limit_s
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _wrong(param="X-Kvdeploy-Timeout-S", rule="must be a number of seconds above 0")
    return min(seconds, limit_s)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        message = f"The body is not JSON in UTF-8: {e}"
        raise errors.bad_request(message) from e
    if not isinstance(body, dict):
        message = "The body must be a JSON object."
        raise errors.bad_request(message)
    return body


def _estimate(endpoint: Endpoint, body: dict[str, Any], size: int) -> int:
    if endpoint == "/v1/chat/completions":
        if not isinstance(body.get("messages"), list):
            raise _wrong(param="messages", rule="must be given, as a list")
        return max(1, size // CHARS_PER_TOKEN)
    match body.get("prompt"):
        case str(text):
            return max(1, len(text) // CHARS_PER_TOKEN)
        case [int(), *_] as tokens:
            return len(tokens)
        case list():
            return max(1, size // CHARS_PER_TOKEN)
        case _:
            raise _wrong(
                param="prompt", rule="must be given, as a string, a list of strings or token ids"
            )


def _wrong(*, param: str, rule: str) -> errors.ApiError:
    return errors.bad_request(f"`{param}` {rule}.", param=param)
