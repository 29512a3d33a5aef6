"""The router with a certificate: what it serves, what it refuses, and how it takes up a new one."""

from __future__ import annotations

import shutil
import signal
import ssl
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from kvdeploy.adapters import http
from kvdeploy.errors import SpecError
from kvdeploy.router.reading import Reading
from kvdeploy.router.tls import find_expiry, read_tls
from tests.certificates import write_certificate
from tests.router.harness import PROMPT, run_fleet
from tests.router.scripted import CHUNKS
from tests.router.test_process import read_until, run_router, run_to_end, write_config

if TYPE_CHECKING:
    from pathlib import Path

process = pytest.mark.real_process


def trusting(certificate: str) -> aiohttp.TCPConnector:
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    return aiohttp.TCPConnector(ssl=context)


@process
@pytest.mark.loopback
async def test_a_new_certificate_is_taken_up_by_a_hangup_and_no_stream_breaks(
    tmp_path: Path,
) -> None:
    cert, key = write_certificate(tmp_path, "router")
    first = shutil.copy(cert, tmp_path / "first.crt")
    async with run_fleet() as fleet:
        config = write_config(tmp_path / "r.json", fleet, tls_cert_file=cert, tls_key_file=key)
        async with run_router(config) as running:
            listening = await read_until(running, "listening")
            url = f"https://127.0.0.1:{listening.split(' port=')[1].split()[0]}"
            await read_until(running, "warmed")
            fleet.decode.gate.clear()
            async with (
                aiohttp.ClientSession(connector=trusting(cert)) as client,
                client.post(f"{url}/v1/completions", json={**PROMPT, "stream": True}) as answer,
            ):
                assert await answer.content.readany() == CHUNKS[0]
                write_certificate(tmp_path, "other")
                shutil.copy(tmp_path / "other.key", key)
                running.send_signal(signal.SIGHUP)
                refused = await read_until(running, "not reloaded")
                still = http.get(f"{url}/health", trust=str(first))
                shutil.copy(tmp_path / "other.crt", cert)
                running.send_signal(signal.SIGHUP)
                await read_until(running, "reloaded")
                old = http.get(f"{url}/health", trust=str(first))
                new = http.get(f"{url}/health", trust=cert)
                fleet.decode.gate.set()
                rest = await answer.content.read()

    assert f"the TLS key {key} does not belong to the certificate {cert}" in refused
    assert (still.status, old.status, new.status) == (200, 0, 200)
    assert "certificate verify failed" in old.error
    assert rest == b"".join(CHUNKS[1:])


@process
@pytest.mark.loopback
async def test_plain_http_is_not_answered_where_there_is_a_certificate(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    async with run_fleet() as fleet:
        config = write_config(tmp_path / "r.json", fleet, tls_cert_file=cert, tls_key_file=key)
        async with run_router(config) as running:
            listening = await read_until(running, "listening")
            port = listening.split(" port=")[1].split()[0]
            assert http.get(f"http://127.0.0.1:{port}/health").status == 0


@process
async def test_a_certificate_that_cannot_be_used_exits_with_3(tmp_path: Path) -> None:
    cert, _ = write_certificate(tmp_path)
    async with run_fleet() as fleet:
        config = write_config(tmp_path / "r.json", fleet, tls_cert_file=cert)
        code, lines = await run_to_end(config)

    assert (code, len(lines)) == (3, 1)
    assert "tls_cert_file and tls_key_file go together, and only one of them is given" in lines[0]


async def test_tls_comes_and_goes_with_a_restart_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = write_certificate(tmp_path)
    async with run_fleet() as fleet:
        service = fleet.service
        changes = {"tls_cert_file": cert, "tls_key_file": key}
        config = service.config.model_copy(update=changes)
        service.reload(Reading(config=config, keys=service.keys, tls=read_tls(cert, key)))
        assert service.config.tls_cert_file is None
        assert (await fleet.post())[0] == 200
    assert "changed at the next start only: tls" in caplog.text


def test_a_certificate_is_held_to_its_key_and_says_when_it_ends(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, days=11)
    context = read_tls(cert, key)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert (find_expiry(context, cert) - time.time()) / 86400 == pytest.approx(10, abs=0.1)


def test_what_is_wrong_with_a_certificate_is_said(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    _, other = write_certificate(tmp_path, "other")
    _, hidden = write_certificate(tmp_path, "hidden", passphrase="s")
    (tmp_path / "text").write_text("hello")
    told = {
        (cert, None): "tls_cert_file and tls_key_file go together, and only one of them is given",
        (cert, other): f"the TLS key {other} does not belong to the certificate {cert}",
        (str(tmp_path / "hidden.crt"), hidden): "the TLS key needs a passphrase, and nobody is "
        "there to type it",
        (str(tmp_path / "text"), key): f"the TLS certificate {tmp_path / 'text'} is no PEM file",
        (cert, "/no"): "the TLS key /no cannot be read: [Errno 2] No such file or directory: '/no'",
    }
    for (one, two), message in told.items():
        with pytest.raises(SpecError) as caught:
            read_tls(one, two)
        assert caught.value.message == message


def test_a_certificate_that_has_ended_is_refused_by_its_clients(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, days=0.5)
    context = read_tls(cert, key)
    assert context is not None
    with pytest.raises(SpecError) as caught:
        find_expiry(context, cert)
    assert caught.value.message == (
        f"the TLS certificate {cert} is not taken by clients: certificate has expired"
    )
