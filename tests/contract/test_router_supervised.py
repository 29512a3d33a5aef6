"""The router as `up` runs it on one machine: real supervisor, workers and certificate."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from kvdeploy.adapters import http
from kvdeploy.adapters.local import machine
from kvdeploy.adapters.local.processes import Processes
from kvdeploy.planning.launch import build_router, router_url
from kvdeploy.polling import wait_for
from kvdeploy.router import reading
from tests.certificates import write_certificate
from tests.router.harness import PROMPT, build_config, run_fleet
from tests.router.scripted import CHUNKS
from tests.router.test_tls import trusting

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.loopback, pytest.mark.real_process]


async def test_two_workers_with_a_certificate_are_supervised_and_read_again_what_is_written(
    tmp_path: Path,
) -> None:
    cert, key = write_certificate(tmp_path)
    path, processes = tmp_path / "router.json", Processes(tmp_path / "processes")
    port = next(machine.free_ports(28500))
    async with run_fleet() as fleet:
        config = build_config(
            list(fleet.engines.values()), port=port, workers=2, tls_cert_file=cert, tls_key_file=key
        )
        path.write_text(config.model_dump_json())
        spec = build_router(config, python=sys.executable, config_path=str(path), version="1",
                            env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
        url = router_url(config)

        def is_complete() -> bool | None:
            return http.get(f"{url}/ready?complete=1", trust=cert).status == 200 or None

        def has_read() -> bool | None:
            told = http.get(f"{url}/health", trust=cert).body
            return told["configuration"] == reading.read(path).digest or None

        def is_ready() -> bool | None:
            return processes.observe("router").phase == "ready" or None

        try:
            processes.start(spec)
            assert await asyncio.to_thread(wait_for, is_ready, timeout_s=60)
            assert await asyncio.to_thread(wait_for, is_complete, timeout_s=60)
            before = processes.observe("router").pids
            fleet.decode.gate.clear()
            async with (
                aiohttp.ClientSession(connector=trusting(cert)) as client,
                client.post(f"{url}/v1/completions", json={**PROMPT, "stream": True}) as answer,
            ):
                assert await answer.content.readany() == CHUNKS[0]
                path.write_text(config.model_copy(update={"tries": 2}).model_dump_json())
                assert not await asyncio.to_thread(has_read)
                processes.hang_up("router")
                assert await asyncio.to_thread(wait_for, has_read, timeout_s=30)
                fleet.decode.gate.set()
                assert await answer.content.read() == b"".join(CHUNKS[1:])
            assert processes.observe("router").pids == before
            assert len(before) == 3, "a parent and two workers"
        finally:
            await asyncio.to_thread(processes.forget, "router")
        assert machine.port_is_free(port)
