"""AWS errors, each in the form its service's clients can parse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, NoReturn
from xml.sax.saxutils import escape

NOT_IMPLEMENTED: Final = "DoubleNotImplemented"
DEFECT: Final = "DoubleDefect"
REQUEST_ID: Final = "00000000-0000-4000-8000-00000000d0b1"

QUERY_SERVICES: Final = frozenset({"iam", "sts", "elasticloadbalancing", "autoscaling"})
"""Services of the Query protocol, whose errors carry a type."""


class RefusalError(Exception):
    """An answer that is an error: raised anywhere below the gateway, written by it."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def refuse(code: str, message: str, *, status: int = 400) -> NoReturn:
    """Answer the request with this error."""
    raise RefusalError(code, message, status=status)


def refuse_unknown(what: str) -> NoReturn:
    """The double does not know this. HTTP 400: SDKs must not retry it."""
    refuse(NOT_IMPLEMENTED, f"The AWS test double does not implement {what}.")


@dataclass(frozen=True)
class Answer:
    """A whole HTTP response."""

    status: int
    content_type: str
    body: bytes
    error_type: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]]:
        listed = [
            ("Content-Type", self.content_type),
            ("Content-Length", str(len(self.body))),
            ("x-amzn-RequestId", REQUEST_ID),
        ]
        if self.error_type is not None:
            listed.append(("x-amzn-ErrorType", self.error_type))
        return listed


def render_error(refusal: RefusalError, *, service: str, wire: str) -> Answer:
    """`wire` is how the request came: "form", "json", "cbor" or "rest"."""
    code, message, status = refusal.code, refusal.message, refusal.status
    if wire == "json":
        body = json.dumps({"__type": code, "message": message, "Message": message}).encode()
        return Answer(status, "application/x-amz-json-1.1", body, error_type=code)
    if wire == "cbor":
        body = _cbor_map({"__type": code, "message": message})
        return Answer(status, "application/cbor", body, error_type=code)
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if service == "s3":
        text = f"<Error>{inner}<RequestId>{REQUEST_ID}</RequestId></Error>"
    elif service in QUERY_SERVICES:
        text = (
            f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error>"
            f"<RequestId>{REQUEST_ID}</RequestId></ErrorResponse>"
        )
    else:
        text = (
            f"<Response><Errors><Error>{inner}</Error></Errors>"
            f"<RequestID>{REQUEST_ID}</RequestID></Response>"
        )
    return Answer(status, "text/xml", f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode())


def expired_credentials(*, service: str, wire: str) -> RefusalError:
    """Each service has its own words for a token whose time is over."""
    if wire in {"json", "cbor"}:
        return RefusalError(
            "ExpiredTokenException", "The security token included in the request is expired"
        )
    if service == "ec2":
        return RefusalError("RequestExpired", "Request has expired.")
    if service == "s3":
        return RefusalError("ExpiredToken", "The provided token has expired.")
    return RefusalError(
        "ExpiredToken", "The security token included in the request is expired", status=403
    )


def access_denied(*, service: str, wire: str, action: str, identity: str) -> RefusalError:
    """No permission, in the service's own code."""
    if service == "ec2" and wire == "form":
        return RefusalError(
            "UnauthorizedOperation",
            f"You are not authorized to perform this operation. User: {identity} is not authorized "
            f"to perform: ec2:{action} because no identity-based policy allows the "
            f"ec2:{action} action",
            status=403,
        )
    message = (
        f"User: {identity} is not authorized to perform: {service}:{action} because no "
        f"identity-based policy allows the {service}:{action} action"
    )
    if wire in {"json", "cbor"}:
        return RefusalError("AccessDeniedException", message)
    return RefusalError("AccessDenied", message, status=403)


def _cbor_map(pairs: dict[str, str]) -> bytes:
    """A CBOR map of texts (RFC 8949), all that an error of RPC v2 needs."""

    def head(major: int, length: int) -> bytes:
        if length < 24:
            return bytes([major << 5 | length])
        return bytes([major << 5 | 25]) + length.to_bytes(2, "big")

    def text(value: str) -> bytes:
        raw = value.encode()[:65535]
        return head(3, len(raw)) + raw

    return head(5, len(pairs)) + b"".join(text(k) + text(v) for k, v in pairs.items())
