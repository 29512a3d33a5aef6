"""Push against a stock pull set-up, and against pull with everything else equal, on one GPU host.

    python -m benchmarks.h200x2 --python /path/of/python --model DIR [--vllm-router PROGRAM]
        --folder DIR [--json FILE] [--minutes 9.5] [--acts compare,cold,admission,tuning]
    python -m benchmarks.h200x2 --small --folder DIR      the same on CPUs, in small

Each set-up is a cluster of its own (`kvdeploy up --target local`), side by side on the same GPUs:
prefill on GPU 0 and decode on GPU 1, or both on the only one. They are asked in turns, by
`kvdeploy bench`'s own client. Acts: `compare` (kvdeploy's defaults in push, push-sequential and
aggregated; pull with all else equal; stock: NixlConnector, block 16, vllm-router), `cold` (first
requests of pairs), `admission` (the router's limits, on the same engines), `tuning` (block size,
batch, NIXL's threads, UCX). What was measured is in --folder after every run: the same command
goes on where the last one ended, by its time (--minutes, then exit code 3) or otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200x2 import page, summary
from benchmarks.h200x2.arms import ARMS, DEFAULT, LARGE, SMALL, Shape, build_acts
from benchmarks.h200x2.drive import Call, build_blocks, estimate_s, say
from benchmarks.h200x2.fleets import Cluster, Host, Place, UpError, search_path
from benchmarks.h200x2.ledger import Ledger
from kvdeploy import __version__
from kvdeploy.adapters.local import machine
from kvdeploy.proc import LocalRunner

if TYPE_CHECKING:
    from collections.abc import Callable

ACTS = ("compare", "cold", "admission", "tuning")
GO_ON = 3
QUICK_START = {
    "compilation-config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
}
"""Engines start in a third of the time; the same for every set-up."""
KEYS = ("input", "output", "seconds", "rounds", "cold_starts")


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    ledger = Ledger(options.folder / "measured")
    shape = _shape(options)
    acts = [act.only(options.arms) for act in build_acts(shape) if act.name in options.acts]
    blocks = list(build_blocks(acts, DEFAULT, shape, options.at_once, ledger))
    left = sum(len(block.jobs) for block in blocks)
    say(f"{left} runs are left, about {estimate_s(blocks, shape) / 60:.0f} min in one call")
    if options.estimate:
        return 0
    try:
        place = _place(options)
    except UpError as e:
        sys.exit(str(e))
    os.environ["PYTHONPATH"] = search_path()  # of all that is started from here
    began = time.monotonic()
    call = Call(
        host=Host(options.folder / "clusters", place, options),
        ledger=ledger,
        shape=shape,
        ends=began + options.minutes * 60 if options.minutes else float("inf"),
    )
    done = False
    try:
        done = call.make(blocks, _describe)
    finally:
        ledger.add_call(
            {
                "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "kvdeploy": __version__,
                "minutes": round((time.monotonic() - began) / 60, 1),
                "start_s": [round(s) for s in call.host.start_s],
                "smoke": call.smoke,
                "set_ups": call.set_ups,
                "failures": call.failures,
            }
        )
        try:
            _write(options, ledger, shape, place)
        finally:
            call.host.close()
    if not done:
        return GO_ON
    return 1 if call.failures else 0


def _describe(cluster: Cluster) -> dict[str, Any]:
    return cluster.describe(LocalRunner())


def _shape(options: argparse.Namespace) -> Shape:
    given = {
        "input_tokens": options.input,
        "output_tokens": options.output,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "cold_starts": options.cold_starts,
        "concurrency": options.concurrency,
        "scenarios": options.scenarios,
        "modes": options.modes,
    }
    shape = SMALL if options.small else LARGE
    return replace(shape, **{k: v for k, v in given.items() if v is not None})


def _place(options: argparse.Namespace) -> Place:
    gpus = () if options.small else machine.gpus(LocalRunner())[: options.gpus]
    if not gpus and not options.small:
        msg = "no NVIDIA GPU is here (nvidia-smi names none); --small runs on CPUs"
        raise UpError(msg)
    if options.small:
        model: dict[str, Any] = {"id": "builtin:tiny", "max_length": 2048}
        return Place(gpus=(), at_once=options.at_once, model=model, runtime={}, args={})
    model = {"id": str(options.model.resolve()), "load_format": options.load_format}
    model["max_length"] = max(2 * (options.input or LARGE.input_tokens), 16384)
    runtime: dict[str, Any] = {"env": options.env, "start_timeout_s": 400}
    if options.python:
        runtime["python"] = options.python
    return Place(
        gpus=tuple(gpus),
        at_once=options.at_once,
        model=model,
        runtime=runtime,
        args=QUICK_START | options.engine_arg,
        weights_gib=options.weights_gib,
    )


def _write(options: argparse.Namespace, ledger: Ledger, shape: Shape, place: Place) -> None:
    """All figures so far."""
    document = build_document(ledger, shape, place, small=options.small)
    target = options.json or options.folder / "report.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_lines(document))
    target.with_suffix(".html").write_text(page.render(ledger.entries, document))
    say(f"{len(ledger.entries)} runs so far: {target} and {target.with_suffix('.html').name}")
    for name, value in document["summary"].items():
        say(f"  {name}: {value}")


def _lines(document: dict[str, Any]) -> str:
    """A key a line, times to a microsecond: every sample is in it."""
    parts = (f"{json.dumps(key)}: {json.dumps(_short(value))}" for key, value in document.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _short(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def build_document(ledger: Ledger, shape: Shape, place: Place, *, small: bool) -> dict[str, Any]:
    calls = ledger.calls
    names = {e.arm for e in ledger.entries}
    set_ups: dict[str, Any] = {}
    for call in calls:
        set_ups |= call["set_ups"]
    found = summary.summarize(ledger.entries, shape)
    notes = []
    if small:
        notes.append("small: on CPUs, to show that the program works; no figure of it says more")
    if place.shared:
        notes.append("both engines of every set-up share one GPU: KV never leaves it")
    fronts = {s.get("router") for n, s in set_ups.items() if n == "stock"}
    if "stock" in names and fronts != {"vllm-router"}:
        notes.append("stock has kvdeploy's router before it: no vllm-router was given")
    if missing := [name for name, value in found.items() if value is None]:
        notes.append(f"not measured, or of too few samples: {', '.join(missing)}")
    notes += [f"failed: {what}" for call in calls for what in call["failures"]]
    gpus = "none" if not place.gpus else "1 shared" if place.shared else str(len(place.gpus))
    return {
        "when": calls[-1]["when"] if calls else "",
        "gpus": gpus,
        "notes": notes,
        "summary": found,
        "shape": vars(shape),
        "arms": {n: {"expected": a.expected} for n, a in ARMS.items() if n in names},
        "set_ups": set_ups,
        "sides": list(summary.tell_sides(ledger.entries)),
        "calls": calls,
        "runs": [
            {"act": e.act, "beside": e.beside, "arm": e.arm, "run": e.run.model_dump(mode="json")}
            for e in ledger.entries
        ],
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="runs so far, clusters, logs")
    parser.add_argument("--json", type=Path, help="the report; the page goes beside it")
    parser.add_argument("--small", action="store_true", help="builtin:tiny on CPUs, few samples")
    parser.add_argument("--python", help="interpreter with vllm and nixl; default: kvdeploy's own")
    parser.add_argument("--model", type=Path, help="a folder with config.json and a tokenizer")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    parser.add_argument("--weights-gib", type=float, default=16.0, help="of an engine's weights")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="at most so many")
    parser.add_argument(
        "--at-once", type=int, choices=(2, 3), default=2, help="clusters side by side"
    )
    parser.add_argument("--vllm-router", metavar="PROGRAM", help="stands before stock's engines")
    parser.add_argument("--vllm-router-arg", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--minutes", type=float, help="begin nothing that would take longer")
    parser.add_argument("--acts", type=_words(*ACTS), default=ACTS, help=",".join(ACTS))
    parser.add_argument(
        "--arms",
        type=_words(*ARMS),
        default=tuple(ARMS),
        help="beside default; all when not given: " + ", ".join(ARMS),
    )
    parser.add_argument("--concurrency", help="as 16,4,48; the first is the summary's")
    parser.add_argument(
        "--scenarios", type=_words("shared", "unique"), help="of compare: shared,unique"
    )
    parser.add_argument(
        "--modes", type=_words(*DEFAULT.modes), help="of default in compare: push,aggregated..."
    )
    for name in ("input", "output", "rounds", "cold-starts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seconds", type=float, help="of a run")
    parser.add_argument("--estimate", action="store_true", help="tell how long it takes, and end")
    options = parser.parse_args(argv)
    options.folder = options.folder.resolve()
    if not options.small and options.model is None:
        parser.error("--model is missing (or --small)")
    if options.vllm_router and shutil.which(options.vllm_router) is None:
        parser.error(f"--vllm-router: {options.vllm_router} is no program")
    try:
        options.concurrency = (
            tuple(map(int, options.concurrency.split(","))) if options.concurrency else None
        )
        options.env = dict(pair.split("=", 1) for pair in options.env)
        options.engine_arg = {
            k: _value(v) for k, v in (p.split("=", 1) for p in options.engine_arg)
        }
    except ValueError:
        parser.error("--concurrency is numbers, --env and --engine-arg are NAME=VALUE")
    return options


def _words(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Some of these, parted by commas."""

    def words(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if wrong := set(found) - set(known):
            msg = f"{', '.join(sorted(wrong))} is none of {', '.join(known)}"
            raise argparse.ArgumentTypeError(msg)
        return found

    return words


def _value(text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
