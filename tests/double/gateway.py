"""One request from its first byte to its answer: which call it is, what it meets, who answers."""

from __future__ import annotations

import io
import json
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import moto.ec2.urls
from moto.core.request import Request
from moto.core.routing import get_service_router
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.exceptions import NotFound

from tests.double.control import control
from tests.double.errors import (
    DEFECT,
    NOT_IMPLEMENTED,
    Answer,
    RefusalError,
    access_denied,
    expired_credentials,
    refuse_unknown,
    render_error,
)
from tests.double.imaging import Imaging
from tests.double.launch import Launching
from tests.double.network import Networking
from tests.double.placement import Placing
from tests.double.repairs import repair
from tests.double.reservations import Reserving
from tests.double.services import find_answer
from tests.double.spot import Spotting
from tests.double.world import WORLD, CallRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Environ = dict[str, Any]
    StartResponse = Callable[..., Any]

CONTROL_PATH: Final = "/_double"
PRETENDED: Final = frozenset({"ssm:SendCommand", "ssm:StartSession"})
"""moto answers these with a success and does nothing."""


class Ec2(Launching, Imaging, Reserving, Placing, Networking, Spotting):
    """The EC2 that answers in place of moto's."""


@dataclass(frozen=True)
class Call:
    service: str
    region: str
    action: str
    wire: str
    """"form", "json", "cbor" or "rest"."""
    target: str
    form: dict[str, str]


class Gateway:
    """The WSGI application."""

    def __init__(self, region: str) -> None:
        repair()
        moto.ec2.urls.url_paths["{0}/"] = Ec2.dispatch
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._region = region

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = b""
        if environ.get("HTTP_TRANSFER_ENCODING", "").lower() != "chunked":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
        if environ.get("PATH_INFO") == CONTROL_PATH:
            return _send(control(self._region, body), start_response)
        call = read_call(environ, body, self._region)
        record = CallRecord(call.service, call.action, call.region, time.time(), request=call.form)
        with WORLD.lock:
            WORLD.calls.append(record)
            wait_s = WORLD.wait_s(call.service, call.action)
        if wait_s:
            time.sleep(wait_s)  # noqa: TID251 - to be slow is what was asked for
        began = time.monotonic()
        with WORLD.lock:
            try:
                WORLD.settle()
                answer = self._answer(call, environ, body)
            except RefusalError as e:
                record.code = e.code
                answer = render_error(e, service=call.service, wire=call.wire)
        record.status = answer.status
        record.seconds = time.monotonic() - began
        if record.code is None and answer.status >= 400:
            record.code = _find_code(answer.body)
        if environ.get("REQUEST_METHOD") == "HEAD":
            answer = Answer(answer.status, answer.content_type, b"", answer.error_type)
        return _send(answer, start_response)

    def _answer(self, call: Call, environ: Environ, body: bytes) -> Answer:
        service, wire = call.service, call.wire
        if WORLD.credentials_expired:
            raise expired_credentials(service=service, wire=wire)
        fault = WORLD.take_fault(service, call.action)
        if fault is not None and fault.denied:
            raise access_denied(
                service=service, wire=wire, action=call.action, identity=WORLD.identity
            )
        if fault is not None:
            raise RefusalError(fault.code, fault.message, status=fault.status)
        if f"{service}:{call.action}" in PRETENDED:
            refuse_unknown(f"{service}:{call.action}")
        own = find_answer(call.target, call.action) if wire == "json" else None
        if own is not None:
            found = own(call.action, call.region, json.loads(body or b"{}"))
            return Answer(200, "application/x-amz-json-1.1", json.dumps(found).encode())
        return self._ask_moto(call, environ)

    def _ask_moto(self, call: Call, environ: Environ) -> Answer:
        """moto's answer; what it cannot do is said so that no SDK tries again."""
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], _: object = None) -> None:
            started.append((status, headers))

        try:
            chunks = self._moto(environ, start)
            body = b"".join(chunks)
        except RefusalError:
            raise
        except NotImplementedError as e:
            raise RefusalError(
                NOT_IMPLEMENTED,
                f"The AWS test double does not implement {call.service}:{call.action}: {e}",
            ) from e
        except Exception as e:
            traceback.print_exc(file=sys.stderr)
            raise RefusalError(
                DEFECT, f"{call.service}:{call.action} failed: {type(e).__name__}: {e}"
            ) from e
        status, headers = started[0]
        return MotoAnswer(int(status.split()[0]), "", body, None, tuple(headers))


@dataclass(frozen=True)
class MotoAnswer(Answer):
    given: tuple[tuple[str, str], ...] = ()

    @property
    def headers(self) -> list[tuple[str, str]]:
        return list(self.given)


def read_call(environ: Environ, body: bytes, region: str) -> Call:
    """Service and region stand in the signature, the action where the protocol puts it."""
    service = "unsigned"
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0]
    if scope.count("/") == 4:
        _, _, region, service, _ = scope.split("/")
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    path = environ.get("PATH_INFO", "")
    content = environ.get("CONTENT_TYPE", "")
    if target:
        return Call(service, region, target.rsplit(".", 1)[-1], "json", target, {})
    if content.startswith("application/cbor") or "/operation/" in path:
        return Call(service, region, path.rsplit("/", 1)[-1], "cbor", "", {})
    if content.startswith("application/x-www-form-urlencoded"):
        form = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        if "Action" in form:
            return Call(service, region, form.pop("Action"), "form", "", form)
    return Call(service, region, _rest_action(service, environ), "rest", "", {})


def _rest_action(service: str, environ: Environ) -> str:
    try:
        operation, _ = get_service_router(service).match(Request(dict(environ)))
    except (NotFound, NotImplementedError, LookupError, ValueError):
        return f"{environ.get('REQUEST_METHOD')} {environ.get('PATH_INFO')}"
    except Exception as e:  # noqa: BLE001 - botocore's own errors of services it does not have
        return f"{environ.get('REQUEST_METHOD')} {environ.get('PATH_INFO')} ({type(e).__name__})"
    return str(operation.name)


def _find_code(body: bytes) -> str | None:
    """The error code in an answer of moto's."""
    if body[:1] == b"{":
        try:
            found = json.loads(body)
        except ValueError:
            return None
        return str(found.get("__type") or found.get("code") or "").rsplit("#", 1)[-1] or None
    _, tag, rest = body.partition(b"<Code>")
    return rest.split(b"<", 1)[0].decode() if tag else None


def _send(answer: Answer, start_response: StartResponse) -> Iterable[bytes]:
    start_response(f"{answer.status} {'OK' if answer.status < 400 else 'Refused'}", answer.headers)
    return [answer.body]
