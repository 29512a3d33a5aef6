"""What `plan` announces against what `up` then does, one change after the other.

What up did is not asked of up: Terraform's own log, the instances of the double, the playbook's
log, and which start of each process runs before and after. A row that differs is named.
"""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks.rehearsal_wheel import write_wheel

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.rehearsal.world import World

AT_MOST_S: Final = 1200
REFUSED: Final = 4
TWO: Final = "fleet.decode.count=2"
BLOCKS: Final = "connector.block_size=32"
QUEUE: Final = "router.queue_size=7"
MODEL: Final = "model.seed=1"
ACTIONS: Final = {"create": "create", "delete": "destroy", "update": "update"}


@dataclass(frozen=True, kw_only=True)
class Change:
    title: str
    sets: tuple[str, ...] = ()
    replace: str | None = None
    beforehand: Callable[[World], None] | None = None
    """What happens behind kvdeploy's back."""
    refused: bool = False


def _other_pin(world: World) -> None:
    """The lock under its name, with one package more."""
    write_wheel(world.wheels, "kvdeploy-pin", "1.1")
    with world.lock.open("a") as lock:
        lock.write("kvdeploy-pin==1.1\n")


def _end_one(world: World) -> None:
    """EC2 takes an instance away."""
    found = next(m for m in world.double.instances() if m.tags["kvdeploy:node"] == "decode-0")
    world.double.terminate_instance(found.id)


CHANGES: Final = (
    Change(title="from nothing"),
    Change(title="nothing"),
    Change(title="decode 1 -> 2", sets=(TWO,)),
    Change(title="decode 2 -> 1"),
    Change(title="block size", sets=(BLOCKS,)),
    Change(title="the router's queue", sets=(BLOCKS, QUEUE)),
    Change(title="another model", sets=(BLOCKS, QUEUE, MODEL)),
    Change(
        title="another pin in the engines' lock", sets=(BLOCKS, QUEUE, MODEL), beforehand=_other_pin
    ),
    Change(title="`--replace decode-0`", sets=(BLOCKS, QUEUE, MODEL), replace="decode-0"),
    Change(title="EC2 ended decode-0", sets=(BLOCKS, QUEUE, MODEL), beforehand=_end_one),
    Change(title="another zone", sets=(BLOCKS, QUEUE, MODEL, "aws.zone=us-west-2b"), refused=True),
)


@dataclass(frozen=True, kw_only=True)
class Acts:
    """Everything that a run does, or is announced to do."""

    stages: tuple[str, ...] = ()
    configure: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    reload: tuple[str, ...] = ()
    terraform: dict[str, str] = field(default_factory=dict)
    """Address -> create, update, replace or destroy."""

    def __str__(self) -> str:
        parts = [
            f"{what}: {', '.join(names)}"
            for what, names in (
                ("ready", self.configure),
                ("start", self.start),
                ("restart", self.restart),
                ("stop", self.stop),
                ("reload", self.reload),
            )
            if names
        ]
        machines = [
            f"{act} {address.partition('[')[2].strip(chr(34) + ']')}"
            for address, act in sorted(self.terraform.items())
            if "aws_instance." in address
        ]
        others = len(self.terraform) - len(machines)
        parts += [*machines, *([f"{others} other resources"] if others else [])]
        return "; ".join(parts) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The world between two runs."""

    instances: Mapping[str, str]
    """Node -> id."""
    generations: Mapping[str, str]
    """Of every process that runs."""
    configuration: str
    """What the router says that it has read."""


def run(world: World) -> int:
    """Prints the table; 1 where a row is not as it was announced."""
    print("| change | plan says | `up` does | stages of `up` | s |\n|---|---|---|---|---|")
    wrong = [change.title for change in CHANGES if not _row(world, change)]
    if wrong:
        print(f"not as announced: {', '.join(wrong)}")
    return 1 if wrong else 0


def _row(world: World, change: Change) -> bool:
    if change.beforehand is not None:
        change.beforehand(world)
    sets = [word for one in change.sets for word in ("--set", one)]
    sets += ["--replace", change.replace] if change.replace else []
    planned = world.kvdeploy("plan", *sets, "--json", timeout_s=AT_MOST_S)
    before = _look(world)
    began = time.monotonic()
    done = world.kvdeploy("up", "--yes", *sets, "--json", timeout_s=AT_MOST_S)
    seconds = time.monotonic() - began
    after = _look(world)
    if change.refused:
        codes = (planned.returncode, done.returncode)
        reasons = planned.stderr.splitlines()[-3:], done.stderr.splitlines()[-3:]
        right = codes == (REFUSED, REFUSED) and reasons[0] == reasons[1] and before == after
        said = f"refused ({done.returncode})"
        _print(change.title, f"refused ({planned.returncode})", said, "-", seconds)
    elif planned.returncode or done.returncode:
        right = False
        _print(change.title, str(planned.returncode), str(done.returncode), "-", seconds)
        print(planned.stderr[-2000:], done.stderr[-2000:], world.trouble)
    else:
        announced, did = _announced(planned), _did(world, done, before, after)
        right = announced == did
        same = "the same" if right else str(did)
        _print(change.title, str(announced), same, ", ".join(did.stages) or "-", seconds)
        if not right:
            print(f"  announced: {announced}\n  did:       {did}")
    return right


def _print(*cells: object) -> None:
    *texts, seconds = cells
    print("| " + " | ".join([*map(str, texts), f"{seconds:.0f}"]) + " |", flush=True)


def _announced(planned: subprocess.CompletedProcess[str]) -> Acts:
    told = json.loads(planned.stdout)
    ahead = {k: tuple(v) for k, v in told["up"].items() if k != "silent"}
    terraform = {c["address"]: c["action"] for c in told["changes"]}
    return Acts(**ahead, terraform=terraform if "provision" in ahead["stages"] else {})


def _did(world: World, done: subprocess.CompletedProcess[str], before: Seen, after: Seen) -> Acts:
    run = max(
        (world.root / ".kvdeploy/rehearsal/runs").glob("*-up*"), key=lambda p: p.stat().st_mtime
    )
    was, now = before.generations, after.generations
    is_same_router = was.get("router") and was.get("router") == now.get("router")
    reloads = is_same_router and before.configuration != after.configuration
    terraform = _applied(run)
    _hold_to_instances(terraform, before, after)
    return Acts(
        stages=tuple(json.loads(done.stdout)["done"]),
        configure=_configured(run),
        start=tuple(sorted(now.keys() - was.keys())),
        restart=tuple(sorted(n for n in now.keys() & was.keys() if now[n] != was[n])),
        stop=tuple(sorted(was.keys() - now.keys())),
        reload=("router",) if reloads else (),
        terraform=terraform,
    )


def _hold_to_instances(terraform: dict[str, str], before: Seen, after: Seen) -> None:
    """Terraform's word against EC2's: what differs is put into the row."""
    was, now = before.instances, after.instances
    found = dict.fromkeys(now.keys() - was.keys(), "create")
    found |= dict.fromkeys(was.keys() - now.keys(), "destroy")
    found |= {n: "replace" for n in now.keys() & was.keys() if now[n] != was[n]}
    told = {
        a.partition('["')[2].rstrip('"]'): t for a, t in terraform.items() if "aws_instance." in a
    }
    if told != found:
        terraform["instances in EC2"] = str(found)


def _applied(run: Path) -> dict[str, str]:
    """What Terraform finished, by its own log."""
    log = run / "terraform.log"
    acts: dict[str, list[str]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("type") == "apply_complete" and event["hook"]["action"] in ACTIONS:
            address = event["hook"]["resource"]["addr"]
            acts.setdefault(address, []).append(ACTIONS[event["hook"]["action"]])
    return {a: did[0] if len(did) == 1 else "replace" for a, did in acts.items()}


def _configured(run: Path) -> tuple[str, ...]:
    log = run / "ansible.jsonl"
    events = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    starts = (e for e in events if e["event"] == "start" and e["playbook"] == "nodes.yml")
    return tuple(sorted(name for event in starts for name in event["limit"]))


def _look(world: World) -> Seen:
    instances = {
        m.tags["kvdeploy:node"]: m for m in world.double.instances() if m.state == "running"
    }
    told = world.kvdeploy("status", "--json", timeout_s=120)
    status: dict[str, Any] = json.loads(told.stdout) if told.stdout.strip() else {}
    runs = {p["name"]: p["generation"] for p in status.get("processes", ()) if p["generation"]}
    router = instances.get("router-0")
    return Seen(
        instances={node: machine.id for node, machine in instances.items()},
        generations=runs,
        configuration=_health(str(router.private_ip)) if router and "router" in runs else "",
    )


def _health(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}:8000/health", timeout=10) as answer:
        return str(json.load(answer).get("configuration", ""))
