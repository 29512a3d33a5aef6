"""What goes wrong with AWS in the middle of a run: told clearly, and the next run converges."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.infra.conftest import no_further

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.double.client import Double
    from tests.infra.conftest import Bench

pytestmark = [pytest.mark.real_process, pytest.mark.usefixtures("there")]

TYPE, ZONE = "p5en.48xlarge", "us-west-2a"
NODES = {"prefill-0", "decode-0", "router-0"}


# --- capacity --------------------------------------------------------------------------------
def test_no_capacity_is_told_within_a_minute_with_the_zones_that_aws_names(bench: Bench) -> None:
    bench.aws.capacity(TYPE, ZONE, 1)
    bench.aws.capacity(TYPE, "us-west-2c", 8)
    said = bench.run("up", "--on-error", "stop")
    assert said.code == 6
    ended = time.time()
    assert f"error: there is no capacity {TYPE} in {ZONE} now: could not launch " in said.err
    (asked, *_) = [c["at"] for c in bench.aws.calls() if c["action"] == "RunInstances"]
    assert ended - asked < 60
    assert "AWS names us-west-2c as having some." in said.err
    assert "kept: " in said.err
    kept = bench.tags
    assert len(kept) == 2  # one of the two, and the router

    # The rest comes when there is room: what was kept stays.
    bench.aws.capacity(TYPE, ZONE, 2)
    assert bench.run("up").code == 0
    assert set(bench.tags) == NODES
    assert kept.items() <= bench.tags.items()


def test_a_partial_fleet_is_taken_back_when_asked(bench: Bench) -> None:
    bench.aws.capacity(TYPE, ZONE, 1)
    said = bench.run("up", "--on-error", "down")
    assert said.code == 6
    assert bench.tags == {}
    assert "gone: " in said.err
    assert bench.ours["launch-template"]  # free, and stays for the next try
    assert bench.run("down", "--yes").code == 0
    assert bench.ours == {}


def test_nodes_that_ran_before_are_not_taken_back(bench: Bench) -> None:
    assert bench.run("up").code == 0
    before = bench.tags
    bench.aws.capacity(TYPE, ZONE, 2)
    bench.write(fleet={"decode": {"count": 2, "tensor_parallel": 8}})
    assert bench.run("up", "--on-error", "down").code == 6
    assert bench.tags == before


# --- AWS says no -----------------------------------------------------------------------------
def test_each_no_of_aws_is_told_and_the_next_run_goes_on_from_there(bench: Bench) -> None:
    """A permission that is missing, a quota that fills up, credentials that end: in one cluster."""
    bench.aws.deny("CreatePlacementGroup")
    denied = bench.run("up")
    assert denied.code == 14
    assert "error: AWS refused: ec2:CreatePlacementGroup" in denied.err
    assert "docs/aws-permissions.md" in denied.err

    bench.aws.clear_faults()
    bench.aws.fault("RunInstances", "VcpuLimitExceeded", "You have requested more vCPU", times=None)
    full = bench.run("up", "--on-error", "stop")
    assert full.code == 14
    assert "error: the account's vCPU quota is used up: " in full.err

    bench.aws.clear_faults()
    bench.aws.fault("RunInstances", "RequestExpired", "Request has expired.", times=None)
    expired = bench.run("up", "--on-error", "stop")
    assert expired.code == 14
    assert "AWS does not accept the credentials any more" in expired.err
    assert bench.tags == {}

    bench.aws.clear_faults()
    bench.aws.throttle("RunInstances", times=2)
    bench.aws.throttle("DescribeInstances", times=3)
    made = bench.run("up")
    assert made.code == 0, made.err
    assert set(bench.tags) == NODES

    # Expired before anything began: found by the checks, and nothing is asked of Terraform.
    bench.aws.expire_credentials()
    for command in ("check", "up", "plan"):
        said = bench.run(command)
        assert said.code == 4
        assert "[aws-credentials]" in said.err + said.out
    assert bench.run("down", "--yes").code == 14
    bench.aws.expire_credentials(expired=False)

    # A machine that EC2 ended is made anew; the others stay.
    before = bench.tags
    bench.aws.terminate_instance(before["decode-0"])
    status = bench.run("status")
    assert status.code == 9
    assert "missing" in status.out
    assert bench.run("up").code == 0
    changed = {name for name, id_ in bench.tags.items() if before[name] != id_}
    assert changed == {"decode-0"}

    # One that stopped is started; its address and its place stay.
    whole = bench.tags
    bench.aws.stop_instance(whole["prefill-0"])
    assert "stopped" in bench.run("status").out
    assert "drift: " in bench.run("plan").out
    assert bench.run("up").code == 0
    assert bench.tags == whole
    assert bench.run("status").code == 0

    # An interface that an instance left behind holds nothing up.
    identity = bench.store.read().identity
    assert identity is not None
    leaked = bench.aws.leak_interface(
        bench.network["subnet_id"], tags={"kvdeploy:id": identity.id, "kvdeploy:cluster": "demo"}
    )
    down = bench.run("down", "--yes")
    assert down.code == 0, down.err
    assert leaked in down.err
    assert bench.ours == {}


# --- killed ------------------------------------------------------------------------------------
class Killed:
    """A kvdeploy of its own process, to be killed."""

    def __init__(self, bench: Bench, *argv: str) -> None:
        self.log = bench.root / "killed.log"
        with self.log.open("ab") as sink:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "kvdeploy", *no_further(argv)],
                cwd=bench.root,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def terraform(self) -> psutil.Process:
        for one in psutil.Process(self.child.pid).children(recursive=True):
            if one.name() == "terraform":
                return one
        pytest.fail("terraform does not run")

    def kill(self, *, terraform_first: bool = False) -> None:
        """With SIGKILL; wait until Terraform is gone too, however it ends."""
        terraform = self.terraform
        if terraform_first:
            terraform.kill()
        self.child.kill()
        self.child.wait(30)
        until(lambda: not terraform.is_running())


@pytest.fixture
def start(bench: Bench) -> Iterator[Callable[..., Killed]]:
    """Start a kvdeploy in the bench's folder; none outlives its test."""
    started: list[Killed] = []

    def begin(*argv: str) -> Killed:
        started.append(Killed(bench, *argv))
        return started[-1]

    yield begin
    for run in started:
        run.child.kill()
        run.child.wait(30)


def until(ready: Callable[[], bool], *, timeout_s: float = 90) -> None:
    ends = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.1)


def asked(aws: Double, action: str, times: int = 1) -> Callable[[], bool]:
    return lambda: aws.counts().get(action, 0) >= times


@pytest.fixture(params=["kvdeploy", "terraform"])
def terraform_first(request: pytest.FixtureRequest) -> bool:
    """Who is killed: kvdeploy, and Terraform is interrupted with it; or Terraform, at once."""
    return bool(request.param == "terraform")


def test_machines_of_a_killed_run_are_kept_and_no_more_are_launched(
    bench: Bench, start: Callable[..., Killed], *, terraform_first: bool
) -> None:
    bench.aws.slow_boot(25)
    run = start("up")
    until(asked(bench.aws, "RunInstances", 3))
    run.kill(terraform_first=terraform_first)
    launched = bench.tags
    assert set(launched) == NODES
    bench.aws.forget_calls()
    again = bench.run("up")
    assert again.code == 0, again.err
    assert bench.tags == launched
    assert bench.aws.counts().get("RunInstances", 0) == 0
    assert "terraform: nothing to do" in bench.run("plan").out


def test_a_network_of_a_killed_run_is_not_made_twice(
    bench: Bench, start: Callable[..., Killed]
) -> None:
    bench.network = {}
    bench.write()
    bench.aws.latency("CreateSubnet", 3)
    run = start("up")
    until(asked(bench.aws, "CreateSubnet"))
    run.kill(terraform_first=True)
    bench.aws.latency("CreateSubnet", 0)
    assert bench.run("up").code == 0
    assert len(bench.ours["vpc"]) == 1
    assert bench.run("down", "--yes").code == 0
    assert bench.ours == {}


def test_a_killed_down_is_finished_by_the_next(bench: Bench, start: Callable[..., Killed]) -> None:
    assert bench.run("up").code == 0
    bench.aws.slow_shutdown(4)
    run = start("down", "--yes")
    until(asked(bench.aws, "TerminateInstances"))
    run.kill(terraform_first=True)
    bench.aws.slow_shutdown(0)
    down = bench.run("down", "--yes")
    assert down.code == 0, down.err
    assert bench.ours == {}


def test_machines_are_found_by_their_tags_when_everything_here_is_lost(bench: Bench) -> None:
    bench.network = {}
    bench.write()
    assert bench.run("up").code == 0
    shutil.rmtree(bench.store.dir)
    status = bench.run("status")
    assert status.code == 9
    assert "nothing here remembers it" in status.out
    clash = bench.run("up")
    assert clash.code == 4
    assert "[name-taken]" in clash.err
    before = bench.tags
    assert set(before) == NODES
    lost_id = clash.err.split("--adopt ")[1].split("'")[0]
    adopted = bench.run("up", "--adopt", lost_id)
    assert adopted.code == 0, adopted.err
    assert "   = instance decode-0 " in adopted.err
    assert bench.tags == before
    assert "terraform: nothing to do" in bench.run("plan").out
    shutil.rmtree(bench.store.dir)
    down = bench.run("down", "--yes")
    assert down.code == 0, down.err
    assert bench.ours == {}


BILL = r"are there, and bill: at most \$[1-9][\d.]+ an hour"


def _interrupted(run: Killed) -> str:
    """What it says before it says that it was interrupted."""
    said = [ln for ln in run.log.read_text().splitlines() if ln.startswith("interrupted: ")]
    return said[-2]


def test_ctrl_c_saves_the_state_and_ends_with_130(
    bench: Bench, start: Callable[..., Killed]
) -> None:
    bench.aws.slow_boot(60)
    run = start("up")
    until(asked(bench.aws, "RunInstances", 3))
    os.kill(run.child.pid, signal.SIGINT)
    assert run.child.wait(60) == 130
    assert re.fullmatch(
        rf"interrupted: .*instance i-\w+ \(.*\),? ?.*{BILL}; "
        r"'kvdeploy up' goes on, 'kvdeploy down' ends everything",
        _interrupted(run),
    )
    bench.aws.slow_boot(0)
    bench.aws.latency("TerminateInstances", 15)
    run = start("down", "--yes")
    until(asked(bench.aws, "TerminateInstances"))
    os.kill(run.child.pid, signal.SIGINT)
    assert run.child.wait(60) == 130
    assert re.fullmatch(
        rf"interrupted: .*instance i-\w+ \(.*\),? ?.*{BILL}; 'kvdeploy down' goes on",
        _interrupted(run),
    )
    bench.aws.latency("TerminateInstances", 0)
    assert bench.run("down", "--yes").code == 0
    assert bench.ours == {}


# --- two at once, and the state in S3 ------------------------------------------------------------
@pytest.fixture
def shared(bench: Bench) -> Bench:
    """A cluster whose state is in S3."""
    bench.write(state={"bucket": "kvdeploy-state"})
    made = bench.run("init", "--state", "kvdeploy-state")
    assert made.code == 0, made.err
    return bench


def test_a_second_run_is_refused_by_the_lock_in_s3_which_a_killed_one_leaves(
    shared: Bench, start: Callable[..., Killed]
) -> None:
    shared.aws.slow_boot(60)
    run = start("up")
    until(asked(shared.aws, "RunInstances", 3))
    here = shared.run("up")
    assert here.code == 12
    assert "is held by 'kvdeploy up' (pid" in here.err
    run.kill(terraform_first=True)
    shared.aws.slow_boot(0)
    locked = shared.run("up")
    assert locked.code == 12
    assert "Terraform's state is locked by " in locked.err
    lock = locked.err.split("--break-lock ")[1].split()[0]
    wrong = shared.run("up", "--break-lock", "0-0")
    assert wrong.code == 6
    assert "cannot be broken" in wrong.err
    again = shared.run("up", "--break-lock", lock)
    assert again.code == 0, again.err
    assert set(shared.tags) == NODES


def test_another_checkout_joins_the_cluster_by_its_state(shared: Bench) -> None:
    assert shared.run("up").code == 0
    assert shared.run("up", "--yes", "--replace", "decode-0").code == 0
    before = shared.tags
    shared.store.dir.rename(shared.root / "elsewhere")
    joined = shared.run("up")
    assert joined.code == 0, joined.err
    assert shared.tags == before  # the replaced one, too: its generation is read off its tag
