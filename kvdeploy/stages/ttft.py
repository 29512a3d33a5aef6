"""Time push against pull on one pair, and what of a climb engines are started anew for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.errors import KvdeployError
from kvdeploy.model.reports import Verdict
from kvdeploy.planning import controls, ttft
from kvdeploy.planning.bench.matrix import Planned
from kvdeploy.planning.environment import computes_on_cpus
from kvdeploy.planning.sizing import find_vocabulary
from kvdeploy.stages.bench import Bench, Pace
from kvdeploy.stages.restarts import RestartControls, Site

if TYPE_CHECKING:
    from kvdeploy.model.bench import Cell
    from kvdeploy.model.routing import Mode
    from kvdeploy.stages.restarts import Efa, Screen, Starter
    from kvdeploy.stages.smoke import Smoke

HOW: Final = "engines are started anew for it: 'kvdeploy smoke --restart' does that"
PULLS: Final = "it is about engines that push, and the connector of these is pull"
UNPROVEN: Final = "the fleet is not proven as it is, so a broken one shows nothing"
PACE: Final = Pace(requests=40, seconds=30.0)
"""Of each run."""


def climb_on(smoke: Smoke, restarting: Starter, screen: Screen, *, efa: Efa | None = None) -> None:
    """Add the rungs that engines are started anew for to a climb that was proven.

    Raises:
        FleetError: the cluster did not get its own engines back.
    """
    if smoke.spec.connector.mode != "push":
        note_all(smoke, PULLS, Verdict.NOT_APPLICABLE)
        return
    if not smoke.report().proven:
        note_all(smoke, UNPROVEN)
        return
    site = Site(smoke, restarting, screen, efa)
    RestartControls(site).run()
    Ttft(site).run()


def note_all(smoke: Smoke, why: str = HOW, verdict: Verdict = Verdict.NOT_RUN) -> None:
    """Say of each of them why it was not run."""
    prefill, decode = smoke.asker.pairs[0]
    for subject in (*(f.subject for f in controls.FAULTS), controls.FORCED_TCP):
        smoke.ledger.note(controls.RUNG, subject, verdict, why)
    smoke.ledger.note(ttft.RUNG, f"{prefill.name}/{decode.name}", verdict, why)


class Ttft:
    """Rounds are push, pull, pull, push: the last one is on the engines that come back, and what
    drifts evenly falls on both modes.
    """

    def __init__(self, site: Site) -> None:
        self._site, self._smoke, self._ledger = site, site.smoke, site.smoke.ledger

    def run(self) -> None:
        pair = self._site.pair_name
        try:
            cell, vocabulary = self._cell(), find_vocabulary(self._smoke.model.config)
        except ValueError as e:
            self._ledger.note(ttft.RUNG, pair, Verdict.NOT_APPLICABLE, str(e))
            return
        bench = Bench(
            vocabulary=vocabulary,
            seed=0,
            mark=self._smoke.nonce,
            pace=PACE,
            runs=2 * ttft.ROUNDS,
            pair=pair,
        )
        with self._ledger.timed():
            self._measure(bench, "push", cell, 1)
            with self._site.restored("ttft: pull"):
                try:
                    self._site.fleet = self._site.restarting.serve_pull()
                    self._measure(bench, "pull", cell, 1, 2)
                except KvdeployError as e:
                    bench.fail("pull", e.message)
            self._measure(bench, "push", cell, 2)
            self._judge(bench, pair)

    def _judge(self, bench: Bench, pair: str) -> None:
        if bench.failed:
            told = "; ".join(f"{mode}: {why}" for mode, why in bench.failed.items())
            verdict = Verdict.FAILED if "push" in bench.failed else Verdict.NOT_APPLICABLE
            self._ledger.note(ttft.RUNG, pair, verdict, f"not measured to the end: {told}")
            return
        why_not = ttft.ON_CPUS if any(map(computes_on_cpus, self._site.fleet.engines)) else ""
        self._ledger.add(ttft.judge_ttft(pair, bench.runs, why_not=why_not))

    def _measure(self, bench: Bench, mode: Mode, cell: Cell, *rounds: int) -> None:
        with self._site.screen.step(f"ttft: {mode}") as step:
            planned = [Planned(mode=mode, cell=cell, round=number) for number in rounds]
            bench.measure(self._site.fleet, planned, step)

    def _cell(self) -> Cell:
        """Raises ValueError: this fleet cannot be asked so."""
        usual, spec = self._site.fleet.router_config.usual_mode, self._smoke.spec
        if usual != "push":
            msg = f"this fleet serves by {usual}, and it is push that pull would be compared with"
            raise ValueError(msg)
        return ttft.build_cell(
            block_size=spec.connector.block_size, max_length=spec.model.max_length
        )
