"""What the choice of a pair costs in fleets of different sizes, in CPU time of this process."""

from __future__ import annotations

import time

from kvdeploy.model.routing import Engine, RouterConfig
from kvdeploy.router.choose import Chooser
from kvdeploy.router.legs import Job
from kvdeploy.router.metrics import Metrics
from kvdeploy.router.prefix import build_keys
from kvdeploy.router.table import Table

SIZES = (1, 8, 64)
CHOICES = 2000
_WORDS = 200


def build_table(size: int) -> Table:
    """So many of each role, every pair of them ready."""
    engines = tuple(
        Engine(name=f"{role}-{i}", role=role, url=f"http://{role}-{i}:8000")
        for role in ("prefill", "decode")
        for i in range(size)
    )
    table = Table(
        RouterConfig(host="127.0.0.1", port=0, served_model="tiny", engines=engines), Metrics()
    )
    for engine in table.engines.values():
        engine.up = True
    for pair in table.pairs.values():
        pair.warmed = pair.epochs
    table.refresh()
    return table


def measure_us(size: int) -> float:
    table = build_table(size)
    chooser = Chooser(table, Metrics())
    jobs = [
        Job(
            endpoint="/v1/completions",
            raw=b"",
            body={},
            request_id="r",
            prompt_tokens=_WORDS,
            prefix=build_keys(f"{turn} " + "harbour " * _WORDS, 128),
        )
        for turn in range(CHOICES)
    ]
    began = time.thread_time()
    for job in jobs:
        if chooser.choose(job, lambda *_: True) is None:
            message = "a fleet with ready pairs had none"
            raise RuntimeError(message)
    return round((time.thread_time() - began) / CHOICES * 1e6, 1)


def measure() -> dict[str, float]:
    return {f"{size} x {size}": measure_us(size) for size in SIZES}


if __name__ == "__main__":
    print(measure())
