"""How hosts are named to Ansible, and reached over SSH."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.adapters.ansible.inventory import (
    as_data,
    check_inventory,
    chosen,
    render_inventory,
)
from kvdeploy.adapters.ansible.ssh import (
    bastion_argv,
    check_tools,
    known_as,
    ssh_argv,
    ssh_options,
)
from kvdeploy.errors import CheckError, ToolError
from kvdeploy.model.inventory import Connection, Host, Inventory

CONTROL = Path("/tmp/kv-play-x/c")
PREFILL = Host(name="prefill-0", role="prefill", address="10.0.0.4")
DECODE = Host(name="decode-0", role="decode", address="10.0.0.5", instance_id="i-0d")
ROUTER = Host(name="router-0", role="router", address="10.0.0.6", vars={"cores": 4})


def connection(**over: Any) -> Connection:
    return Connection(**{"user": "ubuntu", "known_hosts": "/k/known_hosts", **over})


def inventory(*hosts: Host, **over: Any) -> Inventory:
    return Inventory(hosts=hosts, connection=connection(), **over)


def options(host: Host, *, control: Path | None = CONTROL, **over: Any) -> dict[str, str]:
    """The options by name: none is given twice, for ssh would take the first alone."""
    words = ssh_options(host, connection(**over), control=control)
    assert set(words[::2]) == {"-o"}
    pairs = [word.partition("=")[::2] for word in words[1::2]]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


# --- ssh -------------------------------------------------------------------------------------
def test_a_host_is_reached_with_its_key_checked_against_our_file_alone() -> None:
    assert options(PREFILL, private_key="/k/id") == {
        "BatchMode": "yes",
        "ConnectTimeout": "15",
        "ConnectionAttempts": "3",
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "4",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": '"/k/known_hosts"',
        "GlobalKnownHostsFile": "/dev/null",
        "UpdateHostKeys": "no",
        "HashKnownHosts": "no",
        "IdentitiesOnly": "yes",
        "IdentityFile": '"/k/id"',
        "ControlMaster": "auto",
        "ControlPersist": "60s",
    }


def test_without_a_key_the_users_own_are_offered() -> None:
    assert not {"IdentitiesOnly", "IdentityFile"} & options(PREFILL).keys()


def test_a_first_key_is_learned_only_when_that_is_wanted() -> None:
    assert options(PREFILL, learn_host_keys=True)["StrictHostKeyChecking"] == "accept-new"


def test_a_node_is_known_by_its_instance_so_that_a_replaced_one_is_new() -> None:
    assert options(DECODE)["HostKeyAlias"] == "i-0d"
    assert "HostKeyAlias" not in options(PREFILL)
    assert known_as(DECODE, connection(port=2200)) == "i-0d"
    assert known_as(PREFILL, connection()) == "10.0.0.4"
    assert known_as(PREFILL, connection(port=2200)) == "[10.0.0.4]:2200"


def test_through_a_bastion_the_bastion_is_checked_in_the_same_way() -> None:
    through = options(DECODE, private_key="/k/id", bastion="ops@bastion")["ProxyCommand"]
    words = shlex.split(through)
    assert words[0] == "ssh"
    assert words[-4:] == ["-W", "[%h]:%p", "--", "ops@bastion"]
    own = words[2:-4:2]
    assert "BatchMode=yes" in own
    assert "StrictHostKeyChecking=yes" in own
    assert 'UserKnownHostsFile="/k/known_hosts"' in own
    assert "GlobalKnownHostsFile=/dev/null" in own
    assert 'IdentityFile="/k/id"' in own
    assert "IdentitiesOnly=yes" in own
    assert 'ControlPath="/tmp/kv-play-x/c/bastion"' in own
    assert "ControlMaster=no" in own
    assert not any(word.startswith("HostKeyAlias") for word in own)


def test_one_connection_to_the_bastion_is_opened_for_all_hosts() -> None:
    argv = bastion_argv(connection(bastion="ops@bastion", private_key="/k/id"), CONTROL)
    assert argv[:3] == ("ssh", "-N", "-f")
    assert argv[-2:] == ("--", "ops@bastion")
    own = argv[4:-2:2]
    assert {"ControlMaster=yes", 'ControlPath="/tmp/kv-play-x/c/bastion"'} <= set(own)
    assert {"StrictHostKeyChecking=yes", 'IdentityFile="/k/id"', "BatchMode=yes"} <= set(own)


def test_through_session_manager_aws_opens_the_way() -> None:
    through = options(DECODE, ssm_region="us-west-2", bastion="unused", port=2200)["ProxyCommand"]
    assert through == (
        "aws ssm start-session --region us-west-2 --target i-0d "
        "--document-name AWS-StartSSHSession --parameters portNumber=2200"
    )


def test_session_manager_needs_an_instance_id() -> None:
    with pytest.raises(CheckError) as caught:
        options(PREFILL, ssm_region="us-west-2")
    assert caught.value.message == (
        "prefill-0 has no instance id, and AWS Session Manager knows hosts by it alone"
    )


def test_odd_letters_in_file_names_reach_ssh_as_they_are() -> None:
    odd = "/my files/50%/known hosts"
    assert options(PREFILL, known_hosts=odd)["UserKnownHostsFile"] == (
        '"/my files/50%%/known hosts"'
    )
    through = options(PREFILL, known_hosts=odd, bastion="b")["ProxyCommand"]
    # ssh halves each %% once for the command, and the inner ssh once for the file.
    assert 'UserKnownHostsFile="/my files/50%%%%/known hosts"' in shlex.split(through)
    for bad in ('/a"b', "/a\nb"):
        with pytest.raises(CheckError, match="ssh cannot be given the file"):
            options(PREFILL, known_hosts=bad)


def test_a_shell_on_a_host_is_opened_in_the_same_way() -> None:
    how = connection(private_key="/k/id", port=2200)
    argv = ssh_argv(DECODE, how, "systemctl", "status", "a b")
    login = ("-l", "ubuntu", "-p", "2200", "--", "10.0.0.5", "systemctl status 'a b'")
    assert argv[-len(login) :] == login
    assert "HostKeyAlias=i-0d" in argv
    assert "StrictHostKeyChecking=yes" in argv
    # Somebody sits there: they may be asked, and nothing is left open.
    assert not [w for w in argv if w.startswith(("BatchMode", "ControlMaster"))]
    assert ssh_argv(DECODE, how)[-2:] == ("--", "10.0.0.5")


@pytest.mark.parametrize(
    ("there", "over", "message"),
    [
        ((), {}, "ssh is not on PATH"),
        (
            ("ssh",),
            {"ssm_region": "us-west-2"},
            "nodes are to be reached through AWS Session Manager, and aws is not on PATH",
        ),
        (
            ("ssh", "aws"),
            {"ssm_region": "us-west-2"},
            "nodes are to be reached through AWS Session Manager, and session-manager-plugin "
            "is not on PATH",
        ),
    ],
)
def test_a_missing_program_is_named(
    there: tuple[str, ...], over: dict[str, Any], message: str
) -> None:
    with pytest.raises(ToolError) as caught:
        check_tools(connection(**over), which=lambda name: name if name in there else None)
    assert caught.value.message == message
    assert "Install" in caught.value.hint


def test_programs_that_are_not_needed_need_not_be_there() -> None:
    check_tools(connection(bastion="b"), which=lambda name: name if name == "ssh" else None)


# --- the inventory ---------------------------------------------------------------------------
def test_groups_are_the_roles_and_gpu_holds_the_engines() -> None:
    rendered = render_inventory(
        inventory(
            PREFILL,
            DECODE,
            ROUTER,
            group_vars={"all": {"a": 1}, "gpu": {"g": 2}, "decode": {"d": 3}, "router": {"r": 4}},
        ),
        CONTROL,
    )["all"]
    assert rendered["vars"] == {
        "ansible_user": "ubuntu",
        "ansible_port": 22,
        "ansible_pipelining": True,
        "a": 1,
    }
    assert list(rendered["children"]) == ["gpu", "router"]
    gpu = rendered["children"]["gpu"]
    assert gpu["vars"] == {"g": 2}
    assert list(gpu["children"]) == ["prefill", "decode"]
    assert list(gpu["children"]["prefill"]["hosts"]) == ["prefill-0"]
    assert gpu["children"]["decode"]["vars"] == {"d": 3}
    decode = gpu["children"]["decode"]["hosts"]["decode-0"]
    assert decode["ansible_host"] == "10.0.0.5"
    assert shlex.split(decode["ansible_ssh_args"]) == list(
        ssh_options(DECODE, connection(), control=CONTROL)
    )
    router = rendered["children"]["router"]
    assert router["vars"] == {"r": 4}
    assert router["hosts"]["router-0"]["cores"] == 4


def test_a_role_without_hosts_is_an_empty_group() -> None:
    rendered = render_inventory(inventory(PREFILL), CONTROL)["all"]["children"]
    assert rendered["router"] == {"hosts": {}, "vars": {}}
    assert rendered["gpu"]["children"]["decode"] == {"hosts": {}, "vars": {}}


def test_what_looks_like_a_template_is_marked_as_data() -> None:
    chat = "{% for m in messages %}{{ m }}{% endfor %}"
    assert as_data({"argv": ["--chat-template", chat], "n": 1, "deep": ({"x": "{# no #}"},)}) == {
        "argv": ["--chat-template", {"__ansible_unsafe": chat}],
        "n": 1,
        "deep": [{"x": {"__ansible_unsafe": "{# no #}"}}],
    }
    host = ROUTER.model_copy(update={"vars": {"chat": chat}})
    rendered = render_inventory(inventory(host, group_vars={"all": {"chat": chat}}), CONTROL)
    marked = {"__ansible_unsafe": chat}
    assert rendered["all"]["vars"]["chat"] == marked
    assert rendered["all"]["children"]["router"]["hosts"]["router-0"]["chat"] == marked


def test_an_inventory_without_hosts_is_refused() -> None:
    with pytest.raises(CheckError) as caught:
        check_inventory(inventory())
    assert caught.value.message == ("the inventory has no hosts, so no playbook can be run on it")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("name", ["prefill-0", "gpu", "router"])
def test_a_name_is_of_one_thing_alone(name: str) -> None:
    other = Host(name=name, role="decode", address="10.0.0.9")
    with pytest.raises(CheckError) as caught:
        check_inventory(inventory(PREFILL, other))
    assert caught.value.message == (f"the inventory uses a name for more than one thing: {name}")


def test_a_limit_chooses_hosts_and_groups() -> None:
    everything = inventory(PREFILL, DECODE, ROUTER)
    assert chosen(everything) == (PREFILL, DECODE, ROUTER)
    assert chosen(everything, ("gpu",)) == (PREFILL, DECODE)
    assert chosen(everything, ("router", "decode-0")) == (DECODE, ROUTER)
    check_inventory(everything, ("gpu", "router-0", "all"))


def test_a_limit_that_is_no_host_is_refused_and_not_ignored() -> None:
    with pytest.raises(CheckError) as caught:
        check_inventory(inventory(PREFILL, DECODE), ("decod-0",))
    assert caught.value.message == "no host or group is called 'decod-0'. Did you mean decode-0?"
    assert caught.value.hint == "There are: prefill-0, decode-0, all, gpu, prefill, decode."
    with pytest.raises(CheckError, match="no host or group is called 'router'"):
        check_inventory(inventory(PREFILL), ("router",))
