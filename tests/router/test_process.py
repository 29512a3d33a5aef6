from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.router.harness import PROMPT, build_config, run_fleet
from tests.router.scripted import CHUNKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.router.harness import Fleet

pytestmark = [pytest.mark.loopback, pytest.mark.real_process]


@asynccontextmanager
async def run_router(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvdeploy.router", "--config", str(config),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_until(process: asyncio.subprocess.Process, words: str) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            if words in line.decode():
                return line.decode()
    pytest.fail(f"the router ended without {words!r}")


async def run_to_end(config: Path) -> tuple[int, list[str]]:
    async with run_router(config) as process, asyncio.timeout(10):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode().splitlines()


def write_config(path: Path, fleet: Fleet, **changes: Any) -> Path:
    engines = list(fleet.engines.values())
    path.write_text(build_config(engines, **changes).model_dump_json())
    return path


async def test_a_router_told_to_stop_finishes_its_stream_and_exits_with_0(tmp_path: Path) -> None:
    async with (
        run_fleet() as fleet,
        run_router(write_config(tmp_path / "router.json", fleet)) as process,
    ):
        listening = await read_until(process, "listening")
        port = listening.split(" port=")[1].split()[0]
        await read_until(process, "warmed")
        fleet.decode.gate.clear()
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {**PROMPT, "stream": True}
        async with fleet.session.post(url, json=body) as answer:
            assert await answer.content.readany() == CHUNKS[0]
            process.send_signal(signal.SIGTERM)
            await read_until(process, "stopping")
            fleet.decode.gate.set()
            rest = await answer.content.read()
        async with asyncio.timeout(10):
            code = await process.wait()

    assert (rest, code) == (b"".join(CHUNKS[1:]), 0)


async def test_a_taken_port_is_named_and_exits_with_9(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        async with run_fleet() as fleet:
            code, lines = await run_to_end(write_config(tmp_path / "r.json", fleet, port=port))

    assert code == 9
    assert lines[-1].endswith(
        f"the router cannot listen on 127.0.0.1:{port}: the port is taken (see `ss -ltnp` for who "
        "listens there, or set another router port)"
    )


@pytest.mark.parametrize(("text", "problem"), [
    ("{", "is not a router configuration: file: Invalid JSON"),
    ('{"host": "h", "port": "x"}', "is not a router configuration: port: Input should be"),
    ('{"host": "h", "port": 1, "served_model": "m", "engines": []}', "there is no prefill engine"),
    ('{"host": "h", "port": 1, "served_model": "m", "engines": [], "dispatch": "pull"}',
     "dispatch: engines with the push connector cannot do pull; they can push, push-sequential, "
     "aggregated"),
])  # fmt: skip
async def test_a_bad_configuration_is_one_clear_line_and_exits_with_3(
    tmp_path: Path, text: str, problem: str
) -> None:
    config = tmp_path / "router.json"
    config.write_text(text)

    code, lines = await run_to_end(config)

    assert (code, len(lines)) == (3, 1)
    assert problem in lines[0]


async def test_an_open_router_asks_for_keys_unless_it_is_told_not_to(tmp_path: Path) -> None:
    async with run_fleet() as fleet:
        config = write_config(tmp_path / "router.json", fleet, host="0.0.0.0")
        code, lines = await run_to_end(config)
        write_config(config, fleet, host="0.0.0.0", allow_anonymous=True)
        async with run_router(config) as process:
            listening = await read_until(process, "listening")
            url = f"http://127.0.0.1:{listening.split(' port=')[1].split()[0]}"
            write_config(config, fleet, host="0.0.0.0")
            process.send_signal(signal.SIGHUP)
            assert "asked for" in await read_until(process, "not reloaded")
            async with fleet.session.get(f"{url}/v1/models") as answer:
                assert answer.status == 200

    assert (code, len(lines)) == (3, 1)
    assert lines[0].endswith(
        f"{config}: host: 0.0.0.0 is reached from other machines, and no API keys are asked for "
        "(set api_key_file, listen on 127.0.0.1, or allow_anonymous)"
    )


async def test_a_missing_key_file_exits_with_3(tmp_path: Path) -> None:
    async with run_fleet() as fleet:
        config = build_config(list(fleet.engines.values()), api_key_file=str(tmp_path / "none"))
    (tmp_path / "router.json").write_text(json.dumps(config.model_dump(mode="json")))

    code, lines = await run_to_end(tmp_path / "router.json")

    assert (code, len(lines)) == (3, 1)
    assert "the API key file" in lines[0]
