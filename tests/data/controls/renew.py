"""Keep what real runs on this machine have shown, from the reports of `kvdeploy smoke --restart`.

python -m tests.data.controls.renew controls REPORT   controls.json: broken pairs and a good one
python -m tests.data.controls.renew efa REPORT        efa.json: of a rehearsal
python -m tests.data.controls.renew ttft NAME REPORT  one case of ttft.json, its figures alone

`disturbed` of ttft.json is another's pull rounds with all threads of both engines on one core.
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def controls(report: dict[str, Any]) -> None:
    pair = report["pairs"][0]
    good = [r for r in report["rungs"] if r["subject"] == pair and r["rung"] != "ttft"]
    recorded: dict[str, Any] = {"good": {"router": "", "rungs": [_plain(r) for r in good]}}
    for rung in report["rungs"]:
        if rung["rung"] == "control" and "rungs" in rung["evidence"]:
            recorded[rung["subject"]] = rung["evidence"]
    _write(HERE / "controls.json", recorded)


def efa(report: dict[str, Any]) -> None:
    (rung,) = (r for r in report["rungs"] if "efa" in r["evidence"])
    _write(HERE / "efa.json", rung["evidence"])


def ttft(name: str, report: dict[str, Any]) -> None:
    (rung,) = (r for r in report["rungs"] if r["rung"] == "ttft")
    path = HERE / "ttft.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    _write(path, {**known, name: rung["evidence"]["rounds"]})


def _plain(rung: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rung.items() if k != "evidence"}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    what, *names, last = sys.argv[1:]
    told = json.loads(Path(last).read_text())
    if what == "controls":
        controls(told)
    elif what == "efa":
        efa(told)
    else:
        ttft(names[0], told)
