"""What an engine's answer is worth, whatever its status says. Pure.

Owns the signs of a failed leg inside a 200. Parses whole answers and the first event of a stream,
never a token after that.
"""

from __future__ import annotations

import json
from typing import Any

# A prompt that ends at once ends with "stop"; vLLM 0.32 pushes its KV as well
# (nixl/push_scheduler.request_finished). Every other ending frees P's blocks unsent.
_PREFILL_ENDS = frozenset({"length", "stop", "tool_calls"})
_DECODE_FAILS = frozenset({"error", "abort"})
_DATA = b"data:"
_GIVEN_UP = b'"finish_reason":"abort"'


def find_prefill_fault(body: bytes) -> str:
    """What P's answer says to be wrong with its prompt's KV, or nothing."""
    choices = _choices(_parse(body))
    if not choices:
        return "answered without a choice"
    for finish in _finishes(choices):
        if finish not in _PREFILL_ENDS:
            return f"ended the prompt with finish_reason {finish!r}"
    return ""


def find_decode_fault(body: bytes) -> str:
    """What a whole answer of D lacks, or nothing."""
    answer = _parse(body)
    if answer is None:
        return "answered something that is not a JSON object"
    return _find_fault(answer)


def find_stream_fault(first: bytes) -> str:
    """What the first bytes of D's stream lack, or nothing; an event that is cut is not judged."""
    event, end, _ = first.replace(b"\r\n", b"\n").partition(b"\n\n")
    if not end or not event.startswith(_DATA):
        return ""
    data = event.removeprefix(_DATA).strip()
    if data == b"[DONE]":
        return "ended its stream before the first token"
    answer = _parse(data)
    return "" if answer is None else _find_fault(answer)


def find_given_up(chunk: bytes) -> int:
    """Where in a stream's chunk the event begins that ends it unfinished, or -1.

    An engine that is told to stop ends its streams so, as if they were whole (vllm 0.32). Looks for
    bytes: inside a text the quotes would be escaped.
    """
    at = chunk.find(_GIVEN_UP)
    return -1 if at < 0 else max(0, chunk.rfind(_DATA, 0, at))


def _find_fault(answer: dict[str, Any]) -> str:
    if answer.get("error"):
        error = answer["error"]
        message = error.get("message") if isinstance(error, dict) else error
        return f"answered 200 with an error: {str(message)[:300]}"
    choices = _choices(answer)
    if not choices:
        return "answered without a choice"
    for finish in _finishes(choices):
        if finish in _DECODE_FAILS:
            return f"ended the answer with finish_reason {finish!r}"
    return ""


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _choices(answer: dict[str, Any] | None) -> list[dict[str, Any]]:
    found = (answer or {}).get("choices")
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def _finishes(choices: list[dict[str, Any]]) -> list[str | None]:
    return [choice.get("finish_reason") for choice in choices]
