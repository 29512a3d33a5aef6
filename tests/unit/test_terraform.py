"""Terraform's adapter without Terraform: what it would run, and how it reads what is said."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.terraform.client import Terraform, find_version, foreign_env
from kvdeploy.adapters.terraform.events import Heard, short
from kvdeploy.adapters.terraform.failures import explain
from kvdeploy.adapters.terraform.workdir import WorkDir, local_backend, s3_backend
from kvdeploy.errors import (
    AwsError,
    KvdeployError,
    LockedError,
    StateError,
    TerraformError,
    ToolError,
)
from kvdeploy.model.infra import Action, Drift, ManagedResource, ResourceChange, ResourceDone
from tests.conftest import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.proc import Command, Outcome

DECODE = 'module.nodes.aws_instance.this["decode-0"]'
LOG = Path("/runs/terraform.log")


@dataclass
class Line:
    said: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def update(self, detail: str) -> None:
        self.said.append(detail)

    def note(self, text: str) -> None:
        self.notes.append(text)


def event(kind: str, **more: Any) -> str:
    return json.dumps({"type": kind, **more})


def hook(kind: str, address: str = DECODE, action: str = "create", **more: Any) -> str:
    return event(kind, hook={"resource": {"addr": address}, "action": action, **more})


def failing(summary: str, detail: str = "", address: str = "") -> str:
    said = {"severity": "error", "summary": summary, "detail": detail, "address": address}
    return event("diagnostic", diagnostic=said)


def heard(*lines: str) -> tuple[Heard, Line]:
    line = Line()
    ears = Heard(listener=line)
    for text in lines:
        ears.line(text)
    return ears, line


# --- events ----------------------------------------------------------------------------------
def test_each_resource_is_told_with_its_id_and_time_when_it_is_done() -> None:
    ears, line = heard(
        hook("apply_start"),
        hook("apply_start", 'module.nodes.aws_instance.this["prefill-0"]'),
        hook("apply_complete", id_value="i-1", elapsed_seconds=12),
    )
    assert line.notes == ["   + instance decode-0 i-1 (12 s)"]
    assert line.said == [
        "0 done; making instance decode-0",
        "0 done; making instance prefill-0 and 1 more",
        "1 done; making instance prefill-0",
    ]
    assert ears.done == [ResourceDone(address=DECODE, action="create", id="i-1", seconds=12)]


def test_a_resource_that_failed_is_told_at_once() -> None:
    ears, line = heard(hook("apply_start"), hook("apply_errored"))
    assert line.notes == ["   ! instance decode-0: failed"]
    assert ears.failed == [DECODE]


def test_reading_is_progress_and_no_news() -> None:
    ears, line = heard(
        hook("refresh_start", "module.network.aws_vpc.this[0]"),
        hook("apply_complete", "module.nodes.data.aws_ami.this", action="read", id_value="ami-1"),
    )
    assert line.notes == []
    assert line.said[0] == "reading vpc"
    assert [d.action for d in ears.done] == ["read"]


def test_lines_that_are_no_json_are_kept_and_others_do_no_harm() -> None:
    ears, _ = heard("Error: broken", "", '"text"', event("version"), event("log"))
    assert ears.plain == ["Error: broken"]
    assert ears.errors == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (DECODE, "instance decode-0"),
        ("module.network.aws_vpc.this[0]", "vpc"),
        ("module.network.aws_eip.nat[0]", "eip nat"),
        ('module.nodes.aws_launch_template.this["prefill"]', "launch_template prefill"),
        ('module.nodes.data.aws_ami.this["node"]', "ami node"),
        ("aws_vpc.this", "vpc"),
        ('provider["x"]', 'provider["x"]'),
    ],
)
def test_addresses_are_said_shortly(address: str, said: str) -> None:
    assert short(address) == said


# --- failures --------------------------------------------------------------------------------
def explained(*lines: str) -> KvdeployError:
    return explain("apply", heard(*lines)[0], 1, LOG)


def test_no_capacity_names_node_type_zone_and_the_zones_that_aws_names() -> None:
    words = (
        "We currently do not have sufficient p5en.48xlarge capacity in the Availability Zone you "
        "requested (us-west-2a). Our system will be working on provisioning additional capacity. "
        "You can currently get p5en.48xlarge capacity by not specifying an Availability Zone in "
        "your request or choosing us-west-2c, us-west-2d."
    )
    error = explained(
        hook("apply_errored"),
        failing(f"creating EC2 Instance: InsufficientInstanceCapacity: {words}", address=DECODE),
    )
    assert error.message == (
        "there is no capacity p5en.48xlarge in us-west-2a now: could not launch decode-0. "
        "AWS names us-west-2c, us-west-2d as having some."
    )
    assert error.exit_code == 6


def test_no_capacity_without_other_zones_says_so() -> None:
    words = "We currently do not have sufficient p5en.48xlarge capacity in the zone."
    error = explained(failing(f"InsufficientInstanceCapacity: {words}"))
    assert error.message.endswith("could not launch all nodes. AWS names no other zone.")


def test_a_full_reservation_is_no_capacity() -> None:
    error = explained(failing("ReservationCapacityExceeded: not sufficient (cr-1)"))
    assert "no capacity in the reservation now" in error.message


def test_a_locked_state_says_by_whom_and_how_to_break_it() -> None:
    detail = "Lock Info:\n  ID:        1234-abcd\n  Who:       ann@host\n  Created:   2026-01-01\n"
    error = explained(failing("Error acquiring the state lock", detail))
    assert isinstance(error, LockedError)
    assert error.message == "Terraform's state is locked by ann@host since 2026-01-01"
    assert error.hint == (
        "Wait for that run to end. If it was killed, break its lock: add --break-lock 1234-abcd"
    )


@pytest.mark.parametrize(
    ("summary", "kind", "said"),
    [
        ("operation error EC2: RunInstances, ExpiredToken: x", AwsError, "credentials any more"),
        ("VcpuLimitExceeded: You have requested more", AwsError, "vCPU quota is used up"),
        ("Failed to query available provider packages", ToolError, "cannot get the AWS provider"),
        (
            "operation error EC2: CreateVpc, UnauthorizedOperation: no",
            AwsError,
            "AWS refused: ec2:CreateVpc",
        ),
        (
            "AccessDenied: User x is not authorized to perform: iam:CreateRole on y",
            AwsError,
            "AWS refused: iam:CreateRole",
        ),
        ("Failed to persist state", StateError, "could not save its state"),
        ("something else", TerraformError, "terraform apply failed (exit 1): something else"),
    ],
)
def test_known_causes_have_their_own_error(
    summary: str, kind: type[KvdeployError], said: str
) -> None:
    error = explained(failing(summary))
    assert type(error) is kind
    assert said in error.message
    assert error.log == LOG
    assert error.hint


def test_many_errors_are_listed_up_to_a_few() -> None:
    error = explained(*(failing(f"error {i}") for i in range(7)))
    assert error.message.splitlines()[1:] == [
        *(f"  error {i}" for i in range(5)),
        "  and 2 more",
    ]


def test_a_crash_is_told_in_its_own_words() -> None:
    assert explained("panic: oh").message == "terraform apply failed (exit 1): panic: oh"


# --- the folder ------------------------------------------------------------------------------
def test_the_folder_is_a_copy_of_infra_that_its_owner_alone_reads(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "tf")
    work.prepare(local_backend(tmp_path / "state"), {"name": "demo"})
    (work.path / "old.tf").write_text("gone")
    work.write_imports([("aws_vpc.this", "vpc-1")])
    (work.path / ".terraform").mkdir()
    work.prepare(s3_backend("b", "demo", "us-west-2"), {"name": "demo"})
    names = {p.name for p in work.path.iterdir()}
    assert {"main.tf", "modules", ".terraform.lock.hcl", ".terraform"} <= names
    assert not {"old.tf", "imports.tf.json", "tests"} & names
    assert stat.S_IMODE(work.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(work.var_file.stat().st_mode) == 0o600
    backend = json.loads((work.path / "backend.tf.json").read_text())["terraform"]["backend"]
    assert backend["s3"] == {
        "bucket": "b",
        "key": "kvdeploy/demo/terraform.tfstate",
        "region": "us-west-2",
        "encrypt": True,
        "use_lockfile": True,
    }


def test_imports_are_written_and_taken_back(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    work.write_imports([(DECODE, "i-1")])
    file = tmp_path / "imports.tf.json"
    assert json.loads(file.read_text()) == {"import": [{"to": DECODE, "id": "i-1"}]}
    work.write_imports(())
    assert not file.exists()


# --- the commands ----------------------------------------------------------------------------
class Terse(FakeRunner):
    """A fake that also speaks line by line."""

    def run(self, command: Command, *, on_line: Callable[[str], None] | None = None) -> Outcome:
        outcome = super().run(command, on_line=on_line)
        if on_line is not None:
            for line in outcome.stdout.splitlines():
                on_line(line)
        return outcome


def terraform(tmp_path: Path, *script: tuple[tuple[str, ...], tuple[int, str]]) -> Terraform:
    (tmp_path / "tfplan").touch()
    return Terraform(Terse(*script), WorkDir(tmp_path), log=tmp_path / "log", parallelism=14)


def ran(tf: Terraform) -> list[tuple[str, ...]]:
    runner = tf._runner
    assert isinstance(runner, FakeRunner)
    return [c.argv[1:] for c in runner.commands]


def change(address: str, kind: str, *actions: str, **more: Any) -> dict[str, Any]:
    return {"address": address, "type": kind, "change": {"actions": list(actions), **more}}


def test_a_plan_goes_to_a_file_and_says_what_it_does(tmp_path: Path) -> None:
    drifted = {"before": {"instance_state": "running"}, "after": {"instance_state": "stopped"}}
    shown = {
        "applyable": True,
        "resource_changes": [
            change(DECODE, "aws_instance", "delete", "create"),
            change("a", "aws_vpc", "create"),
            change("b", "aws_vpc", "no-op"),
            change("c", "aws_ami", "read"),
            change("d", "aws_vpc", "update", importing={"id": "x"}),
            change("e", "aws_vpc", "delete"),
        ],
        "resource_drift": [{"address": DECODE, "type": "aws_instance", "change": drifted}],
    }
    tf = terraform(tmp_path, (("plan",), (2, "")), (("show",), (0, json.dumps(shown))))
    planned = tf.plan(targets=("module.network",))
    assert planned.changes == (
        ResourceChange(address=DECODE, kind="aws_instance", action=Action.REPLACE),
        ResourceChange(address="a", kind="aws_vpc", action=Action.CREATE),
        ResourceChange(address="d", kind="aws_vpc", action=Action.IMPORT),
        ResourceChange(address="e", kind="aws_vpc", action=Action.DESTROY),
    )
    assert planned.drift == (
        Drift(address=DECODE, field="instance_state", was="running", now="stopped"),
    )
    assert ran(tf)[0] == (
        "plan",
        f"-out={tmp_path / 'tfplan'}",
        f"-var-file={tmp_path / 'kvdeploy.tfvars.json'}",
        "-detailed-exitcode",
        "-target=module.network",
        "-parallelism=14",
        "-lock-timeout=20s",
        "-json",
        "-input=false",
    )
    assert stat.S_IMODE((tmp_path / "tfplan").stat().st_mode) == 0o600


def test_a_quick_plan_is_read_off_what_terraform_says(tmp_path: Path) -> None:
    def planned(action: str, address: str = DECODE) -> str:
        resource = {"addr": address, "resource_type": "aws_instance"}
        return event("planned_change", change={"resource": resource, "action": action})

    said = "\n".join([planned("create"), planned("read"), planned("replace", "x")])
    tf = terraform(tmp_path, (("plan",), (2, said)))
    assert tf.plan_again(targets=("module.network",)) == (
        ResourceChange(address=DECODE, kind="aws_instance", action=Action.CREATE),
        ResourceChange(address="x", kind="aws_instance", action=Action.REPLACE),
    )
    assert [words[0] for words in ran(tf)] == ["plan"]
    assert "-target=module.network" in ran(tf)[0]


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    tf = terraform(tmp_path, (("plan",), (0, "")), (("show",), (0, "{}")))
    tf.plan(lock=False)
    assert "-lock=false" in ran(tf)[0]


def test_a_node_of_an_older_generation_that_nothing_replaces_is_outdated(tmp_path: Path) -> None:
    def instance(address: str, index: str, action: str, generation: str) -> dict[str, Any]:
        before = {"tags": {"kvdeploy:generation": generation}}
        return change(address, "aws_instance", action, before=before) | {"index": index}

    shown = {
        "resource_changes": [
            instance(DECODE, "decode-0", "no-op", "1-a"),
            instance("x", "decode-1", "no-op", "1-b"),
            instance("y", "decode-2", "delete", "1-a"),
        ],
        "planned_values": {
            "outputs": {"generations": {"value": {"decode-0": "2-b", "decode-1": "1-b"}}}
        },
    }
    tf = terraform(tmp_path, (("plan",), (2, "")), (("show",), (0, json.dumps(shown))))
    assert tf.plan().outdated == (DECODE,)


def test_the_planned_file_is_applied_and_removed(tmp_path: Path) -> None:
    done = hook("apply_complete", id_value="i-1", elapsed_seconds=3)
    outputs = event("outputs", outputs={"cluster": {"value": {"id": "0"}}})
    tf = terraform(tmp_path, (("apply",), (0, f"{done}\n{outputs}\n")))
    applied = tf.apply()
    assert applied.done == (ResourceDone(address=DECODE, action="create", id="i-1", seconds=3),)
    assert applied.outputs == {"cluster": {"id": "0"}}
    assert ran(tf)[0][0] == "apply"
    assert ran(tf)[0][-1] == str(tmp_path / "tfplan")
    assert not (tmp_path / "tfplan").exists()


def test_terraform_never_sees_the_variables_of_the_shell(tmp_path: Path) -> None:
    tf = terraform(tmp_path, (("init",), (0, "")))
    tf.init()
    runner = tf._runner
    assert isinstance(runner, FakeRunner)
    (command,) = runner.commands
    assert {"TF_VAR_", "TF_CLI_ARGS", "TF_WORKSPACE"} <= set(command.drop_env)
    assert not "TF_CLI_CONFIG_FILE".startswith(command.drop_env)
    assert command.output == tmp_path / "log"
    assert command.grace_s >= 60


def test_what_the_state_knows_is_read_through_all_modules(tmp_path: Path) -> None:
    def resource(address: str, mode: str = "managed") -> dict[str, Any]:
        return {"address": address, "mode": mode, "type": "t", "values": {"id": f"id-{address}"}}

    inner = {"resources": [resource("c")]}
    root = {
        "resources": [resource("a"), resource("d", "data")],
        "child_modules": [{"resources": [resource("b")], "child_modules": [inner]}],
    }
    shown = json.dumps({"values": {"root_module": root}})
    tf = terraform(tmp_path, (("show",), (0, shown)))
    assert tf.managed() == tuple(
        ManagedResource(address=a, kind="t", id=f"id-{a}") for a in ("a", "b", "c")
    )


def test_a_lock_that_is_not_there_cannot_be_broken(tmp_path: Path) -> None:
    tf = terraform(tmp_path, (("force-unlock",), (1, "Failed to unlock state")))
    with pytest.raises(TerraformError, match="the lock 12 cannot be broken: Failed to unlock"):
        tf.force_unlock("12")
    assert ran(tf) == [("force-unlock", "-force", "12")]


def test_the_version_is_read_and_its_absence_is_no_error() -> None:
    there = FakeRunner((("version",), (0, '{"terraform_version": "1.11.4"}')))
    assert find_version(there) == (1, 11, 4)

    class Nowhere(FakeRunner):
        def run(self, command: Command, *, on_line: Any = None) -> Outcome:
            msg = "terraform is not on PATH"
            raise ToolError(msg)

    assert find_version(Nowhere()) == ()
    assert find_version(FakeRunner((("version",), (1, "broken")))) == ()


def test_foreign_variables_are_named() -> None:
    names = ["TF_VAR_x", "TF_CLI_ARGS_plan", "TF_CLI_CONFIG_FILE", "TF_WORKSPACE", "HOME"]
    assert foreign_env(names) == ("TF_CLI_ARGS_plan", "TF_VAR_x", "TF_WORKSPACE")
