"""What commands share: their options, and how they find the cluster they are about."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvdeploy.adapters import specfile
from kvdeploy.adapters.store import RunLog, Store, clusters
from kvdeploy.errors import CheckError, KvdeployError, StateError
from kvdeploy.planning.checks import known_ids
from kvdeploy.proc import LocalRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.cli.app import App
    from kvdeploy.model.record import Record
    from kvdeploy.model.spec import ClusterSpec

F = TypeVar("F", bound="Callable[..., Any]")

DEFAULT_FILE: Final = "cluster.yaml"

file_option = click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Cluster file. Default: ./{DEFAULT_FILE}, else the built-in one.",
)
set_option = click.option(
    "--set",
    "overlays",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change one field, e.g. --set fleet.decode.count=2. May be repeated.",
)
name_option = click.option(
    "--name", "cluster", metavar="NAME", help="Cluster by name. Default: the file's."
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask before machines end (aws).")
replace_option = click.option(
    "--replace", multiple=True, metavar="NODE", help="aws: make NODE anew. May be repeated."
)
break_lock_option = click.option(
    "--break-lock",
    metavar="ID",
    help="aws: break the lock of Terraform's state that a killed run left behind.",
)
STAGES: Final = ("provision", "configure", "runtime", "model", "fleet", "proof")
"""Of `up`: provision and configure are of aws alone, runtime is of local alone."""

until_option = click.option(
    "--until", type=click.Choice(STAGES), metavar="STAGE", help="Stop after this stage."
)
from_option = click.option(
    "--from",
    "again_from",
    type=click.Choice(STAGES),
    metavar="STAGE",
    help="Do this stage and all after it again, although they hold.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def _known_checks(
    _context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]
) -> frozenset[str]:
    from difflib import get_close_matches

    known = known_ids()
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
            msg = f"no check is called {name!r}.{did_you_mean}"
            raise click.BadParameter(msg)
    return frozenset(names)


allow_option = click.option(
    "--allow",
    multiple=True,
    metavar="CHECK",
    callback=_known_checks,
    help="Go on although CHECK objects. May be repeated.",
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A cluster file that was read, and where its cluster's files go."""

    spec: ClusterSpec
    source: str
    root: Path


def load(app: App, file: Path | None, overlays: tuple[str, ...]) -> Loaded:
    """Read the cluster file that the options name.

    Raises:
        SpecError: it is wrong.
    """
    path = _path(app, file)
    loaded = specfile.load(path, overlays=overlays)
    root = path.resolve().parent if path else app.root
    return Loaded(spec=loaded.spec, source=loaded.source, root=root)


def find(app: App, file: Path | None, cluster: str | None) -> Store:
    """The cluster that a command about a running one means. Works although its file is broken."""
    path = _path(app, file)
    root = path.resolve().parent if path else app.root
    if cluster is None and path is not None:
        cluster = specfile.name_in(path)
    if cluster is None:
        known = clusters(root)
        if len(known) > 1:
            listing = ", ".join(known)
            msg = f"There are several clusters here: {listing}. Choose one with --name."
            raise click.UsageError(msg)
        cluster = known[0] if known else specfile.DEFAULT_NAME
    return Store(root, cluster)


def _path(app: App, file: Path | None) -> Path | None:
    if file is not None:
        return file if file.is_absolute() else app.root / file
    default = app.root / DEFAULT_FILE
    return default if default.exists() else None


def begin(record: Record, loaded: Loaded) -> Record:
    """The record of a cluster that is about to be brought up as `loaded` says.

    Raises:
        CheckError: it is on another target.
    """
    if record.target != loaded.spec.target:
        msg = (
            f"cluster {record.cluster!r} was brought up on target {record.target}, "
            f"and a cluster does not move to {loaded.spec.target}"
        )
        raise CheckError(msg, hint="Take it down first, or give the new one another name.")
    return record.model_copy(update={"spec": loaded.spec})


def spec_of(app: App, file: Path | None, store: Store) -> ClusterSpec | None:
    """The cluster file of a command about a running cluster: as last brought up; else, when
    nothing is remembered, as it is now. None when neither is to be had.

    Raises:
        SpecError: nothing is remembered, and the file says aws and is wrong.
    """
    with suppress(StateError):
        if (known := store.read().spec) is not None:
            return known
    path = _path(app, file)
    if path is None or specfile.word_in(path, "target") != "aws":
        return None
    spec = specfile.load(path).spec
    return spec if spec.name == store.cluster else None


def asked_now(app: App, file: Path | None, store: Store) -> tuple[ClusterSpec | None, str]:
    """The cluster file of a running cluster as it is now, and its name; None when it is broken, or
    another cluster's.
    """
    try:
        loaded = load(app, file, ())
    except KvdeployError:
        return None, ""
    found = loaded.spec if loaded.spec.name == store.cluster else None
    return found, loaded.source


@contextmanager
def recorded(app: App, store: Store, verb: str) -> Iterator[tuple[RunLog, LocalRunner]]:
    """Hold the cluster and write down what this run says and runs."""
    with store.locked(verb):
        run = store.new_run(verb)
        app.ui.on_line = run.line
        try:
            yield run, LocalRunner(on_command=run.command)
        except KvdeployError as e:
            run.line(f"error: {e.message}")  # main shows it, when this log is closed already
            raise
        finally:
            app.ui.on_line = None
