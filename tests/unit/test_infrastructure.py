"""From a cluster file to nodes and Terraform's variables; and what becomes of orphans."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.facts import OperatorFacts
from kvdeploy.model.infra import ClusterIdentity, Leftover
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.adoption import (
    CHILDREN,
    Orphans,
    decode_address,
    sort_orphans,
    strays,
)
from kvdeploy.planning.infrastructure import build_variables, expires_at, model_bucket
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.planning.operator_checks import check_operator

ROOT = Path(__file__).parents[2]
IDENTITY = ClusterIdentity(
    id="0123456789abcdef", owner="ann", created_at=datetime(2026, 11, 30, 12, tzinfo=UTC)
)
AWS: dict[str, Any] = {"region": "us-west-2", "zone": "us-west-2a"}


def spec(**changes: Any) -> ClusterSpec:
    aws = {**AWS, **changes.pop("aws", {})}
    base: dict[str, Any] = {"name": "demo", "target": "aws", "aws": aws}
    return ClusterSpec.model_validate(base | changes)


def fleet(**prefill: int) -> dict[str, Any]:
    return {"prefill": prefill, "decode": {"tensor_parallel": 8}}


# --- nodes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prefill", "names"),
    [
        ({"tensor_parallel": 8, "count": 2}, ["prefill-0", "prefill-1"]),
        ({"tensor_parallel": 4, "count": 3}, ["prefill-0", "prefill-1"]),
        ({"tensor_parallel": 2, "data_parallel": 2, "count": 2}, ["prefill-0"]),
        ({"tensor_parallel": 16, "nodes_per_instance": 2, "count": 1}, ["prefill-0", "prefill-1"]),
        ({}, ["prefill-0"]),
    ],
)
def test_engines_of_a_role_share_nodes_as_far_as_gpus_go(
    prefill: dict[str, int], names: list[str]
) -> None:
    nodes = nodes_of(spec(fleet=fleet(**prefill)))
    assert [n.name for n in nodes] == [*names, "decode-0", "router-0"]


def test_the_router_has_a_node_of_its_own_and_of_its_own_type() -> None:
    nodes = {n.role: n.instance_type for n in nodes_of(spec())}
    assert nodes == {
        "prefill": "p5en.48xlarge",
        "decode": "p5en.48xlarge",
        "router": "c7i.2xlarge",
    }


def test_a_local_cluster_has_no_nodes() -> None:
    assert nodes_of(ClusterSpec(name="demo")) == ()


# --- variables -------------------------------------------------------------------------------
def variables(wanted: ClusterSpec, **more: Any) -> dict[str, Any]:
    return build_variables(wanted, IDENTITY, **{"generations": {}, **more})


def test_the_variables_say_everything_the_file_says() -> None:
    told = variables(
        spec(
            model={"id": "s3://models/llama/70b"},
            router={"port": 9000},
            aws={
                "instance_type": "p5.48xlarge",
                "capacity": {"kind": "odcr", "reservation_tags": {"team": "ml"}},
                "network": {"egress": "none", "allowed_cidrs": ["10.0.0.0/8"]},
                "access": {"method": "ssh", "ssh_cidrs": ["10.1.0.0/16"]},
                "ami": "ami-0abc",
                "router_ami": "ami-0def",
                "tags": {"team": "ml"},
                "ttl_hours": 6,
            },
        ),
        generations={"decode-0": 3},
        reservation_id="cr-1",
        public_key="ssh-ed25519 AAAA",
    )
    assert told["cluster_id"] == "0123456789abcdef"
    assert told["created_at"] == "2026-11-30T12:00:00Z"
    assert told["expires_at"] == "2026-11-30T18:00:00Z"
    assert told["router_port"] == 9000
    assert told["model_bucket"] == {"bucket": "models", "prefix": "llama/70b/"}
    assert told["capacity"]["reservation_id"] == "cr-1"
    assert told["images"] == {"node_ami": "ami-0abc", "router_ami": "ami-0def"}
    assert told["access"]["public_key"] == "ssh-ed25519 AAAA"
    assert told["network"]["egress"] == "none"
    assert told["roles"]["decode"] == {"instance_type": "p5.48xlarge", "root_volume_gib": 200}
    assert told["roles"]["router"] == {"instance_type": "c7i.2xlarge"}
    assert told["nodes"] == {
        "prefill-0": {"role": "prefill", "generation": 1},
        "decode-0": {"role": "decode", "generation": 3},
        "router-0": {"role": "router", "generation": 1},
    }


def test_a_cluster_without_a_ttl_is_never_due() -> None:
    wanted = spec()
    assert wanted.aws is not None
    assert expires_at(wanted.aws, IDENTITY) is None
    assert variables(wanted)["expires_at"] is None


@pytest.mark.parametrize(
    ("model", "bucket"),
    [
        ("s3://b", {"bucket": "b", "prefix": ""}),
        ("s3://b/k/", {"bucket": "b", "prefix": "k/"}),
        ("org/model", None),
    ],
)
def test_nodes_may_read_the_model_bucket_only(model: str, bucket: dict[str, str] | None) -> None:
    assert model_bucket(model) == bucket


# --- orphans ---------------------------------------------------------------------------------
def orphan(id_: str, address: str, kind: str = "instance", name: str = "") -> Leftover:
    return Leftover(kind=kind, id=id_, address=address, name=name)


DECODE = 'module.nodes.aws_instance.this["decode-0"]'
VPC = "module.network.aws_vpc.this/0"


def test_addresses_in_tags_are_terraforms_again() -> None:
    assert decode_address("module.nodes.aws_instance.this/decode-0") == DECODE
    assert decode_address(VPC) == "module.network.aws_vpc.this[0]"
    assert decode_address("module.access.aws_iam_role.node") == "module.access.aws_iam_role.node"


def test_what_the_plan_would_make_and_is_there_is_adopted() -> None:
    found = [orphan("i-1", "module.nodes.aws_instance.this/decode-0"), orphan("vpc-1", VPC, "vpc")]
    orphans = sort_orphans(
        found, creates={DECODE, "module.network.aws_vpc.this[0]"}, known_ids=set()
    )
    assert orphans.imports == ((DECODE, "i-1"), ("module.network.aws_vpc.this[0]", "vpc-1"))
    assert (orphans.remove, orphans.rest) == ((), ())


def test_what_the_state_knows_is_no_orphan() -> None:
    found = [orphan("i-1", "module.nodes.aws_instance.this/decode-0")]
    assert sort_orphans(found, creates=set(), known_ids={"i-1"}) == Orphans(adopt={})
    assert strays(found, {"i-1"}) == ()


def test_a_second_machine_for_one_node_goes() -> None:
    twice = [orphan(f"i-{n}", "module.nodes.aws_instance.this/decode-0") for n in (1, 2)]
    orphans = sort_orphans(twice, creates={DECODE}, known_ids=set())
    assert orphans.imports == ((DECODE, "i-1"),)
    assert orphans.remove == (twice[1],)
    assert sort_orphans(twice, creates=set(), known_ids={"i-1"}).remove == (twice[1],)


def test_a_machine_of_a_node_that_is_not_wanted_goes() -> None:
    stray = orphan("i-1", "module.nodes.aws_instance.this/decode-9")
    assert sort_orphans([stray], creates={DECODE}, known_ids=set()).remove == (stray,)


def test_only_machines_are_removed_anything_else_stays_until_down() -> None:
    second = orphan("vpc-2", VPC, "vpc")
    orphans = sort_orphans([second], creates=set(), known_ids={"vpc-1"})
    assert (orphans.remove, orphans.rest) == ((), (second,))
    assert strays([second], {"vpc-1"}) == (second,)


def test_volumes_and_interfaces_belong_to_their_instance() -> None:
    volume = orphan("vol-1", "", "volume")
    assert sort_orphans([volume], creates=set(), known_ids=set()) == Orphans(adopt={})
    assert strays([volume], set()) == ()


def test_what_terraform_imports_by_name_is_adopted_by_name() -> None:
    tag = "module.nodes.aws_placement_group.this/0"
    group = orphan("pg-1", tag, "placement_group", "kvdeploy-demo")
    address = "module.nodes.aws_placement_group.this[0]"
    orphans = sort_orphans([group], creates={address}, known_ids=set())
    assert orphans.imports == ((address, "kvdeploy-demo"),)
    known = sort_orphans([group], creates=set(), known_ids={"kvdeploy-demo"})
    assert known == Orphans(adopt={})


def test_what_cannot_carry_tags_is_adopted_by_its_parent() -> None:
    table = orphan("rtb-1", "module.network.aws_route_table.fabric/0", "route_table")
    route = orphan("rtb-1_0.0.0.0/0", "", "route", "rtb-1")
    address = "module.network.aws_route.fabric_nat[0]"
    orphans = sort_orphans([table, route], creates={address}, known_ids={"rtb-1"})
    assert orphans.imports == ((address, "rtb-1_0.0.0.0/0"),)
    # The state knows it under another id: nothing to do.
    assert sort_orphans([table, route], creates=set(), known_ids={"rtb-1"}) == Orphans(adopt={})


def test_parents_and_children_are_those_of_infra() -> None:
    text = "".join(p.read_text() for p in (ROOT / "infra" / "modules").rglob("*.tf"))
    for (parent, _), child in CHILDREN.items():
        for address in (decode_address(parent), child):
            kind, name = re.sub(r"^module\.\w+\.|\[.*", "", address).split(".")
            assert f'resource "{kind}" "{name}"' in text, address
        assert f'"${{var.address}}.{parent.split(".", 2)[2]}"' in text, parent


# --- the operator's machine ------------------------------------------------------------------
def told(facts: OperatorFacts, wanted: ClusterSpec | None = None) -> list[tuple[str, str]]:
    return [(f.check, f.message) for f in check_operator(wanted or spec(), facts)]


def test_a_machine_with_terraform_is_fine() -> None:
    assert told(OperatorFacts(terraform=(1, 10, 0))) == []


def test_a_missing_or_old_terraform_is_found() -> None:
    assert told(OperatorFacts(terraform=())) == [("terraform-missing", "terraform is not on PATH")]
    assert told(OperatorFacts(terraform=(1, 9, 8))) == [
        ("terraform-too-old", "terraform 1.9.8 is too old")
    ]


def test_variables_for_terraform_in_the_shell_are_refused() -> None:
    facts = OperatorFacts(terraform=(1, 11), terraform_env=("TF_VAR_name",))
    assert told(facts) == [
        (
            "terraform-env-set",
            "TF_VAR_name is set in the environment, and kvdeploy does not hand it to Terraform",
        )
    ]


def test_key_files_that_hold_nothing_are_found() -> None:
    facts = OperatorFacts(
        terraform=(1, 11),
        public_key_ok=False,
        api_key_file_exists=False,
        tls_problem="router.key is not the key of router.crt",
    )
    wanted = spec(aws={"access": {"public_key_file": "k.pub"}}, router={"api_key_file": "keys"})
    assert told(facts, wanted) == [
        ("public-key-file-missing", "k.pub holds no public key that can be read"),
        ("api-key-file-missing", "keys holds no keys that can be read"),
        ("tls-unusable", "router.key is not the key of router.crt"),
    ]


def test_a_certificate_that_ends_soon_is_a_warning() -> None:
    facts = OperatorFacts(terraform=(1, 11), tls_days_left=13.94)
    wanted = spec(router={"tls_cert_file": "router.crt", "tls_key_file": "router.key"})
    assert told(facts, wanted) == [("tls-ends-soon", "router.crt ends in 13.9 days")]
    assert told(OperatorFacts(terraform=(1, 11), tls_days_left=14.0), wanted) == []


def test_what_nodes_are_worked_on_with_is_asked_for_before_they_are_paid_for() -> None:
    facts = OperatorFacts(
        terraform=(1, 11),
        private_key_exists=False,
        no_way="session-manager-plugin is not on PATH",
        grafana_password=False,
    )
    access = {"key_name": "mine", "private_key_file": "mine.pem"}
    wanted = spec(aws={"access": access}, monitoring={"enabled": True})
    assert told(facts, wanted) == [
        ("access-tool-missing", "session-manager-plugin is not on PATH"),
        ("private-key-file-missing", "mine.pem is not there"),
        (
            "grafana-password-missing",
            "Grafana's admin needs a password, and KVDEPLOY_GRAFANA_PASSWORD is not set",
        ),
    ]


def test_every_known_type_has_cards_and_gpus() -> None:
    assert all(p.gpus and p.efa_devices and p.vcpus for p in INSTANCES.values())
