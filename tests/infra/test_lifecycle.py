"""`up`, `plan`, `status` and `down` on AWS: real terraform, real provider, the project's double."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from kvdeploy.model.catalog import IMAGE_PARAMETERS
from tests.infra.conftest import SECRET

if TYPE_CHECKING:
    from tests.infra.conftest import Bench

pytestmark = pytest.mark.real_process

NODES = {"prefill-0", "decode-0", "router-0"}


def test_from_nothing_to_nodes_and_back_to_nothing(bench: Bench) -> None:
    """The whole life of a cluster, each step seen by the account itself."""
    made = bench.run("up")
    assert made.code == 0, made.err
    assert "up: 3 nodes run" in made.out
    assert "cost: $127.18 an hour, $3052 a day" in made.err
    assert "   + instance decode-0 i-" in made.err
    before = bench.tags
    assert set(before) == NODES
    machines = {m.tags["kvdeploy:node"]: m for m in bench.aws.instances()}
    assert len(machines["decode-0"].interfaces) == 16
    assert machines["decode-0"].placement_group == "kvdeploy-demo"
    assert machines["router-0"].placement_group in {None, ""}
    assert all(m.public_ip is None for m in machines.values())

    # Nothing to do: no Terraform is run, and AWS is only asked.
    bench.aws.forget_calls()
    again = bench.run("up")
    assert again.code == 0, again.err
    assert "all holds; nothing to do" in again.out
    assert {a for a in bench.aws.counts() if not a.startswith(("Describe", "Get", "List"))} <= {
        "HeadBucket"
    }

    # A newer image behind the parameter is for whoever asks for it.
    newer = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20990101"
    bench.aws.add_parameter(IMAGE_PARAMETERS["node"], newer)
    planned = bench.run("plan")
    assert planned.code == 0, planned.err
    assert "terraform: nothing to do" in planned.out
    assert planned.out.split("terraform: nothing to do\n")[1].splitlines()[:3] == [
        "make ready (nodes.yml): decode-0, prefill-0, router-0",
        "start: decode-0, prefill-0, router",
        "up: configure, model, fleet, proof",
    ]
    replaced = json.loads(bench.run("plan", "--replace", "decode-0", "--json").out)
    ends = [c for c in replaced["changes"] if c["kind"] == "aws_instance"]
    assert [(c["address"].split('"')[1], c["action"]) for c in ends] == [("decode-0", "replace")]
    assert replaced["up"]["stages"][0] == "provision"

    status = bench.run("status", "--json")
    assert status.code == 0
    told = json.loads(status.out)
    assert {n["node"] for n in told["nodes"]} == NODES
    assert told["whole"]
    assert told["owner"] == bench.store.read().identity.owner  # type: ignore[union-attr]

    # One node more; the others stay as they are.
    bench.write(fleet={"decode": {"count": 2, "tensor_parallel": 8}})
    grown = bench.run("up")
    assert grown.code == 0, grown.err
    assert set(bench.tags) == NODES | {"decode-1"}
    assert before.items() <= bench.tags.items()

    # What a cluster is made in, it stays in.
    for command in ("plan", "up"):
        moved = bench.run(command, "--set", "aws.zone=us-west-2c")
        assert moved.code == 4
        assert "aws.zone was us-west-2a, and is to be us-west-2c" in moved.err

    # Tags, templates and rules change without touching machines.
    bench.write(
        fleet={"decode": {"count": 2, "tensor_parallel": 8}},
        aws={"tags": {"team": "ml"}, "network": {"allowed_cidrs": ["10.1.0.0/16"]}},
    )
    planned = bench.run("plan", "--json")
    told = json.loads(planned.out)
    assert {c["action"] for c in told["changes"]} == {"update", "create"}
    assert {c["path"]: c["does"] for c in told["fields"]} == {
        "aws.tags": "reload",
        "aws.network.allowed_cidrs": "reload",
    }
    grown_ids = bench.tags
    assert bench.run("up").code == 0
    assert bench.tags == grown_ids
    assert "terraform: nothing to do" in bench.run("plan").out

    # One node less ends a machine: nobody is here to agree.
    bench.write()
    refused = bench.run("up")
    assert refused.code == 2
    assert "This will end decode-1, and what runs there." in refused.err
    assert "--yes" in refused.err
    assert set(bench.tags) == NODES | {"decode-1"}
    assert bench.run("up", "--yes").code == 0
    assert bench.tags == before

    # On purpose, one node is made anew; a refusal is forgotten.
    assert (
        "This will replace decode-0, and what runs there."
        in bench.run("up", "--replace", "decode-0").err
    )
    assert "terraform: nothing to do" in bench.run("plan").out
    replaced = bench.run("up", "--yes", "--replace", "decode-0")
    assert replaced.code == 0, replaced.err
    changed = {name for name, id_ in bench.tags.items() if before[name] != id_}
    assert changed == {"decode-0"}

    assert bench.run("down").code == 2
    assert set(bench.tags) == NODES
    down = bench.run("down", "--yes")
    assert down.code == 0, down.err
    assert "nothing is left that bills" in down.out
    assert bench.aws.resources() == {}
    assert bench.aws.refused() == []
    assert bench.run("down").out == "down: demo: nothing is there, nothing is left\n"
    assert bench.run("status").out == "demo: nothing runs in us-west-2\n"


@pytest.mark.usefixtures("there")
def test_what_is_on_disk_can_be_read_by_its_owner_alone_and_holds_no_secret(bench: Bench) -> None:
    assert bench.run("up").code == 0
    folder = bench.store.terraform
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "kvdeploy.tfvars.json").stat().st_mode) == 0o600
    assert not (folder / "tfplan").exists()
    for path in bench.store.dir.rglob("*"):
        if path.is_file() and ".terraform" not in path.relative_to(bench.store.dir).parts:
            assert SECRET not in path.read_text(errors="replace"), path
