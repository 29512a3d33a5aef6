"""The command line: parse, call the core, map errors to exit codes. No logic.

Commands live in modules of their own that are imported when they are used: `kvdeploy --help`
answers before pydantic or aiohttp would have been read from disk.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvdeploy import __version__
from kvdeploy.errors import KvdeployError
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED: Final = 130
BUG: Final = 1

COMMANDS: Final = {
    "init": "Write a commented cluster file.",
    "check": "Say what is wrong with the file, this machine or the AWS account. Touches nothing.",
    "plan": "Show what `up` would change, and what each changed field does. Changes nothing.",
    "up": "Bring the cluster up, or repair what does not hold, and prove one push a pair.",
    "status": "Show what runs, where, and how it is.",
    "smoke": "Prove that prefill pushes KV into decode and that the answers are right.",
    "bench": "Measure push, pull and aggregated serving side by side.",
    "logs": "Show what engines and router say.",
    "shell": "Open a shell on a node, or run COMMAND there (aws).",
    "down": "Stop everything, on AWS destroy everything, and say what is left: nothing.",
    "image": "Make an image from which GPU nodes start ready (aws).",
    "doctor": "Show tools, versions, ports and memory: found and needed.",
}
"""Each command and its one line of help; its module is kvdeploy.cli.<command>."""


@dataclass(kw_only=True)
class App:
    """What every command needs, made once in main() and replaced in tests."""

    ui: Ui = field(default_factory=Ui)
    root: Path = field(default_factory=Path.cwd)


class LazyGroup(click.Group):
    """A group that imports a command only to run it or to show that command's own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"kvdeploy.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101  # a bug of ours otherwise
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvdeploy")
def cli() -> None:
    """Serve disaggregated vLLM fleets with push-based KV transfer, and prove that they push.

    Without -f a command uses ./cluster.yaml, and without that the built-in default: one
    prefill and one decode engine of a small made-up model on this machine.

    Exit codes: 0 done, 1 a bug, 2 usage, 3 cluster file, 4 check, 5 tool, 6 terraform,
    7 playbook, 8 unreachable, 9 fleet, 10 smoke, 11 bench, 12 locked, 13 state, 14 aws,
    130 interrupted.
    """


def _end_gently_on(*signals: signal.Signals) -> None:
    """Let other ways to be stopped clean up as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)


def main(argv: Sequence[str] | None = None, *, app: App | None = None) -> int:
    """Run one command and return its exit code."""
    app = app or App()
    try:
        _end_gently_on(signal.SIGTERM, signal.SIGHUP)
        code = cli.main(args=argv, prog_name="kvdeploy", obj=app, standalone_mode=False)
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        app.ui.say("interrupted: 'kvdeploy status' shows what still runs, 'kvdeploy down' ends it")
        return INTERRUPTED
    except KvdeployError as e:
        app.ui.error(e)
        return e.exit_code
    except BrokenPipeError:
        # Whoever read our stdout has left, e.g. `kvdeploy logs | head`: nothing to say it to.
        sys.stderr.close()
        return 0
    except Exception:  # noqa: BLE001  # the one place that may: what gets here is a bug of ours
        traceback.print_exc()
        app.ui.say(
            f"this is a bug in kvdeploy {__version__}: please report it with the lines above"
        )
        return BUG
    return code if isinstance(code, int) else 0
