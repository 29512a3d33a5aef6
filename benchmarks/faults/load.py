"""Clients that know the right answer: what they are told under a fault, sorted.

Owns what an answer counts as. A right answer is the one that a prefill engine gives alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence

LATE_S = 1.0
"""How much later than its deadline an answer may be."""
BAD = ("wrong", "misshapen", "cut", "late")
"""What no fault excuses."""


@dataclass(frozen=True)
class Asked:
    prompt: str
    max_tokens: int
    stream: bool

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }


@dataclass
class Told:
    """What all clients of a row were told."""

    outcomes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def count(self, outcome: str, code: str = "") -> None:
        self.outcomes[outcome] += 1
        if code:
            self.codes[code] += 1

    def describe(self) -> dict[str, Any]:
        names = ("right", "failed", "broken_streams", "no_router", *BAD)
        return {
            "requests": len(self.took),
            **{name: self.outcomes[name] for name in names},
            "codes": dict(sorted(self.codes.items())),
            "slowest_s": round(max(self.took, default=0.0), 1),
        }


def find_error(error: object) -> str:
    """The code of an error as OpenAI shapes it; nothing when it is another thing."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ""
    return str(error.get("code") or "") if error.get("type") else ""


class Clients:
    """`number` clients that ask in turn, every other one streamed, until `end`."""

    def __init__(
        self, url: str, expected: dict[str, str], *, max_tokens: int, number: int, total_s: float
    ) -> None:
        self._url, self._expected, self._max_tokens = url, expected, max_tokens
        self._number, self._total_s = number, total_s
        self.told = Told()
        self._over = asyncio.Event()

    def end(self) -> None:
        self._over.set()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._total_s + 60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._client(session, n) for n in range(self._number)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        prompts = list(self._expected)
        while not self._over.is_set():
            prompt = prompts[number % len(prompts)]
            asked = Asked(prompt, self._max_tokens, stream=number // self._number % 2 == 0)
            began = time.monotonic()
            await self._ask(session, asked)
            self.told.took.append(time.monotonic() - began)
            if self.told.took[-1] > self._total_s + LATE_S:
                self.told.count("late")
            number += self._number + 1

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        told, text = self.told, []
        try:
            async with session.post(f"{self._url}/v1/completions", json=asked.body) as answer:
                if answer.status != 200:
                    code = find_error((await answer.json(content_type=None)).get("error"))
                    told.count("failed" if code else "misshapen", code)
                    await asyncio.sleep(0.1)
                    return
                if not asked.stream:
                    text = [(await answer.json())["choices"][0]["text"]]
                elif (ended := await _read_stream(answer, text)) != "[DONE]":
                    self._judge_part(asked, "".join(text))
                    told.count("broken_streams" if ended else "cut", ended)
                    return
        except aiohttp.ClientError:
            self._judge_part(asked, "".join(text))
            told.count("no_router")
            await asyncio.sleep(0.1)
            return
        if "".join(text) == self._expected[asked.prompt]:
            told.count("right")
        else:
            self._mistake(asked, "".join(text))

    def _judge_part(self, asked: Asked, text: str) -> None:
        """Also what comes before a break must be right."""
        if not self._expected[asked.prompt].startswith(text):
            self._mistake(asked, text)

    def _mistake(self, asked: Asked, text: str) -> None:
        self.told.count("wrong")
        self.told.wrong.append(f"{asked.prompt[:40]!r}: {text!r}")


async def _read_stream(answer: aiohttp.ClientResponse, text: list[str]) -> str:
    """How it ended: [DONE], an error's code, or nothing at all."""
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return "[DONE]"
        event = json.loads(line[6:])
        if "error" in event:
            return find_error(event["error"])
        text.extend(choice["text"] for choice in event["choices"])
    return ""


async def learn(url: str, prompts: Sequence[str], max_tokens: int) -> dict[str, str]:
    """What an engine that does everything itself answers."""
    expected = {}
    async with aiohttp.ClientSession() as session:
        for prompt in prompts:
            body = Asked(prompt, max_tokens, stream=False).body
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                expected[prompt] = (await answer.json())["choices"][0]["text"]
    return expected


async def storm(url: str, prompts: Sequence[str], number: int) -> None:
    """Clients that leave 0 to 0.4 s after they asked."""

    async def one(session: aiohttp.ClientSession, at: int) -> None:
        asked = Asked(prompts[at % len(prompts)], 24, stream=at % 2 == 0)
        try:
            async with asyncio.timeout(0.4 * at / number):
                async with session.post(f"{url}/v1/completions", json=asked.body) as answer:
                    await answer.read()
        except (TimeoutError, aiohttp.ClientError):
            return

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session, at) for at in range(number)))


async def insist(url: str, prompts: Sequence[str], pair: str, seconds: float) -> None:
    """Clients that want their whole answer from one pair, and leave after a while."""
    timeout = aiohttp.ClientTimeout(total=seconds)

    async def one(session: aiohttp.ClientSession, prompt: str) -> None:
        body = Asked(prompt, 24, stream=False).body
        try:
            async with session.post(
                f"{url}/v1/completions", json=body, headers={"X-Kvdeploy-Pair": pair}
            ) as answer:
                await answer.read()
        except (TimeoutError, aiohttp.ClientError):
            return

    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(one(session, prompt) for prompt in prompts))
