"""`kvdeploy image` against the double of AWS: real boto3, real HTTP. Playbooks are a script: what
they do to a machine is tested on real hosts, in tests/playbooks.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvdeploy.adapters.ansible.report import HostReport, PlayReport
from kvdeploy.adapters.aws import builders, images, imaging, leftovers
from kvdeploy.adapters.aws.session import Aws
from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import App, main
from kvdeploy.cli.aws import image as command
from kvdeploy.cli.common import load
from kvdeploy.errors import AwsError, CheckError, KvdeployError, PlaybookError, UnreachableError
from kvdeploy.model.catalog import IMAGE_PARAMETERS
from kvdeploy.progress import Mute
from kvdeploy.stages.image_preflight import Wishes
from kvdeploy.ui import Ui
from tests.double.client import Double

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.adapters.ansible.client import Play

pytestmark = pytest.mark.real_process

ROOT = Path(__file__).parents[2]
REGION, ZONE = "us-west-2", "us-west-2a"
Happening = Callable[[], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Double]:
    with Double() as double:
        yield double


@pytest.fixture
def double(server: Double, monkeypatch: pytest.MonkeyPatch) -> Double:
    server.reset()
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


class Clock:
    """No wait: time flies when somebody sleeps, and then `meanwhile` happens."""

    def __init__(self) -> None:
        self.at, self.pace = 0.0, 5
        self.meanwhile: Happening = lambda: None

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += self.pace * seconds
        self.meanwhile()


class Script:
    """Runs no playbook. What happens at which is written down before; what was run is kept."""

    def __init__(self) -> None:
        self.listener: Any = Mute()
        self.plays: list[Play] = []
        self.at: dict[str, Happening] = {}

    def run(self, play: Play) -> PlayReport:
        self.plays.append(play)
        name = Path(play.playbook).name
        assert name in {"reach.yml", "nodes.yml", "seal.yml"}, play.playbook
        self.at.get(name, lambda: None)()
        (host,) = play.inventory.hosts
        return PlayReport(playbook=name, seconds=1.0, hosts=(HostReport(name=host.name, ok=1),))

    @property
    def names(self) -> list[str]:
        return [Path(play.playbook).name for play in self.plays]


@pytest.fixture(scope="module")
def clients() -> Aws:
    """Made once: boto3 takes a third of a second to make a client of EC2."""
    return Aws(REGION, attempts=2)


class Bench:
    """A folder with a cluster file, in an account with a network of somebody else."""

    def __init__(
        self, root: Path, double: Double, aws: Aws, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.root, self.double, self.aws, self._capsys = root, double, aws, capsys
        self.net = double.existing_network(ZONE)
        self.script, self.clock = Script(), Clock()
        self.err = ""
        self.write()

    def write(self, **aws: Any) -> None:
        section = {
            "region": REGION,
            "zone": ZONE,
            "access": {"method": "ssh", "key_name": "ops", "ssh_cidrs": ["192.0.2.0/24"]},
            "network": {
                "vpc_id": self.net.vpc_id,
                "subnet_id": self.net.subnet_id,
                "security_group_id": self.net.security_group_id,
            },
        }
        document = {"name": "demo", "target": "aws", "model": {"id": "org/m"}}
        document |= {"aws": section | aws}
        (self.root / "cluster.yaml").write_text(yaml.safe_dump(document))

    def build(self, *, keep: bool = False, yes: bool = False, **wishes: Any) -> dict[str, Any]:
        """Run the command; what it answers."""
        err = io.StringIO()
        app = App(ui=Ui(err=err), root=self.root)
        self._capsys.readouterr()
        try:
            command.image(
                app,
                load(app, None, ()),
                Store(self.root, "demo"),
                Wishes(**wishes),
                keep=keep,
                yes=yes,
                as_json=True,
                aws=self.aws,
                plays=lambda _: self.script,
                clock=self.clock,
            )
        finally:
            self.err = err.getvalue()
        answer: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return answer

    def run(self, *argv: str) -> tuple[int, str, str]:
        """The command line itself, where it gets by without a playbook."""
        err = io.StringIO()
        self._capsys.readouterr()
        code = main(argv, app=App(ui=Ui(err=err), root=self.root))
        out, more = self._capsys.readouterr()
        return code, out, err.getvalue() + more

    # --- what the account says
    @property
    def builder(self) -> Any:
        (one,) = self.double.instances()
        return one

    def costly(self) -> dict[str, dict[str, dict[str, str]]]:
        """Everything that somebody pays for."""
        kinds = ("instance", "volume", "image", "snapshot")
        return {k: v for k, v in self.double.resources().items() if k in kinds}

    def calls(self, *actions: str) -> list[str]:
        """Calls that went well, in order."""
        done = [c["action"] for c in self.double.calls() if c["code"] is None]
        return [action for action in done if action in actions]

    def keys(self) -> list[str]:
        folders = (self.root / ".kvdeploy/demo/runs").glob("*/builder-*")
        return sorted(path.name for path in folders)


@pytest.fixture
def bench(
    double: Double, clients: Aws, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Bench:
    return Bench(tmp_path, double, clients, capsys)


def failing(error: BaseException) -> Happening:
    def happen() -> None:
        raise error

    return happen


STEPS = ("RunInstances", "StopInstances", "CreateImage", "TerminateInstances")


# --- the good case ---------------------------------------------------------------------------
def test_an_image_is_made_of_a_node_that_nodes_yml_made_and_of_nothing_else(bench: Bench) -> None:
    seen: dict[str, Any] = {}

    def at_seal() -> None:
        seen["builder"] = bench.builder
        seen["leftovers"] = leftovers.find(bench.aws, "demo")
        seen["volumes"] = bench.double.client("ec2").describe_volumes()["Volumes"]

    bench.script.at["seal.yml"] = at_seal
    bench.double.slow_image(0.05)
    told = bench.build()

    assert bench.script.names == ["reach.yml", "nodes.yml", "seal.yml"]
    assert bench.calls(*STEPS) == list(STEPS)
    assert told["made"]
    assert told["state"] == "available"
    builder = seen["builder"]
    assert builder.type == "p5en.48xlarge"
    assert builder.interfaces == ("efa", *["efa-only"] * 15)
    assert builder.public_ip is None
    assert [v["Encrypted"] for v in seen["volumes"]] == [True]
    assert [v["Size"] for v in seen["volumes"]] == [200]
    # `down` and `status` see it, and that it bills.
    (found,) = [one for one in seen["leftovers"] if one.kind == "instance"]
    assert (found.id, found.bills) == (builder.id, True)
    assert builder.tags["kvdeploy:node"] == "image-builder"

    # Nothing is left but the image and its snapshot, both marked.
    left = bench.costly()
    assert set(left) == {"image", "snapshot"}
    for tags in (*left["image"].values(), *left["snapshot"].values()):
        assert tags["kvdeploy:recipe"] == told["recipe"]
        assert tags["kvdeploy:vllm"] == told["versions"]["vllm"]
        assert "kvdeploy:id" not in tags
    assert bench.keys() == []
    assert bench.double.refused() == []

    # The checks read an image's system in its name.
    made = images.image(bench.aws, told["id"])
    assert made is not None
    assert (made.os, made.architecture) == ("Ubuntu 24.04", "x86_64")


def test_the_builder_is_told_whom_to_let_in_and_who_it_is(bench: Bench) -> None:
    keys: list[str] = []
    bench.script.at["reach.yml"] = lambda: keys.extend(bench.keys())
    bench.build()
    (launch,) = [c for c in bench.double.calls() if c["action"] == "RunInstances"]
    import base64

    text = base64.b64decode(launch["request"]["UserData"]).decode()
    assert text.startswith("#cloud-config\n")
    config = yaml.safe_load(text)
    (login,) = config["ssh_authorized_keys"]
    assert login.startswith("ssh-ed25519 ")
    assert keys == ["builder-host", "builder-host.pub", "builder-login", "builder-login.pub"]
    (host,) = bench.script.plays[0].inventory.hosts
    connection = bench.script.plays[0].inventory.connection
    assert connection.learn_host_keys is False
    known = Path(connection.known_hosts).read_text().split()
    assert known[0] == host.instance_id
    assert known[1:3] == config["ssh_keys"]["ed25519_public"].split()[:2]
    # Whoever never comes back costs four hours at most.
    assert config["bootcmd"] == [["systemd-run", "--on-active=14400", "systemctl", "poweroff"]]
    assert launch["request"]["InstanceInitiatedShutdownBehavior"] == "terminate"


def test_all_roles_but_the_models_are_run_with_the_variables_of_the_type(bench: Bench) -> None:
    bench.build(instance_type="g6.8xlarge")
    _, nodes, seal = bench.script.plays
    assert nodes.tags == ("base", "nvidia", "efa", "vllm", "nixl")
    told = nodes.inventory.group_vars["gpu"]
    assert (told["nvidia_gpus"], told["efa_devices"], told["nvidia_fabric"]) == (1, 1, False)
    assert told["model_source"] == "none"
    assert Path(told["vllm_lock"]).name == "cuda.txt"
    document = seal.variables["image_document"]
    assert document["path"] == "/opt/kvdeploy/image.json"
    assert document["content"]["versions"]["vllm"]


def test_the_same_recipe_and_base_is_made_once(bench: Bench) -> None:
    first = bench.build()
    bench.double.forget_calls()
    again = bench.build()
    assert again["id"] == first["id"]
    assert again["made"] is False
    assert bench.calls(*STEPS) == []
    code, out, _ = bench.run("image")
    assert code == 0
    assert out.startswith(f"image: {first['id']} (")
    assert out.endswith(
        "there already; nothing to do\n"
        "into the cluster file, whose GPU nodes 'kvdeploy up' then makes anew from it:\n"
        f"aws:\n  ami: {first['id']}\n"
    )

    # Another kind of machine and another base are other images.
    other = bench.build(instance_type="g6.8xlarge")
    assert (other["made"], other["recipe"] != first["recipe"]) == (True, True)
    newer = bench.double.add_parameter(
        IMAGE_PARAMETERS["node"],
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20990101",
    )
    third = bench.build()
    assert (third["made"], third["base"], third["recipe"]) == (True, newer, first["recipe"])

    code, out, _ = bench.run("image", "--list")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert {row[0]: row[1] for row in rows} == {
        first["id"]: "current",
        other["id"]: "other",
        third["id"]: "current",
    }
    code, out, _ = bench.run("image", "--list", "--json")
    assert {one["id"] for one in json.loads(out)} == {first["id"], other["id"], third["id"]}


def test_an_image_of_ours_in_the_cluster_file_is_not_built_upon(bench: Bench) -> None:
    first = bench.build()
    bench.write(ami=first["id"])
    assert bench.build()["made"] is False
    # Where its own base is gone, another must be named.
    bench.double.remove_image(first["base"])
    with pytest.raises(CheckError) as refused:
        bench.build()
    assert refused.value.message == (
        f"aws.ami {first['id']} was made by kvdeploy from {first['base']}, and that one does not "
        "exist in us-west-2"
    )
    assert refused.value.hint == "Name an image to begin with: --base ami-..."


def test_what_is_called_is_in_the_policy(bench: Bench) -> None:
    bench.build()
    create_denied(bench)
    with pytest.raises(AwsError):
        bench.build(instance_type="g6.8xlarge")
    text = (ROOT / "docs/aws-permissions.md").read_text(encoding="utf-8")
    allowed = set(re.findall(r'"([a-z0-9]+:\w+)"', text))
    called = {f"{c['service']}:{c['action']}" for c in bench.double.calls()}
    assert {c for c in called if c.split(":")[0] == "ec2"} - allowed == set()


# --- where the builder stands ----------------------------------------------------------------
def test_the_network_of_a_cluster_that_is_up_is_found_by_its_tags(bench: Bench) -> None:
    ec2 = bench.double.client("ec2")
    known = {"kvdeploy:cluster": "demo", "kvdeploy:id": "0123456789abcdef"}

    def mark(thing: str, address: str) -> None:
        tags = known | {"kvdeploy:address": address}
        ec2.create_tags(Resources=[thing], Tags=[{"Key": k, "Value": v} for k, v in tags.items()])

    mark(bench.net.subnet_id, "module.network.aws_subnet.fabric/0")
    mark(bench.net.security_group_id, "module.network.aws_security_group.fabric/0")
    value = {"id": known["kvdeploy:id"], "owner": "ann", "created_at": "2026-11-30T12:00:00Z"}
    state = {"outputs": {"cluster": {"value": value}}}
    store = Store(bench.root, "demo")
    store.terraform_state.parent.mkdir(parents=True)
    store.terraform_state.write_text(json.dumps(state))
    bench.write(network={})
    bench.build()
    (launch,) = [c for c in bench.double.calls() if c["action"] == "RunInstances"]
    assert launch["request"]["NetworkInterface.1.SubnetId"] == bench.net.subnet_id
    assert "0123456789abcdef" in launch["request"].values()


def test_everything_that_is_missing_is_said_at_once_before_anything_is_made(bench: Bench) -> None:
    bench.write(network={}, access={"method": "ssm"})
    code, out, err = bench.run("image")
    assert (code, out) == (4, "")
    assert (
        "error: no subnet for the builder (--subnet, or aws.network.subnet_id)\n"
        "no security group for the builder (--security-group, or aws.network.security_group_id)\n"
        "no instance profile for the builder, and Session Manager needs one (--instance-profile)\n"
        "  try: Bring the cluster up first (it lends its network), or name what is missing.\n"
    ) in err
    assert bench.calls(*STEPS) == []


def test_what_is_named_and_wrong_is_said(bench: Bench) -> None:
    other = bench.double.existing_network(ZONE, "10.61.0.0/16")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"subnet": "subnet-0123"}, "the subnet subnet-0123 does not exist in us-west-2"),
        ({"security_group": "sg-0123"}, "the security group sg-0123 does not exist in us-west-2"),
        (
            {"subnet": other.subnet_id},
            f"{other.subnet_id} is in {other.vpc_id}, and {bench.net.security_group_id} in "
            f"{bench.net.vpc_id}",
        ),
        (
            {"instance_type": "p5en.4xlarge"},
            "an image cannot be made on 'p5en.4xlarge': nodes.yml proves GPUs and EFA",
        ),
        ({"base": "ami-0123"}, "--base ami-0123 does not exist in us-west-2"),
    )
    for wishes, said in wrong:
        with pytest.raises(CheckError) as refused:
            bench.build(**wishes)
        assert refused.value.message == said
    router = bench.double.client("ssm").get_parameter(Name=IMAGE_PARAMETERS["router"])
    bench.double.remove_image(router["Parameter"]["Value"])
    arm = bench.double.add_parameter("/x", "Amazon Linux 2023 AMI")
    with pytest.raises(CheckError) as refused:
        bench.build(base=arm)
    assert refused.value.message == f"--base {arm} is of Amazon Linux 2023 (Amazon Linux 2023 AMI)"
    assert bench.calls(*STEPS) == []


def test_a_reservation_is_used_by_a_builder_of_its_type_alone(bench: Bench) -> None:
    block = bench.double.reservation("p5en.48xlarge", ZONE, 1, kind="capacity-block")
    bench.write(capacity={"kind": "capacity-block", "reservation_id": block})
    seen: list[Any] = []
    bench.script.at["nodes.yml"] = lambda: seen.append(bench.builder)
    bench.build()
    bench.build(instance_type="g6.8xlarge")
    assert [(b.lifecycle, b.reservation) for b in seen] == [("capacity-block", block), (None, None)]
    bench.double.set_reservation(block, count=0)
    with pytest.raises(CheckError) as refused:
        bench.build(base=bench.double.add_parameter(IMAGE_PARAMETERS["node"], "Ubuntu 24.04 b"))
    assert refused.value.message == (
        f"the reservation {block} has no room for a builder beside the nodes"
    )


def test_images_are_a_matter_of_aws(bench: Bench) -> None:
    (bench.root / "cluster.yaml").write_text("name: demo\n")
    code, _, err = bench.run("image")
    assert code == 4
    assert err == (
        f"error: {bench.root}/cluster.yaml is for target local, and images are for target aws\n"
        "  try: 'kvdeploy init --target aws' writes a cluster file for AWS.\n"
    )


# --- what goes wrong: one sentence, and nothing is left that costs -----------------------------
def no_capacity(bench: Bench) -> None:
    bench.double.capacity("p5en.48xlarge", ZONE, 0)


def no_quota(bench: Bench) -> None:
    bench.double.quota("L-417A185B", 8)


def ended_by_ec2(bench: Bench) -> None:
    bench.double.slow_boot(3600)

    def end() -> None:
        for one in bench.double.instances():
            if one.state == "pending":
                bench.double.terminate_instance(one.id)

    bench.clock.meanwhile = end


def never_runs(bench: Bench) -> None:
    bench.double.slow_boot(3600)


def never_answers(bench: Bench) -> None:
    said = UnreachableError("image-builder is not reachable: it did not answer in time")
    bench.script.at["reach.yml"] = failing(said)


def nodes_fails(bench: Bench) -> None:
    bench.script.at["nodes.yml"] = failing(PlaybookError("image-builder has 7 of 8 GPUs"))


def seal_fails(bench: Bench) -> None:
    bench.script.at["seal.yml"] = failing(PlaybookError("image-builder cannot become an image"))


def stop_denied(bench: Bench) -> None:
    bench.double.deny("StopInstances")


def create_denied(bench: Bench) -> None:
    bench.double.deny("CreateImage")


def image_fails(bench: Bench) -> None:
    bench.double.slow_image(3600)

    def fail() -> None:
        for image_id in bench.costly().get("image", {}):
            bench.double.fail_image(image_id, "internal error")

    bench.clock.meanwhile = fail


def image_takes_for_ever(bench: Bench) -> None:
    bench.double.slow_image(3600)
    bench.script.at["seal.yml"] = lambda: setattr(bench.clock, "pace", 60)


@pytest.mark.parametrize(
    ("happens", "code", "message"),
    [
        (
            no_capacity,
            14,
            "there is no capacity in this zone for a builder, a p5en.48xlarge, now "
            r"\(InsufficientInstanceCapacity\)",
        ),
        (
            no_quota,
            14,
            r"the account's vCPU quota has no room for a builder, a p5en.48xlarge "
            r"\(VcpuLimitExceeded\)",
        ),
        (ended_by_ec2, 14, "the builder i-[0-9a-f]+ is terminated: .*Internal error"),
        (never_runs, 14, "the builder i-[0-9a-f]+ is pending 900 s after it was launched"),
        (never_answers, 8, "image-builder is not reachable: it did not answer in time"),
        (nodes_fails, 7, "image-builder has 7 of 8 GPUs"),
        (seal_fails, 7, "image-builder cannot become an image"),
        (stop_denied, 14, "ec2:StopInstances is not allowed to this identity"),
        (create_denied, 14, "ec2:CreateImage is not allowed to this identity"),
        (
            image_fails,
            14,
            "EC2 could not make the image ami-[0-9a-f]+, it is failed: internal error",
        ),
        (
            image_takes_for_ever,
            14,
            "the image ami-[0-9a-f]+ is not ready 2 hours after it was asked for",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failure_is_one_sentence_and_leaves_nothing_that_costs(
    happens: Callable[[Bench], None], code: int, message: str, bench: Bench
) -> None:
    happens(bench)
    with pytest.raises(KvdeployError) as failed:
        bench.build()
    assert re.fullmatch(message, failed.value.message), failed.value.message
    assert failed.value.exit_code == code
    assert bench.costly() == {}
    assert bench.keys() == []
    assert bench.double.refused() == []


@pytest.mark.parametrize("at", ["reach.yml", "nodes.yml", "seal.yml", "image"])
def test_an_interrupt_leaves_nothing_that_costs(at: str, bench: Bench) -> None:
    if at == "image":
        # Twice: the second time while all is being cleared away.
        bench.double.slow_image(3600)
        left = [KeyboardInterrupt(), KeyboardInterrupt()]
        bench.clock.meanwhile = lambda: failing(left.pop())() if left else None
    bench.script.at[at] = failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        bench.build()
    if at == "image":
        assert bench.calls("CreateImage") == ["CreateImage"]
    assert bench.costly() == {}


class Lost(Aws):
    """Calls arrive at AWS; the answer to one of them is never read."""

    def __init__(self, operation: str) -> None:
        super().__init__(REGION, attempts=2)
        self._operation = operation

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        answer = super().call(operation, **parameters)
        if operation == self._operation:
            raise KeyboardInterrupt
        return answer


def a_moment() -> None:
    threading.Event().wait(0.1)


@pytest.mark.parametrize("operation", ["ec2:RunInstances", "ec2:CreateImage"])
def test_what_was_made_by_a_call_whose_answer_was_never_read_is_found_and_ended(
    operation: str, bench: Bench
) -> None:
    bench.aws = Lost(operation)
    with pytest.raises(KeyboardInterrupt):
        bench.build()
    assert bench.calls(operation.removeprefix("ec2:")) == [operation.removeprefix("ec2:")]
    assert bench.costly() == {}


def test_a_builder_that_cannot_be_ended_is_named_with_what_to_do(bench: Bench) -> None:
    nodes_fails(bench)
    bench.double.deny("TerminateInstances")
    with pytest.raises(AwsError) as failed:
        bench.build()
    name = bench.builder.id
    assert failed.value.message == (
        f"image-builder has 7 of 8 GPUs; and the builder {name} may still run, and bill: "
        "ec2:TerminateInstances is not allowed to this identity"
    )
    assert failed.value.hint == (
        f"End it: 'aws ec2 terminate-instances --region us-west-2 --instance-ids {name}'. "
        "'kvdeploy down' and 'kvdeploy image' end it, too."
    )


def test_a_passing_fault_does_not_keep_the_builder_alive(bench: Bench) -> None:
    nodes_fails(bench)
    bench.double.fault("TerminateInstances", "Unavailable", status=503, times=5)
    with pytest.raises(PlaybookError):
        bench.build()
    assert bench.costly() == {}


def test_a_kept_builder_is_told_of_and_ended_by_the_next_run_that_may(bench: Bench) -> None:
    nodes_fails(bench)
    with pytest.raises(PlaybookError):
        bench.build(keep=True)
    kept = bench.builder
    assert f"kept: builder {kept.id}, at its price an hour" in bench.err
    login = re.search(r"   (ssh .* -- \S+)$", bench.err, re.MULTILINE)
    assert login is not None
    assert "builder-login" in login[1]
    assert len(bench.keys()) == 4

    bench.script.at.clear()
    code, _, err = bench.run("image")
    assert code == 2
    assert f"A builder of an earlier run is there: {kept.id} (running since " in err
    assert bench.builder.id == kept.id
    assert bench.build(yes=True)["made"]
    assert set(bench.costly()) == {"image", "snapshot"}


def test_an_image_that_a_killed_run_asked_for_is_waited_for(bench: Bench) -> None:
    first = bench.build()
    ec2 = bench.double.client("ec2")
    (described,) = ec2.describe_images(ImageIds=[first["id"]])["Images"]
    tags = [t for t in described["Tags"] if t["Key"] != "Name"]
    machine = ec2.run_instances(
        ImageId=first["base"],
        InstanceType="c7i.2xlarge",
        MinCount=1,
        MaxCount=1,
        SubnetId=bench.net.subnet_id,
    )["Instances"][0]["InstanceId"]
    bench.double.slow_image(1.5)
    second = ec2.create_image(
        InstanceId=machine,
        Name="another",
        TagSpecifications=[{"ResourceType": "image", "Tags": tags}],
    )["ImageId"]
    ec2.deregister_image(ImageId=first["id"])
    bench.clock.meanwhile = a_moment
    told = bench.build()
    assert (told["id"], told["made"], told["state"]) == (second, False, "available")
    assert f"= {second}: an earlier run asked for it" in bench.err


def test_an_image_that_failed_is_no_image(bench: Bench) -> None:
    first = bench.build()
    bench.double.fail_image(first["id"], "broken")
    assert bench.build()["made"]


# --- the adapter's own corners ---------------------------------------------------------------
def test_ending_what_is_gone_already_is_no_fault(bench: Bench) -> None:
    assert builders.end(bench.aws, ["i-0123456789abcdef0"], clock=bench.clock) == ()
    assert builders.end(bench.aws, [], clock=bench.clock, build="nobody") == ()
    assert imaging.discard(bench.aws, "nobody") == ()
