"""What `up` would do on the nodes of a cluster on AWS, told without doing it: the stages' own
inputs, results as far as they can be known, and what nodes say of themselves.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from kvdeploy.errors import ToolError
from kvdeploy.model.infra import Action, NodeOutputs, ProvisionOutputs
from kvdeploy.model.inventory import Host
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, NodeFacts
from kvdeploy.pipeline import digest_of
from kvdeploy.planning.fleetplan import machines_of
from kvdeploy.planning.forecast import Forecast, Processes, compare_processes
from kvdeploy.planning.launch import ROUTER
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.stages.configure import ConfigureStage, NodeModelStage
from kvdeploy.stages.nodefleet import NodeFleetStage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvdeploy.model.record import Record
    from kvdeploy.stages.base import Results, Stage
    from kvdeploy.stages.nodes import Crew

STAGES: Final = ("provision", "configure", "model", "fleet", "proof")
NOWHERE: Final = "0.0.0.0"  # noqa: S104  # the address of a machine that is not there yet


def foresee(
    record: Record,
    crew: Crew,
    instances: Mapping[str, Action],
    *,
    provision: bool,
) -> Forecast:
    """What `up` will do.

    Args:
        record: of what was brought up.
        crew: of what is wanted.
        instances: node -> what Terraform will do to its machine.
        provision: whether that stage has something to do.
    """
    if "provision" not in record.stages:
        return _everything(crew)
    known = ProvisionOutputs.model_validate(record.stages["provision"].result)
    wanted, new = _nodes(crew, known, instances)
    told = _ask(crew, known) if "configure" in record.stages else {}
    kept = {n: f for n, f in told.items() if n in wanted.nodes and n not in new}
    results: Results = {"provision": wanted.model_dump(mode="json")}
    due = {"provision"} if provision else set()

    before = record.stages.get("configure")
    configure = ConfigureStage(crew, before.result if before else None)
    limit, configured = configure.foresee(wanted, kept)
    if limit or _is_new(configure, record, results):
        due.add("configure")
    results["configure"] = configured.model_dump(mode="json")

    model = NodeModelStage(crew)
    if _is_new(model, record, results):
        due.add("model")
    results["model"] = _model(record, crew).model_dump(mode="json")

    acts, stages = _fleet(record, crew, results, told, new)
    return Forecast(
        stages=tuple(name for name in STAGES if name in due | stages),
        configure=tuple(sorted(limit)),
        silent=tuple(sorted(set(wanted.nodes) - new - kept.keys())) if told else (),
        **asdict(acts),
    )


def _fleet(
    record: Record,
    crew: Crew,
    results: Results,
    told: Mapping[str, NodeFacts],
    new: Collection[str],
) -> tuple[Processes, set[str]]:
    """What becomes of the processes, and which of the last two stages are due."""
    stage = NodeFleetStage(crew)
    is_new = _is_new(stage, record, results)
    running = {name: g for facts in told.values() for name, g in facts.generations.items()}
    if "fleet" not in record.stages:
        nothing = stage.planned.plan.outputs({})
        acts = compare_processes(None, nothing, stage.places, running=running)
        return acts, {"fleet", "proof"}
    last = record.stages["fleet"].result
    was, wanted = FleetOutputs.model_validate(last), stage.outputs()
    # What does not answer is taken to be as it was.
    unknown = {n for n, node in stage.places.items() if node not in told and node not in new}
    running = {n: was.generations.get(n, "") for n in unknown} | running
    acts = compare_processes(was, wanted, stage.places, running=running, new_nodes=new)
    is_restarted = any(running.get(name) != g for name, g in was.generations.items())
    if is_new or is_restarted:
        same = was == wanted.model_copy(update={"generations": was.generations})
        if same and not (acts.is_something or is_restarted):
            return replace(acts, reload=(ROUTER,)), {"fleet"}  # keys, certificate
        return acts, {"fleet", "proof"}
    return acts, {"fleet"} if unknown or not stage.holds(last) else set()


def _nodes(
    crew: Crew, known: ProvisionOutputs, instances: Mapping[str, Action]
) -> tuple[ProvisionOutputs, frozenset[str]]:
    """The nodes as they will be, and the names of those that are made for it."""
    nodes: dict[str, NodeOutputs] = {}
    new = set()
    for node in nodes_of(crew.spec):
        made = known.nodes.get(node.name)
        if made is None or instances.get(node.name) in {Action.CREATE, Action.REPLACE}:
            new.add(node.name)
            made = NodeOutputs(
                id="", role=node.role, private_ip=NOWHERE, instance_type=node.instance_type, zone=""
            )
        nodes[node.name] = made
    return known.model_copy(update={"nodes": nodes}), frozenset(new)


def _ask(crew: Crew, known: ProvisionOutputs) -> dict[str, NodeFacts]:
    """What those nodes say of themselves that answer."""
    hosts = [
        Host(name=m.name, role=m.role, address=m.address, instance_id=m.instance_id)
        for m in machines_of(known)
    ]
    try:
        said = crew.remote.ask(hosts)
    except ToolError:
        return {}  # without ssh nobody can be asked
    return {name: facts for name, facts in said.items() if isinstance(facts, NodeFacts)}


def _model(record: Record, crew: Crew) -> ModelOutputs:
    known = record.stages.get("model")
    return crew.model().model_copy(update={"config": known.result["config"] if known else {}})


def _is_new(stage: Stage, record: Record, results: Results) -> bool:
    known, digest = record.stages.get(stage.name), digest_of(stage.inputs(results))
    return known is None or known.digest != digest


def _everything(crew: Crew) -> Forecast:
    nodes = nodes_of(crew.spec)
    fleets = {"prefill": crew.spec.fleet.prefill, "decode": crew.spec.fleet.decode}
    engines = [f"{role}-{i}" for role, fleet in fleets.items() for i in range(fleet.count)]
    return Forecast(
        stages=STAGES,
        configure=tuple(sorted(n.name for n in nodes)),
        start=tuple(sorted([*engines, ROUTER])),
    )
