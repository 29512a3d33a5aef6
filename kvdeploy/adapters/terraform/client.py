"""Terraform's commands, one method each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from python_terraform import IsFlagged
from python_terraform import Terraform as ArgvBuilder

from kvdeploy.adapters.terraform.events import Heard
from kvdeploy.adapters.terraform.failures import explain
from kvdeploy.adapters.terraform.shown import read_plan, read_state
from kvdeploy.errors import TerraformError, ToolError
from kvdeploy.model.outputs import leading_numbers
from kvdeploy.proc import Command
from kvdeploy.progress import Listener, Mute

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.adapters.terraform.shown import Planned
    from kvdeploy.adapters.terraform.workdir import WorkDir
    from kvdeploy.model.infra import ManagedResource, ResourceChange, ResourceDone
    from kvdeploy.proc import Outcome, Runner

Flag = str | bool | int | list[str] | type[IsFlagged] | None
"""A flag's value for python-terraform: IsFlagged is a bare flag, None leaves it out."""

NO_CHANGES: Final = 0
CHANGES: Final = 2

FOREIGN_ENV: Final = (
    "TF_VAR_",
    "TF_CLI_ARGS",
    "TF_WORKSPACE",
    "TF_DATA_DIR",
    "TF_INPUT",
    "TF_LOG",
    "TF_REATTACH_PROVIDERS",
    "TF_STATE_PERSIST_INTERVAL",
)
"""Prefixes of variables of the user's shell that would change what Terraform does, or what it
says. It never sees them. TF_CLI_CONFIG_FILE and TF_PLUGIN_CACHE_DIR stay: they say where the
provider comes from."""

OWN_ENV: Final = {"TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"}

APPLY_LIMIT_S: Final = 3600.0
SAVE_STATE_S: Final = 120.0
"""How long an interrupted Terraform may take to save its state before it is interrupted again."""
LOCK_WAIT: Final = "20s"


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What an apply did."""

    done: tuple[ResourceDone, ...]
    """Every resource that it finished with, with its time."""
    outputs: Mapping[str, Any]
    """Output name -> value."""


class Terraform:
    """Runs Terraform in one cluster's folder.

    Args:
        runner: starts it.
        work: the folder; `prepare` it first.
        log: file that gets every line of every command.
        parallelism: operations at once; all nodes should be launched together.
        aws: whom the provider asks instead of AWS, in the AWS SDKs' variables; empty: AWS, as the
            caller's own say.
    """

    def __init__(
        self,
        runner: Runner,
        work: WorkDir,
        *,
        log: Path,
        parallelism: int = 10,
        aws: Mapping[str, str] | None = None,
    ) -> None:
        self._runner, self.work, self.log = runner, work, log
        self._parallelism, self._aws = parallelism, aws or {}
        self.listener: Listener = Mute()
        """Told what goes on; whoever has a step under way puts its line here."""

    def init(self) -> None:
        """Get the provider and connect to the state.

        Raises:
            ToolError: the provider cannot be had.
            AwsError: the state's bucket cannot be reached.
        """
        self._run("init", reconfigure=IsFlagged, timeout_s=900)

    def plan(
        self,
        *,
        targets: Sequence[str] = (),
        replace: Sequence[str] = (),
        destroy: bool = False,
        lock: bool = True,
    ) -> Planned:
        """Write the plan file and say what is in it.

        Args:
            targets: addresses to keep to; empty for all.
            replace: addresses to make anew.
            destroy: plan the end of everything.
            lock: hold the state meanwhile; not needed only to look.
        """
        self._plan(targets, replace=replace, destroy=destroy, lock=lock)
        shown = json.loads(self._quiet("show", str(self.work.plan_file), json=IsFlagged).stdout)
        return read_plan(shown)

    def plan_again(
        self, *, targets: Sequence[str] = (), replace: Sequence[str] = ()
    ) -> tuple[ResourceChange, ...]:
        """Write the plan file and name what is in it; quicker than plan(), which looks closer."""
        return tuple(self._plan(targets, replace=replace).planned)

    def _plan(
        self,
        targets: Sequence[str],
        *,
        replace: Sequence[str] = (),
        destroy: bool = False,
        lock: bool = True,
    ) -> Heard:
        heard = self._run(
            "plan",
            out=str(self.work.plan_file),
            var_file=str(self.work.var_file),
            detailed_exitcode=IsFlagged,
            target=list(targets),
            replace=list(replace),
            destroy=IsFlagged if destroy else None,
            parallelism=self._parallelism,
            ok=(NO_CHANGES, CHANGES),
            **self._lock(lock=lock),
        )
        self.work.plan_file.chmod(0o600)
        return heard

    def apply(self) -> Applied:
        """Apply exactly the plan file, and remove it.

        Raises:
            TerraformError, AwsError, LockedError, StateError: by cause.
        """
        try:
            heard = self._run(
                "apply",
                str(self.work.plan_file),
                parallelism=self._parallelism,
                timeout_s=APPLY_LIMIT_S,
                **self._lock(lock=True),
            )
        finally:
            self.work.plan_file.unlink(missing_ok=True)
        return Applied(done=tuple(heard.done), outputs=heard.outputs)

    def outputs(self) -> dict[str, Any]:
        """Output name -> value; empty before the first apply."""
        told = json.loads(self._quiet("output", json=IsFlagged).stdout)
        return {name: output["value"] for name, output in told.items()}

    def managed(self) -> tuple[ManagedResource, ...]:
        """Every resource that the state knows, without data sources."""
        return read_state(json.loads(self._quiet("show", json=IsFlagged).stdout))

    def untaint(self, address: str) -> None:
        """Take a resource as it is, although Terraform was interrupted while it made it."""
        self._quiet("untaint", address, lock_timeout=LOCK_WAIT)

    def force_unlock(self, lock_id: str) -> None:
        """Break the lock of a run that was killed. Terraform refuses any other id than the lock's.

        Raises:
            TerraformError: there is no such lock.
        """
        outcome = self._runner.run(self._build("force-unlock", [lock_id], {"force": IsFlagged}))
        if outcome.code:
            said = " ".join(outcome.tail().split())
            msg = f"the lock {lock_id} cannot be broken: {said}"
            raise TerraformError(msg, hint="Run the command without --break-lock.", log=self.log)

    @staticmethod
    def _lock(*, lock: bool) -> dict[str, Any]:
        return {"lock_timeout": LOCK_WAIT} if lock else {"lock": False}

    def _run(
        self,
        verb: str,
        *args: str,
        ok: tuple[int, ...] = (0,),
        timeout_s: float = 900,
        **flags: Flag,
    ) -> Heard:
        """A command that speaks JSON line by line."""
        heard = Heard(listener=self.listener)
        flags |= {"json": IsFlagged, "input": False}
        command = self._build(verb, args, flags, timeout_s=timeout_s, output=self.log)
        outcome = self._runner.run(command, on_line=heard.line)
        if outcome.timed_out:
            msg = f"terraform {verb} took over {timeout_s:.0f} s and was interrupted"
            raise TerraformError(msg, hint="'kvdeploy up' goes on from here.", log=self.log)
        if outcome.code not in ok:
            raise explain(verb, heard, outcome.code, self.log)
        return heard

    def _quiet(self, verb: str, *args: str, **flags: Flag) -> Outcome:
        """A command that answers with one JSON document."""
        outcome = self._runner.run(self._build(verb, args, flags))
        if outcome.code:
            heard = Heard(listener=Mute(), plain=outcome.tail().splitlines())
            raise explain(verb, heard, outcome.code, self.log)
        return outcome

    def _build(
        self,
        verb: str,
        args: Sequence[str],
        flags: Mapping[str, Flag],
        *,
        timeout_s: float = 300,
        output: Path | None = None,
    ) -> Command:
        builder = ArgvBuilder(working_dir=str(self.work.path))
        return Command(
            argv=tuple(builder.generate_cmd_string(verb, *args, **flags)),
            cwd=self.work.path,
            env={**OWN_ENV, **self._aws},
            drop_env=(*FOREIGN_ENV, *(["AWS_"] if self._aws else [])),
            timeout_s=timeout_s,
            grace_s=SAVE_STATE_S,
            output=output,
        )


def find_version(runner: Runner) -> tuple[int, ...]:
    """Of the terraform on PATH; empty when there is none."""
    argv = ArgvBuilder().generate_cmd_string("version", json=IsFlagged)
    try:
        outcome = runner.run(
            Command(argv=tuple(argv), env=OWN_ENV, drop_env=FOREIGN_ENV, timeout_s=60)
        )
        return leading_numbers(json.loads(outcome.stdout)["terraform_version"])
    except (ToolError, ValueError, KeyError):
        return ()


def foreign_env(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the variables that Terraform is not to see."""
    return tuple(sorted(name for name in names if name.startswith(FOREIGN_ENV)))
