"""How one host is reached over SSH. The one place that builds ssh's options: playbooks and people
get onto a host in the same way.
"""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, Final

from kvdeploy.errors import CheckError, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvdeploy.model.inventory import Connection, Host

CONNECT_S: Final = 15
"""How long a host may take to accept a connection."""
CONNECT_TRIES: Final = 3
SOON_S: Final = 5
ALIVE_S: Final = 15
ALIVE_TRIES: Final = 4
"""A host that answers nothing for ALIVE_S x ALIVE_TRIES seconds is given up."""
MASTER: Final = ("ControlMaster=auto", "ControlPersist=60s")

BASTION_SOCKET: Final = "bastion"
PLUGIN: Final = "session-manager-plugin"
SSM_DOCUMENT: Final = "AWS-StartSSHSession"


def ssh_options(host: Host, connection: Connection, *, control: Path | None) -> tuple[str, ...]:
    """Everything that ssh must be told of a host but its address, user and port.

    Args:
        host: which.
        connection: how.
        control: a folder for sockets that share connections; None: each is its own, and may ask
            for a passphrase.

    Raises:
        CheckError: the host cannot be reached that way.
    """
    options = _common(connection, batch=control is not None)
    if host.instance_id is not None:
        options.append(f"HostKeyAlias={host.instance_id}")
    if control is not None:
        options += MASTER
    if connection.ssm_region is not None:
        options.append(f"ProxyCommand={_through_ssm(host, connection)}")
    elif connection.bastion is not None:
        options.append(f"ProxyCommand={_through_bastion(connection, control)}")
    return _flags(options)


def ssh_argv(host: Host, connection: Connection, *remote: str) -> tuple[str, ...]:
    """The command line that opens a shell on a host, or runs `remote` there."""
    options = ssh_options(host, connection, control=None)
    user, port = connection.user, str(connection.port)
    words = ("--", host.address, *((shlex.join(remote),) if remote else ()))
    return ("ssh", *options, "-l", user, "-p", port, *words)


def unwatched_argv(
    host: Host, connection: Connection, *remote: str, forwards: Sequence[str] = ()
) -> tuple[str, ...]:
    """As ssh_argv, for a program that nobody sits at: nothing is asked, and a host that does not
    answer is soon given up.

    Args:
        host: which.
        connection: how.
        remote: what to run there; nothing: only `forwards` are kept open.
        forwards: LOCAL:PORT:REMOTE:PORT, each a way through the host.
    """
    first = ["BatchMode=yes", f"ConnectTimeout={SOON_S}", "ConnectionAttempts=1"]  # these win
    if forwards:
        first.append("ExitOnForwardFailure=yes")
    ways = tuple(word for way in forwards for word in ("-L", way))
    program, *rest = ssh_argv(host, connection, *remote)
    return (program, *_flags(first), *(() if remote else ("-N",)), *ways, *rest)


def bastion_argv(connection: Connection, control: Path) -> tuple[str, ...]:
    """The command line that connects to the bastion once, for all hosts, and goes to the
    background.

    sshd drops connections at random once ten are logging in (MaxStartups), so many hosts at once
    must not each bring a connection of their own.
    """
    assert connection.bastion is not None  # noqa: S101  # a bug of ours otherwise
    options = [*_common(connection, batch=True), *_bastion_socket(control)]
    options += ["ControlMaster=yes", "ControlPersist=yes"]
    return ("ssh", "-N", "-f", *_flags(options), "--", connection.bastion)


def check_tools(
    connection: Connection, *, which: Callable[[str], str | None] = shutil.which
) -> None:
    """See that the programs that this connection needs are there.

    Raises:
        ToolError: one is not.
    """
    if which("ssh") is None:
        msg = "ssh is not on PATH"
        raise ToolError(msg, hint="Install OpenSSH's client, e.g. the package openssh-client.")
    if connection.ssm_region is None:
        return
    if which("aws") is None:
        msg = "nodes are to be reached through AWS Session Manager, and aws is not on PATH"
        raise ToolError(msg, hint="Install the AWS CLI, version 2, or reach nodes over SSH alone.")
    if which(PLUGIN) is None:
        msg = f"nodes are to be reached through AWS Session Manager, and {PLUGIN} is not on PATH"
        hint = (
            "Install AWS's Session Manager plugin for the AWS CLI, or reach nodes over SSH alone."
        )
        raise ToolError(msg, hint=hint)


def known_as(host: Host, connection: Connection) -> str:
    """The name under which a host's key stands in the file of known hosts."""
    if host.instance_id is not None:
        return host.instance_id
    return host.address if connection.port == 22 else f"[{host.address}]:{connection.port}"


def _common(connection: Connection, *, batch: bool) -> list[str]:
    strict = "accept-new" if connection.learn_host_keys else "yes"
    options = [
        *(["BatchMode=yes"] if batch else []),
        f"ConnectTimeout={CONNECT_S}",
        # Ansible's own retries would send a command again that may still be running.
        f"ConnectionAttempts={CONNECT_TRIES}",
        f"ServerAliveInterval={ALIVE_S}",
        f"ServerAliveCountMax={ALIVE_TRIES}",
        f"StrictHostKeyChecking={strict}",
        f"UserKnownHostsFile={_path(connection.known_hosts)}",
        "GlobalKnownHostsFile=/dev/null",
        "UpdateHostKeys=no",
        "HashKnownHosts=no",
    ]
    if connection.private_key is not None:
        options += ["IdentitiesOnly=yes", f"IdentityFile={_path(connection.private_key)}"]
    return options


def _through_ssm(host: Host, connection: Connection) -> str:
    region = connection.ssm_region
    if host.instance_id is None or region is None:
        msg = f"{host.name} has no instance id, and AWS Session Manager knows hosts by it alone"
        raise CheckError(msg, hint="Run 'kvdeploy up' again: it finds the node's instance.")
    where = ("--region", region, "--target", host.instance_id)
    how = ("--document-name", SSM_DOCUMENT, "--parameters", f"portNumber={connection.port}")
    return _proxy(("aws", "ssm", "start-session", *where, *how))


def _through_bastion(connection: Connection, control: Path | None) -> str:
    """Not ProxyJump: its own ssh would not be told whose host keys to trust, nor which key."""
    assert connection.bastion is not None  # noqa: S101  # a bug of ours otherwise
    options = _common(connection, batch=control is not None)
    if control is not None:
        options += [*_bastion_socket(control), "ControlMaster=no"]
    return _proxy(("ssh", *_flags(options)), f"-W [%h]:%p -- {shlex.quote(connection.bastion)}")


def _bastion_socket(control: Path) -> tuple[str, ...]:
    return (f"ControlPath={_path(str(control / BASTION_SOCKET))}",)


def _proxy(argv: tuple[str, ...], tail: str = "") -> str:
    """As ssh wants it: a shell's words, with % doubled but in ssh's own %h and %p."""
    return " ".join(filter(None, (shlex.join(argv).replace("%", "%%"), tail)))


def _path(path: str) -> str:
    """A file's name as the value of an option: ssh splits it at blanks and expands %."""
    if '"' in path or "\n" in path:
        msg = f"ssh cannot be given the file {path!r}"
        raise CheckError(msg, hint="Give it a name without quotes and line breaks.")
    return '"' + path.replace("%", "%%") + '"'


def _flags(options: list[str]) -> tuple[str, ...]:
    return tuple(word for option in options for word in ("-o", option))
