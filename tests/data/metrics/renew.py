"""Takes the samples in this folder from a fleet that runs. README.md says when and how."""

from __future__ import annotations

import argparse
import json
import re
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
DROPPED = re.compile(r"http_|python_|process_|[^ {]*_created[ {]")
"""Families that nothing here is asked for, and that are half of the text."""
PROMPT = "The harbour lights went out one by one, and the keeper wrote each of them down. "


def fetch(url: str, body: dict[str, object] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def ask(router: str, *, unlike: str, stream: bool) -> None:
    """One prompt of several blocks, none of them known to prefill."""
    prompt = f"{unlike} {PROMPT * 8}"
    body: dict[str, object] = {"model": "tiny", "prompt": prompt, "max_tokens": 16}
    fetch(f"{router}/v1/completions", {**body, "stream": stream})


def keep(text: str) -> str:
    return "".join(
        f"{line}\n"
        for line in text.splitlines()
        if not DROPPED.match(re.sub(r"^# (HELP|TYPE) ", "", line))
    )


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("turn", type=int, choices=(1, 2))
    words.add_argument("--router", default="http://127.0.0.1:8000")
    words.add_argument("--prefill", default="http://127.0.0.1:18100")
    words.add_argument("--decode", default="http://127.0.0.1:18101")
    options = words.parse_args()
    for i in range(4 + 2 * options.turn):
        ask(options.router, unlike=f"{options.turn}.{i}", stream=i % 2 == 0)
    for name in ("prefill", "decode"):
        text = keep(fetch(f"{getattr(options, name)}/metrics"))
        path = HERE / f"{name}-{options.turn}.prom"
        path.write_text(text)
        print(f"{path.name}: {len(text.splitlines())} lines, {len(text)} bytes")


if __name__ == "__main__":
    main()
