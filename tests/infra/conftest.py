"""The real terraform, the real AWS provider, and the project's AWS double."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import yaml

from kvdeploy.adapters.store import Store
from kvdeploy.cli.app import App, main
from kvdeploy.ui import Ui
from tests.double.client import Double
from tests.mirror import terraform_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_SKIP = "KVDEPLOY_TESTS_NO_SKIP"
"""Set in CI: what cannot be tested is a failure there."""
SECRET = "never-to-be-seen-anywhere"


def _absent(what: str) -> NoReturn:
    if os.environ.get(NO_SKIP):
        pytest.fail(f"{what}, and {NO_SKIP} is set")
    pytest.skip(what)


@pytest.fixture(scope="session")
def terraform_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with which terraform finds the AWS provider; skips where there is none."""
    found = terraform_environment(tmp_path_factory.mktemp("terraform"))
    if isinstance(found, str):
        _absent(found)
    return found


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with Double() as aws:
        yield aws


@pytest.fixture
def aws(double: Double) -> Double:
    """A new account."""
    double.reset()
    return double


@dataclass(frozen=True, kw_only=True)
class Said:
    """How one command ended."""

    code: int
    out: str
    err: str


def no_further(argv: tuple[str, ...]) -> tuple[str, ...]:
    """There is nothing behind the double's machines: `up` ends when they run."""
    return (*argv, "--until", "provision") if argv[0] == "up" else argv


class Bench:
    """A folder with a cluster file, and the command line in it."""

    def __init__(self, root: Path, aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.aws, self._capsys = root, aws, capsys
        self.store = Store(root, "demo")
        self.network: dict[str, str] = {}
        """Of an existing one; empty: one is made."""

    def write(self, **changes: Any) -> None:
        """The cluster file: one prefill and one decode node of a small type, and the router."""
        document: dict[str, Any] = {
            "name": "demo",
            "target": "aws",
            "model": {"id": "org/m", "max_length": 4096},
            "aws": {"region": "us-west-2", "zone": "us-west-2a", "instance_type": "p5en.48xlarge"},
        }
        document["aws"] |= {"network": self.network} | changes.pop("aws", {})
        (self.root / "cluster.yaml").write_text(yaml.safe_dump(document | changes))

    def run(self, *argv: str) -> Said:
        err = io.StringIO()
        self._capsys.readouterr()
        code = main(no_further(argv), app=App(ui=Ui(err=err), root=self.root))
        out, more = self._capsys.readouterr()
        return Said(code=code, out=out, err=err.getvalue() + more)

    @property
    def tags(self) -> dict[str, str]:
        """Node -> id of every machine that is there."""
        return {
            m.tags["kvdeploy:node"]: m.id
            for m in self.aws.instances()
            if m.state not in {"terminated", "shutting-down"}
        }

    @property
    def ours(self) -> dict[str, dict[str, dict[str, str]]]:
        """Everything in the account that is not of the network that was there before."""
        return {
            kind: mine
            for kind, found in self.aws.resources().items()
            if (mine := {i: t for i, t in found.items() if any("kvdeploy" in w for w in (i, *t))})
        }


@pytest.fixture
def bench(
    aws: Double,
    terraform_config: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    for name in [n for n in os.environ if n.startswith(("AWS_", "TF_"))]:
        monkeypatch.delenv(name)
    for name, value in {**aws.env, **terraform_config, "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)
    tools = tmp_path / "tools"  # nodes are never reached here, and only looked for
    tools.mkdir()
    for name in ("aws", "session-manager-plugin"):
        (tools / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    made = Bench(tmp_path, aws, capsys)
    made.write()
    return made


@pytest.fixture
def there(bench: Bench) -> None:
    """Nodes and access are made, no network: half a minute less for each `up`."""
    network = bench.aws.existing_network("us-west-2a", internet=False)
    ec2 = bench.aws.client("ec2")
    nat = ec2.create_nat_gateway(SubnetId=network.subnet_id, ConnectivityType="private")
    mine = [{"Name": "vpc-id", "Values": [network.vpc_id]}]
    (table,) = ec2.describe_route_tables(Filters=mine)["RouteTables"]
    ec2.create_route(
        RouteTableId=table["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat["NatGateway"]["NatGatewayId"],
    )
    bench.network = {"vpc_id": network.vpc_id, "subnet_id": network.subnet_id}
    bench.write()
