"""What a client is told when its request cannot be served: one error type, OpenAI's shape.

Owns the HTTP status, the machine-readable code and the sentence of every refusal. Never knows
how the answer is written to a socket.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


CODES = (
    "bad_mode",
    "bad_pair",
    "bad_request",
    "body_deadline",
    "body_encoded",
    "body_too_large",
    "decode_broke_off",
    "decode_busy",
    "decode_connect",
    "decode_ejected",
    "decode_failed",
    "decode_unreachable",
    "first_token_deadline",
    "inter_token_deadline",
    "invalid_api_key",
    "malformed",
    "model_not_found",
    "no_pair_ready",
    "no_such_route",
    "pair_not_ready",
    "prefill_broke_off",
    "prefill_busy",
    "prefill_connect",
    "prefill_deadline",
    "prefill_ejected",
    "prefill_failed",
    "prefill_restarted",
    "prefill_unreachable",
    "prefill_wrong_engine",
    "prefill_wrong_mode",
    "queue_full",
    "queue_timeout",
    "refused_by_engine",
    "router_bug",
    "total_deadline",
    "warmup_failed",
)
"""Every code that an error can have."""

RETRIED = tuple(
    code
    for code in CODES
    if code.startswith(("prefill_", "decode_")) or code == "first_token_deadline"
)
"""Codes of failures after which a request is tried on another pair."""


_LAST = {"Connection": "close"}
"""A body that was not read to its end: nothing more can come over that connection."""


class ApiError(Exception):
    """A refusal with everything that the answer needs."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})

    @property
    def content_type(self) -> str:
        return "application/json"

    def render_body(self) -> bytes:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def render_event(self) -> bytes:
        """The end of a stream that broke after its first byte."""
        return b"data: " + self.render_body() + b"\n\ndata: [DONE]\n\n"


class EngineRefusalError(ApiError):
    """An engine's own 4xx: the client made the mistake, so the engine's words reach it as they are.

    vLLM's own shape (0.32): {"error": {"message", "type", "param", "code"}}.
    """

    def __init__(self, status: int, message: str, *, content_type: str, body: bytes) -> None:
        super().__init__(status, "refused_by_engine", message)
        self._content_type = content_type
        self._body = body

    @property
    def content_type(self) -> str:
        return self._content_type

    def render_body(self) -> bytes:
        return self._body


class EngineFailureError(ApiError):
    """A leg broke. `engine` names who did it, or nobody when that cannot be told; `lost` says that
    its connection failed.
    """

    def __init__(
        self, status: int, code: str, message: str, *, engine: str = "", lost: bool = False
    ) -> None:
        kind = "upstream_timeout" if status == 504 else "upstream_error"
        super().__init__(status, code, message, kind=kind)
        self.engine = engine
        self.lost = lost


class EngineBusyError(EngineFailureError):
    """An engine has no room (429: vLLM's --max-num-queued-reqs). It is not sick; nothing began."""

    def __init__(self, role: str, message: str, *, engine: str) -> None:
        super().__init__(503, f"{role}_busy", message, engine=engine)
        self.headers = {"Retry-After": "1"}


def bad_request(message: str, *, param: str | None = None, code: str = "bad_request") -> ApiError:
    return ApiError(400, code, message, param=param)


def unauthorised() -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        "This service needs an API key: send `Authorization: Bearer <key>` with a key it knows.",
        kind="authentication_error",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(model: str, served: str) -> ApiError:
    return ApiError(
        404,
        "model_not_found",
        f"The model `{model}` does not exist. This service has `{served}`.",
        kind="NotFoundError",
        param="model",
    )


def body_too_large(limit: int) -> ApiError:
    message = f"The request body is larger than the limit of {limit} bytes."
    return ApiError(413, "body_too_large", message, headers=_LAST)


def body_encoded() -> ApiError:
    message = "The request body must come as it is, without a Content-Encoding."
    return ApiError(415, "body_encoded", message, headers=_LAST)


def body_too_slow(seconds: float) -> ApiError:
    message = f"The request body did not come within {seconds:g} s."
    return ApiError(408, "body_deadline", message, headers=_LAST)


def no_pair(states: Mapping[str, str]) -> ApiError:
    listed = ", ".join(f"{name} is {state}" for name, state in states.items())
    return ApiError(
        503,
        "no_pair_ready",
        f"No prefill and decode pair is ready: {listed or 'no engine is configured'}.",
        kind="service_unavailable",
        headers={"Retry-After": "1"},
    )


def queue_full(size: int) -> ApiError:
    return _too_many("queue_full", f"All engines are busy, and {size} requests wait already.")


def queue_timeout(seconds: float) -> ApiError:
    return _too_many("queue_timeout", f"No engine had room for the request within {seconds:.3g} s.")


def _too_many(code: str, message: str) -> ApiError:
    return ApiError(429, code, message, kind="rate_limit_error", headers={"Retry-After": "1"})


def pair_not_ready(name: str, state: str, reason: str) -> ApiError:
    because = f" ({reason})" if reason else ""
    return ApiError(
        503,
        "pair_not_ready",
        f"The pair {name} is {state}{because}.",
        kind="service_unavailable",
        headers={"Retry-After": "1"},
    )


def pair_header_off(header: str) -> ApiError:
    return bad_request(f"`{header}` is switched off in this service.", code="bad_pair")


def unknown_pair(name: str, good: Sequence[str]) -> ApiError:
    return bad_request(f"There is no pair {name!r}; there are {', '.join(good)}.", code="bad_pair")


def mode_header_off(header: str) -> ApiError:
    return bad_request(f"`{header}` is switched off in this service.", code="bad_mode")


def unknown_mode(name: str, good: Sequence[str]) -> ApiError:
    message = f"There is no mode {name!r} here; there are {', '.join(good)}."
    return bad_request(message, code="bad_mode")


Deadline = Literal[
    "prefill_deadline", "first_token_deadline", "inter_token_deadline", "total_deadline"
]


def deadline(message: str, *, code: Deadline, engine: str = "") -> EngineFailureError:
    return EngineFailureError(504, code, message, engine=engine)


def malformed(why: str) -> ApiError:
    """Of bytes that are no request: the parser's first line says why."""
    told = why.strip().splitlines()
    return ApiError(400, "malformed", f"This is not HTTP: {told[0] if told else 'unreadable'}")
