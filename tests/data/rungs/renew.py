"""Record what the two ends of a NIXL WRITE say, with real NIXL over loopback: write.json.

python -m tests.data.rungs.renew PYTHON      PYTHON: an engines' runtime, e.g. the one `up` built
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.model.launch import LaunchSpec, Readiness
from kvdeploy.planning import writing
from kvdeploy.stages.writing import program, write

HERE = Path(__file__).parent
Lies = Mapping[str, Mapping[str, object]]


class Told(Dialogue):
    lie: Mapping[str, object]

    def say(self, document: Mapping[str, object]) -> None:
        super().say({**document, **self.lie} if "role" in document else document)


def engine(name: str, role: str, python: str) -> LaunchSpec:
    ready = Readiness(url="x", timeout_s=1)
    env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "PATH": os.defpath}
    return LaunchSpec.model_validate(
        {"name": name, "role": role, "argv": (python,), "ready": ready, "env": env}
    )


def record(python: str, lies: Lies, *, rung: int = 0, kill: str = "") -> dict[str, object]:
    def begin(there: LaunchSpec) -> Dialogue:
        log = Path(tempfile.gettempdir()) / "renew.log"
        found = Told((python, "-c", program()), env=there.env, log=log)
        found.lie = lies.get(there.role, {})
        if there.role == kill:
            os.kill(found.pid, signal.SIGKILL)
        return found

    ends = engine("prefill-0", "prefill", python), engine("decode-0", "decode", python)
    rungs = list(write(*ends, begin, device="cpu", nonce="recorded", mocked=False))
    seen = rungs[rung if len(rungs) > 1 else 0]
    return {
        "shape": seen.rung.partition("/")[2],
        "wrote": seen.evidence["wrote"],
        "found": seen.evidence["found"],
        "verdict": seen.verdict.value,
        "message": seen.message,
    }


def main(python: str) -> None:
    twice = [{"name": "small", "count": 1, "bytes": 2 * writing.PIECE_BYTES}]
    recorded = {
        "good": record(python, {}, rung=2),
        "wrong": record(python, {"decode": {"nonce": "another"}}),
        "touched": record(python, {"prefill": {"shapes": twice}}),
        "killed": record(python, {}, kill="prefill"),
        "silent": record(python, {"decode": {"role": "target", "deadline_s": 0.0}}),
    }
    (HERE / "write.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
