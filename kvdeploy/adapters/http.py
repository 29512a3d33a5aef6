"""Plain HTTP to routers and engines: JSON in, JSON or an event stream out. No retries."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back, or why nothing did: then status is 0 and `error` says it."""

    status: int
    body: Any = None
    """The JSON document; the raw text when it was none."""
    events: tuple[dict[str, Any], ...] = ()
    """Of a stream, in order, without [DONE]."""
    done: bool = False
    """Whether a stream ended with [DONE]."""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    ttft_s: float | None = None
    """To the first event of a stream that carries a choice."""
    error: str = ""

    @property
    def message(self) -> str:
        """The error's text, in an OpenAI-shaped body or not."""
        if self.error:
            return self.error
        if isinstance(self.body, dict):
            inner = self.body.get("error", self.body)
            return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        return str(self.body)[:500]

    @property
    def is_openai_error(self) -> bool:
        body = self.body
        return isinstance(body, dict) and isinstance(body.get("error"), dict)


def get(
    url: str,
    *,
    timeout_s: float = 10,
    headers: Mapping[str, str] | None = None,
    trust: str | None = None,
) -> Answer:
    """`trust` is a file with the certificate that an https URL must show."""
    return _ask("GET", url, None, timeout_s, headers or {}, trust=trust)


def post(
    url: str,
    document: Mapping[str, Any],
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    trust: str | None = None,
) -> Answer:
    """POST JSON; an answer of type text/event-stream is read to its end."""
    return _ask("POST", url, document, timeout_s, headers or {}, trust=trust)


def _ask(
    method: str,
    url: str,
    document: Mapping[str, Any] | None,
    timeout_s: float,
    headers: Mapping[str, str],
    *,
    trust: str | None,
) -> Answer:
    started = time.monotonic()
    parts = urllib.parse.urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=timeout_s, context=trusting(trust)
            )
        body = None if document is None else json.dumps(document).encode()
        connection.request(
            method, target or "/", body, {"Content-Type": "application/json", **headers}
        )
        response = connection.getresponse()
        kept = {k.lower(): v for k, v in response.getheaders()}
        if kept.get("content-type", "").startswith("text/event-stream"):
            return _read_stream(response, kept, started)
        raw = response.read().decode("utf-8", "replace")
        return Answer(
            status=response.status,
            body=_json_or_text(raw),
            headers=kept,
            seconds=time.monotonic() - started,
        )
    except TimeoutError:
        waited = time.monotonic() - started
        return Answer(status=0, error=f"no answer within {waited:.1f} s", seconds=waited)
    except (OSError, http.client.HTTPException) as e:
        return Answer(
            status=0, error=f"{type(e).__name__}: {e}", seconds=time.monotonic() - started
        )
    finally:
        connection.close()


def trusting(certificate: str | None) -> ssl.SSLContext:
    """By this certificate alone, whatever name it is for: loopback has none of its own.

    Raises OSError.
    """
    if certificate is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def _read_stream(
    response: http.client.HTTPResponse, headers: Mapping[str, str], started: float
) -> Answer:
    events: list[dict[str, Any]] = []
    ttft_s, done = None, False
    for raw in response:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            continue
        event = _json_or_text(data)
        if isinstance(event, dict):
            if ttft_s is None and event.get("choices"):
                ttft_s = time.monotonic() - started
            events.append(event)
    failed = next((e for e in events if "error" in e), None)
    return Answer(
        status=response.status,
        body=failed,
        events=tuple(events),
        done=done,
        headers=headers,
        seconds=time.monotonic() - started,
        ttft_s=ttft_s,
    )


def _json_or_text(raw: str) -> Any:  # noqa: ANN401  # JSON is anything
    try:
        return json.loads(raw)
    except ValueError:
        return raw
