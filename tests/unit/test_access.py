"""Keys and ways to the nodes of a cluster on AWS, and whom a rehearsal asks instead of AWS."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.adapters.ansible.ssh import unwatched_argv
from kvdeploy.adapters.aws.session import Aws, environment
from kvdeploy.adapters.store import Store
from kvdeploy.adapters.terraform.client import Terraform
from kvdeploy.adapters.terraform.workdir import WorkDir
from kvdeploy.cli.aws.crew import connection_of, public_key_of, refuse_lost_key
from kvdeploy.errors import CheckError
from kvdeploy.model.inventory import Connection, Host
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.proc import Command, Outcome

ENDPOINT = "http://127.0.0.1:5000"
HOST = Host(name="decode-0", role="decode", address="10.0.0.2", instance_id="i-2")


def cluster(**aws: Any) -> ClusterSpec:
    section = {"region": "us-west-2", "zone": "us-west-2a", **aws}
    return ClusterSpec.model_validate({"name": "demo", "target": "aws", "aws": section})


class Keygen:
    """Runs ssh-keygen, and nothing else."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def run(self, command: Command, **_more: Any) -> Outcome:
        self.commands.append(command)
        assert command.argv[0] == "ssh-keygen"
        path = Path(command.argv[-1])
        path.write_text("private")
        path.with_name(f"{path.name}.pub").write_text("ssh-ed25519 AAAA kvdeploy-demo\n")
        return Outcome(command=command, code=0, stdout="", stderr="", seconds=0)


class NoPairs(Aws):
    """An account with some key pairs; no AWS is asked."""

    def __init__(self, **pairs: str) -> None:
        super().__init__("us-west-2")
        self._pairs = pairs

    def all(self, operation: str, key: str, **parameters: Any) -> list[dict[str, Any]]:
        assert (operation, key) == ("ec2:DescribeKeyPairs", "KeyPairs")
        (name,) = parameters["KeyNames"]
        return [{"PublicKey": self._pairs[name]}] if name in self._pairs else []


# --- keys ------------------------------------------------------------------------------------
def test_a_cluster_without_a_named_key_has_one_of_its_own(tmp_path: Path) -> None:
    store, keygen = Store(tmp_path, "demo"), Keygen()
    made = public_key_of(cluster(), store, keygen, aws=NoPairs(), make_in=store.dir)
    assert made == "ssh-ed25519 AAAA kvdeploy-demo"
    assert connection_of(cluster(), store).private_key == str(store.dir / "id")
    assert public_key_of(cluster(), store, keygen, aws=NoPairs(), make_in=tmp_path / "else") == made
    assert len(keygen.commands) == 1


def test_a_cluster_of_another_checkout_keeps_its_key_and_is_not_worked_on(tmp_path: Path) -> None:
    store, aws = Store(tmp_path, "demo"), NoPairs(**{"kvdeploy-demo": "ssh-ed25519 BBBB theirs\n"})
    found = public_key_of(cluster(), store, Keygen(), aws=aws, make_in=store.dir)
    assert found == "ssh-ed25519 BBBB theirs"
    with pytest.raises(CheckError, match="the key to the nodes of 'demo' is not here"):
        refuse_lost_key(cluster(), store)
    refuse_lost_key(cluster(access={"key_name": "mine"}), store)
    public_key_of(cluster(), store, Keygen(), aws=NoPairs(), make_in=store.dir)
    refuse_lost_key(cluster(), store)


def test_looking_makes_no_key_of_the_clusters_own(tmp_path: Path) -> None:
    store = Store(tmp_path, "demo")
    public_key_of(cluster(), store, Keygen(), aws=NoPairs(), make_in=tmp_path / "scratch")
    assert not store.dir.exists()


def test_a_key_pair_of_ec2_is_taken_as_it_is(tmp_path: Path) -> None:
    spec = cluster(access={"key_name": "mine"})
    store = Store(tmp_path, "demo")
    assert public_key_of(spec, store, Keygen(), aws=NoPairs(), make_in=store.dir) is None
    assert connection_of(spec, store).private_key is None


@pytest.mark.parametrize(
    ("access", "there", "found"),
    [
        ({"public_key_file": "id.pub"}, ["id.pub", "id"], "id"),
        ({"public_key_file": "id.pub"}, ["id.pub"], None),
        ({"public_key_file": "id.pub", "private_key_file": "other"}, ["id.pub"], "other"),
        ({"key_name": "mine", "private_key_file": "mine.pem"}, [], "mine.pem"),
    ],
)
def test_the_private_key_is_named_or_beside_the_public_one(
    tmp_path: Path, access: dict[str, str], there: list[str], found: str | None
) -> None:
    for name in there:
        (tmp_path / name).write_text("ssh-ed25519 AAAA me\n")
    connection = connection_of(cluster(access=access), Store(tmp_path, "demo"))
    assert connection.private_key == (str(tmp_path / found) if found else None)


def test_host_keys_are_learned_once_and_lie_with_the_cluster(tmp_path: Path) -> None:
    connection = connection_of(cluster(), Store(tmp_path, "demo"))
    assert connection.learn_host_keys
    assert connection.known_hosts == str(tmp_path / ".kvdeploy/demo/known_hosts")
    assert (connection.user, connection.ssm_region) == ("ubuntu", "us-west-2")


# --- ways ------------------------------------------------------------------------------------
def test_nobody_is_asked_and_a_silent_host_is_soon_given_up() -> None:
    argv = unwatched_argv(HOST, Connection(user="ubuntu", known_hosts="/k"), "cat", "a b")
    options = [word for flag, word in pairwise(argv) if flag == "-o"]
    # ssh takes the first of each.
    first: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        first.setdefault(name, value)
    assert (first["BatchMode"], first["ConnectTimeout"], first["ConnectionAttempts"]) == (
        *("yes", "5", "1"),
    )
    assert first["HostKeyAlias"] == "i-2"
    assert argv[-2:] == ("10.0.0.2", "cat 'a b'")


def test_ways_through_a_host_are_open_or_ssh_ends() -> None:
    way = "127.0.0.1:40000:10.0.0.1:8000"
    argv = unwatched_argv(HOST, Connection(user="ubuntu", known_hosts="/k"), forwards=(way,))
    assert "-N" in argv
    assert argv[argv.index("-L") + 1] == way
    assert "ExitOnForwardFailure=yes" in argv


# --- a rehearsal -----------------------------------------------------------------------------
def test_a_rehearsal_asks_its_double_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-of-mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    client = Aws("us-west-2", endpoint=ENDPOINT).client("ec2")
    assert client.meta.endpoint_url == ENDPOINT
    assert client._request_signer._credentials.access_key == "rehearsal"


def test_terraform_is_told_of_the_double_and_of_no_account(tmp_path: Path) -> None:
    made = Terraform(
        Keygen(), WorkDir(tmp_path), log=tmp_path / "log", aws=environment(ENDPOINT)
    )._build("plan", [], {})
    assert made.env["AWS_ENDPOINT_URL"] == ENDPOINT
    assert made.env["AWS_ACCESS_KEY_ID"] == "rehearsal"
    assert made.env["AWS_CONFIG_FILE"] == os.devnull
    assert "AWS_" in made.drop_env
    usual = Terraform(Keygen(), WorkDir(tmp_path), log=tmp_path / "log")._build("plan", [], {})
    assert not [name for name in (*usual.env, *usual.drop_env) if name.startswith("AWS")]


@pytest.mark.parametrize(
    "endpoint", ["https://ec2.us-west-2.amazonaws.com", "http://10.0.0.1:5000", "127.0.0.1:5000"]
)
def test_an_endpoint_is_on_this_machine(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        cluster(endpoint=endpoint)


def test_a_rehearsal_is_called_one() -> None:
    assert (cluster().kind, cluster(endpoint=ENDPOINT).kind) == ("aws", "rehearsal")
    assert ClusterSpec(name="demo").kind == "local"
