"""`kvdeploy bench` and `kvdeploy bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvdeploy.adapters.store import write_text
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.bench_local import LocalGround
from kvdeploy.cli.benching import Benching, require_fleet
from kvdeploy.cli.common import file_option, find, name_option, recorded
from kvdeploy.cli.tables import show
from kvdeploy.errors import BenchError, CheckError, FleetError
from kvdeploy.model.bench import MODES, SCENARIOS, SCHEMA, BenchReport
from kvdeploy.model.routing import MODES as SERVED
from kvdeploy.planning.bench import assertions, compare, matrix, page, table
from kvdeploy.planning.bench.figures import find_groups
from kvdeploy.stages.bench import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.benching import Ground, Up
    from kvdeploy.model.outputs import Device
    from kvdeploy.model.routing import Mode
    from kvdeploy.planning.bench.assertions import Threshold
    from kvdeploy.proc import Runner

USUAL: Final = ("unique", "shared", "repeat", "turns")
QUICK: Final = ("unique", "shared")
STDOUT: Final = Path("-")
QUICK_S: Final = 100.0
"""All runs of a --quick bench together."""
OVERHEAD_S: Final = 3.5
"""Warm-up of a run, and its counters' coming to rest."""


def _words(good: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    """Words with commas between, each of which is one of `good`."""

    def read(
        _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
    ) -> tuple[str, ...]:
        from difflib import get_close_matches

        words = [word.strip() for text in given for word in text.split(",")]
        for word in words:
            if word not in good:
                close = get_close_matches(word, good, n=1)
                did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
                msg = f"{word!r} is none of {', '.join(good)}.{did_you_mean}"
                raise click.BadParameter(msg)
        return tuple(dict.fromkeys(words))

    return read


def _numbers(
    _context: click.Context, _parameter: click.Parameter, given: str | None
) -> tuple[int, ...]:
    words = given.split(",") if given is not None else []
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        msg = f"{given!r} is not whole numbers above 0 with commas between, as 1024,4096"
        raise click.BadParameter(msg)
    return tuple(dict.fromkeys(int(word) for word in words))


@click.group(help=COMMANDS["bench"], invoke_without_command=True)
@file_option
@name_option
@click.option("--quick", is_flag=True, help="Two scenarios, about two minutes.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    callback=_words(MODES),
    metavar="MODE,...",
    help=f"Of {', '.join(MODES)}. Default: those that the running engines can serve.",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Start engines anew for modes that need another connector, and back again.",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    callback=_words(tuple(SCENARIOS)),
    metavar="NAME,...",
    help=f"Of {', '.join(SCENARIOS)}. Default: {', '.join(USUAL)}.",
)
@click.option("--input", "inputs", callback=_numbers, metavar="N,...", help="Tokens of a prompt.")
@click.option("--output", "outputs", callback=_numbers, metavar="N,...", help="Of an answer.")
@click.option("--concurrency", callback=_numbers, metavar="N,...", help="Clients at once.")
@click.option("--rounds", type=click.IntRange(1, 100), default=2, show_default=True)
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000),
    default=200,
    show_default=True,
    help="Of a run, at most.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 3600),
    default=10.0,
    show_default=True,
    help="A run sends no more after.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write every sample and the environment there; - is stdout, instead of the table.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a page with plots there.",
)
@click.option(
    "--assert",
    "expressions",
    multiple=True,
    metavar="EXPR",
    help="Exit with 11 unless it holds, e.g. 'ttft.p50.push <= ttft.p50.pull / 2'.",
)
@click.option("--unproven", is_flag=True, help="Measure a fleet that was not proven to push.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:  # noqa: ANN401  # see _measure
    if context.invoked_subcommand is None:
        _measure(context.obj, **options)


@bench.command("compare", help="Show two reports of `kvdeploy bench --json` side by side.")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
def compare_reports(first: Path, second: Path) -> None:
    one, other = _read(first), _read(second)
    show(compare.COLUMNS, compare.build_rows(one, other))
    for line in compare.find_differences(one, other):
        click.echo(line)


def _measure(
    app: App,
    *,
    file: Path | None,
    cluster: str | None,
    quick: bool,
    modes: tuple[Mode, ...],
    restart: bool,
    scenarios: tuple[str, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    concurrency: tuple[int, ...],
    rounds: int,
    requests: int,
    seconds: float,
    seed: int,
    json_file: Path | None,
    html_file: Path | None,
    expressions: tuple[str, ...],
    unproven: bool,
) -> None:
    store = find(app, file, cluster)
    up = require_fleet(store)
    connector = up.spec.connector.mode
    device: Device = "cpu" if _is_on_cpu(up) else "cuda"
    modes = modes or matrix.default_modes(connector, restart=restart)
    if not restart and (other := matrix.needs_restart(modes, connector)):
        msg = (
            f"{' and '.join(other)} cannot be served by engines with the {connector} connector, "
            f"which do {', '.join(SERVED[connector])}. With --restart engines are started anew for "
            "it, and the cluster's own again afterwards: what they serve meanwhile is cut."
        )
        raise click.UsageError(msg)
    if "cold" in scenarios and not restart:
        msg = (
            "cold pairs take decode engines that are started anew for each sample: that takes "
            "--restart, and what they serve meanwhile is cut."
        )
        raise click.UsageError(msg)
    wishes = matrix.Wishes(
        scenarios=scenarios or (QUICK if quick else USUAL),
        input_tokens=inputs,
        output_tokens=outputs,
        concurrency=concurrency or (matrix.CONCURRENCY[device][-1:] if quick else ()),
    )
    try:
        cells = matrix.build_cells(wishes, max_length=up.spec.model.max_length, device=device)
        thresholds = [
            assertions.parse_threshold(text, modes=modes, scenarios=wishes.scenarios)
            for text in expressions
        ]
    except ValueError as e:
        raise click.UsageError(str(e)) from e
    blocks = list(matrix.order(modes, cells, rounds, connector))
    count = sum(len(planned) for _, planned in blocks)
    if quick:
        seconds = max(2.0, QUICK_S / count - OVERHEAD_S)

    def write(report: BenchReport) -> None:
        if json_file is not None and json_file != STDOUT:
            _write(app.root / json_file, report.model_dump_json(indent=1) + "\n")
        if html_file is not None:
            _write(app.root / html_file, page.render(report))

    with recorded(app, store, "bench") as (run, runner):
        ground = _find_ground(app, store, up, runner, run)
        benching = Benching(app, store, up, ground, run, prove=not unproven)
        minutes = count * (seconds + OVERHEAD_S) / 60
        more = ", and what engines take to start" if restart else ""
        app.ui.say(
            f"{count} runs: {', '.join(modes)}; {len(cells)} cells, {rounds} rounds: "
            f"{minutes:.0f} min at most{more}"
        )
        pace = Pace(requests=requests, seconds=seconds)
        report = benching.measure(modes, blocks, pace, seed=seed, rounds=rounds, keep=write)
    if json_file == STDOUT:
        click.echo(report.model_dump_json(indent=1))
    else:
        _show(report)
    conclude(app, report, thresholds, benching.kept)


def _is_on_cpu(up: Up) -> bool:
    if "runtime" in up.record.stages:  # local: it was looked at
        return bool(up.record.stages["runtime"].result["device"] == "cpu")
    return up.spec.runtime.device == "cpu"


def _find_ground(app: App, store: Store, up: Up, runner: Runner, run: RunLog) -> Ground:
    if up.spec.target == "local":
        return LocalGround(app, store, up, runner)
    from kvdeploy.cli.aws.bench import NodeGround
    from kvdeploy.cli.aws.crew import crew_of

    return NodeGround(app, store, up, lambda spec: crew_of(spec, store, run.path, runner))


def conclude(
    app: App, report: BenchReport, thresholds: Sequence[Threshold], kept: Path | None
) -> None:
    """Judge what was measured.

    Raises:
        FleetError: a mode did not come to its end.
        BenchError: a threshold was missed, or could not be judged.
    """
    groups = find_groups(report)
    judged = [j for threshold in thresholds for j in assertions.judge(threshold, groups)]
    for judgement in judged:
        if judgement.held:
            app.ui.say(f"holds: {judgement.message}")
    missed = "\n".join(j.message for j in judged if not j.held)
    if report.failed:
        told = "; ".join(f"{mode}: {why}" for mode, why in report.failed.items())
        msg = f"not measured to the end: {told}" + (f"\n{missed}" if missed else "")
        raise FleetError(msg, hint=f"What was measured is in {kept}.")
    if missed:
        raise BenchError(missed, hint=f"Every sample is in {kept}.")


def _write(path: Path, text: str) -> None:
    """Raises CheckError."""
    try:
        write_text(path, text, mode=0o644)
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror}"
        raise CheckError(msg, hint="The report is among the cluster's runs all the same.") from e


def _show(report: BenchReport) -> None:
    show(table.COLUMNS, table.build_rows(report))
    for line in (table.too_few(report), *report.notes):
        if line:
            click.echo(f"note: {line}")


def _read(path: Path) -> BenchReport:
    """Raises CheckError."""
    try:
        report = BenchReport.model_validate_json(path.read_bytes())
    except OSError as e:
        msg = f"{path} cannot be read: {e.strerror}"
        raise CheckError(msg) from e
    except ValueError as e:
        msg = f"{path} is no report of a bench"
        raise CheckError(msg, hint="'kvdeploy bench --json FILE' writes one.") from e
    if report.schema_version > SCHEMA:
        msg = f"{path} was written by a newer kvdeploy"
        raise CheckError(msg, hint="Use that version, or a newer one.")
    return report
