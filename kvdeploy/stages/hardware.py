"""The lower rungs of smoke on nodes: the account, devices, the fabric, a WRITE from node to node,
and whether KV really went over EFA.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from kvdeploy import probes
from kvdeploy.errors import AwsError
from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.model.reports import RungReport, Verdict
from kvdeploy.planning import fabric
from kvdeploy.planning.hardware import judge_efa, judge_node
from kvdeploy.planning.identity import judge_account, judge_spec
from kvdeploy.planning.launch import ROUTER
from kvdeploy.planning.writing import once_each, unit_argv
from kvdeploy.stages.efa import why_not_efa
from kvdeploy.stages.writing import program, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from kvdeploy.model.awsfacts import Identity
    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.inventory import Host
    from kvdeploy.model.launch import LaunchSpec
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.units import Units
    from kvdeploy.stages.writing import Talker

    Account = Callable[[], tuple[Identity, tuple[str, ...]]]
    """Who we are, and the ids of the cluster's instances that run. Raises AwsError."""


class NodeGround:
    def __init__(
        self, units: Units, account: Account, *, now: ClusterSpec | None, source: str
    ) -> None:
        """`now` is the cluster file `source` as it is."""
        self._units, self._account = units, account
        self._now, self._source = now, source
        self._mocked = units.crew.spec.kind == "rehearsal"
        self._before: dict[str, NodeFacts] = {}

    def rungs(self, step: Step, nonce: str) -> Iterator[RungReport]:
        """Rungs 0 to 3.

        Raises:
            UnreachableError: a node does not answer.
        """
        step.update("account and cluster file")
        yield from self._identity()
        step.update("nodes: their devices")
        profile = self._profile
        if profile is not None:
            for node, seen in sorted(self._look().items()):
                yield from judge_node(node, seen, profile, mocked=self._mocked)
        yield from self._fabric(profile, step)
        for prefill, decode in self._pairs():
            step.update(f"{prefill.name}/{decode.name}: NIXL WRITE")
            yield from write(
                prefill,
                decode,
                self._begin,
                device=self._units.crew.device,
                nonce=f"{nonce}-{prefill.name}-{decode.name}",
                mocked=self._mocked and profile is not None and profile.efa_devices > 0,
            )
        self._before = self._look()

    def carried(self, pushed: Mapping[str, int]) -> Iterator[RungReport]:
        """Whether EFA moved what NIXL did."""
        if self._profile is None:
            return
        after, hosts = self._look(), self._units.hosts
        nodes = {hosts[engine].name for engine in pushed}
        yield judge_efa(
            ", ".join(sorted(pushed)),
            efa_bytes=sum(after[n].efa_bytes - self._before[n].efa_bytes for n in nodes),
            pushed_bytes=sum(pushed.values()),
            why_not=why_not_efa(self._units.crew),
            mocked=self._mocked,
        )

    # --- rung 0 ------------------------------------------------------------------------------
    def _identity(self) -> Iterator[RungReport]:
        asked: dict[str, Any] = {"account": "", "arn": "", "running": (), "error": ""}
        try:
            identity, running = self._account()
            asked |= {"account": identity.account, "arn": identity.arn, "running": running}
        except AwsError as e:
            asked["error"] = e.message
        wanted = [h.instance_id for h in self._units.blueprint.inventory.hosts if h.instance_id]
        yield judge_account(**asked, wanted=wanted, mocked=self._mocked)
        names = [name for name in self._units.hosts if name != ROUTER]
        yield judge_spec(self._units.crew.spec, names, now=self._now, source=self._source)

    # --- rung 1 ------------------------------------------------------------------------------
    @property
    def _profile(self) -> InstanceProfile | None:
        aws = self._units.crew.spec.aws
        return INSTANCES.get(aws.instance_type) if aws else None

    def _look(self) -> dict[str, NodeFacts]:
        """What every GPU node says. Raises UnreachableError."""
        hosts = [h for h in self._units.blueprint.inventory.hosts if h.role != ROUTER]
        found = {}
        for name, said in self._units.crew.remote.ask(hosts).items():
            if not isinstance(said, NodeFacts):
                raise said
            found[name] = said
        return found

    # --- rung 2 ------------------------------------------------------------------------------
    def _fabric(self, profile: InstanceProfile | None, step: Step) -> Iterator[RungReport]:
        if profile is None or not profile.efa_devices:
            message = "these nodes have no EFA: what they have between them is a plain network"
            yield RungReport(
                rung="fabric", subject="nodes", verdict=Verdict.NOT_APPLICABLE, message=message
            )
            return
        wanted, hosts, domains = profile.efa_devices, self._units.hosts, {}
        pairs = [(hosts[p.name], hosts[d.name]) for p, d in self._pairs()]
        for host in sorted({h.name: h for pair in pairs for h in pair}.values(), key=_name):
            step.update(f"{host.name}: libfabric")
            ran = self._units.crew.remote.run(host, *fabric.FI_INFO)
            said = f"{ran.stdout}\n{ran.stderr}"
            domains[host.name] = fabric.parse_domains(said)
            yield fabric.judge_domains(host.name, said, wanted, mocked=self._mocked)
        for prefill, decode in pairs:
            step.update(f"{prefill.name}/{decode.name}: a ping over every rail")
            client, server = self._ping(prefill, decode, domains)
            subject = f"{prefill.name}/{decode.name}"
            yield fabric.judge_rails(subject, wanted, client, server, mocked=self._mocked)

    def _ping(
        self, prefill: Host, decode: Host, domains: Mapping[str, tuple[str, ...]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the two ends said last: who asked, and who answered."""
        text = (resources.files(probes) / "fabric.py").read_text(encoding="utf-8")
        argv, talk = ("python3", "-I", "-c", text), self._units.crew.remote.talk
        with talk(decode, *argv) as server, talk(prefill, *argv) as client:
            server.say(fabric.build_order(domains[decode.name]))
            ready = server.hear(fabric.DEADLINE_S)
            if "error" in ready:
                return {}, ready
            towards = {"peer": decode.address, "ports": ready["ports"]}
            client.say(fabric.build_order(domains[prefill.name], **towards))
            asked = client.hear(fabric.DEADLINE_S + 5)
            server.say({"enough": True})
            return asked, server.hear(fabric.ANSWERED_S)

    # --- rung 3 ------------------------------------------------------------------------------
    def _pairs(self) -> tuple[tuple[LaunchSpec, LaunchSpec], ...]:
        """An engine of every node, and every node once at least."""
        first: dict[str, dict[str, LaunchSpec]] = {"prefill": {}, "decode": {}}
        for engine in sorted(self._units.fleet.engines, key=lambda e: e.name):
            first[engine.role].setdefault(self._units.hosts[engine.name].name, engine)
        return once_each(list(first["prefill"].values()), list(first["decode"].values()))

    def _begin(self, engine: LaunchSpec) -> AbstractContextManager[Talker]:
        argv = unit_argv(engine, program())
        return self._units.crew.remote.talk(self._units.hosts[engine.name], *argv)


def _name(host: Host) -> str:
    return host.name
