"""What ssh's complaints mean, and what to do next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.ansible.results import plain
from kvdeploy.adapters.ansible.ssh import PLUGIN

if TYPE_CHECKING:
    from kvdeploy.model.inventory import Connection

RUNNING: Final = (
    "Is the machine running, and do security group and routes let SSH through from here?"
)


@dataclass(frozen=True)
class _Cause:
    pattern: str
    words: str
    """With the pattern's groups by name."""
    hint: str
    """Also with {user}, {key} and {known_hosts} of the connection."""


_CAUSES: Final = (
    _Cause(
        r"TargetNotConnected",
        "its SSM agent is not connected",
        "Is the instance running, may its role use Session Manager (the policy "
        "AmazonSSMManagedInstanceCore), and can it reach SSM's endpoints?",
    ),
    _Cause(
        r"AccessDenied\w*",
        "AWS does not allow a session with it",
        "The operator needs ssm:StartSession on the instance and on the document "
        "AWS-StartSSHSession; docs/aws-permissions.md lists all permissions.",
    ),
    _Cause(
        r"ExpiredToken|[Uu]nable to locate credentials|InvalidClientTokenId"
        r"|UnrecognizedClient|SSO [Tt]oken|[Tt]oken has expired",
        "AWS does not accept the credentials",
        "Log in again (e.g. 'aws sso login').",
    ),
    _Cause(
        r"SessionManagerPlugin is not found",
        f"{PLUGIN} is not installed here",
        "Install AWS's Session Manager plugin for the AWS CLI.",
    ),
    _Cause(
        r"Offending \S+ key in (?P<file>.+?):(?P<line>\d+).*"
        r"Host key for (?P<name>\S+) has changed",
        "the host key of {name} is not the one in {file}, line {line}",
        "Find out whether that machine was really made anew: if not, somebody may be in between. "
        "If it was, remove its old key: ssh-keygen -f '{file}' -R '{name}'.",
    ),
    _Cause(
        r"No \S+ host key is known for (?P<name>\S+) and",
        "no host key is known for {name}",
        "Get its key in a way that you trust, e.g. from the instance's console output, and add "
        "it to {known_hosts}: '{name} ssh-ed25519 ...'.",
    ),
    _Cause(
        r"bad permissions|UNPROTECTED PRIVATE KEY",
        "the key file can be read by others, so ssh does not use it",
        "Run: chmod 600 {key}.",
    ),
    _Cause(
        r"(?:no such identity: |Identity file )(?P<file>.+?)(?:: No such| not accessible)",
        "there is no key file {file}",
        "Name the key that the machine was launched with.",
    ),
    _Cause(
        r'Load key "(?P<file>.+?)": (?P<what>[^"@]+?)(?= \S+@|$)',
        "ssh cannot read the key {file}: {what}",
        "Name the key that the machine was launched with.",
    ),
    _Cause(
        r"(?:(?P<who>\S+)@\S+: )?Permission denied",
        "it refused the log-in (permission denied)",
        "Is {user} the right user for the image, and {key} the key that the machine was launched "
        "with? A key with a passphrase must be in the SSH agent.",
    ),
    _Cause(
        r"Too many authentication failures",
        "it refused the log-in after too many keys",
        "Name the one key that fits.",
    ),
    _Cause(
        r"administratively prohibited",
        "the bastion does not allow forwarding",
        "Its sshd needs 'AllowTcpForwarding yes'.",
    ),
    _Cause(
        r"Stdio forwarding request failed|channel \d+: open failed",
        "the bastion cannot reach it",
        "Is the machine running, and does its security group let the bastion's SSH in?",
    ),
    _Cause(
        r"Connection refused",
        "connection refused",
        "The machine is there and its sshd is not: it may be starting. Wait a minute.",
    ),
    _Cause(r"timed out", "it did not answer in time", RUNNING),
    _Cause(r"No route to host|Network is unreachable", "there is no route to it", RUNNING),
    _Cause(
        r"Could not resolve hostname (?P<name>\S+): (?P<what>[\w ]+)",
        "the name {name} cannot be resolved",
        "Is it spelled well?",
    ),
    _Cause(
        r"kex_exchange_identification|Connection closed|Connection reset|closed by remote host"
        r"|Broken pipe|Data could not be sent",
        "the connection broke off",
        "The machine may be restarting, or went down. Look at it if this does not pass.",
    ),
)


def words_of(said: str) -> str:
    """What is wrong, in a few words."""
    text = plain(said)
    cause, found = _find(text)
    return cause.words.format(**found) if cause else (text or "ssh did not say why")


def hint_of(said: str, connection: Connection) -> str:
    """What to do next."""
    cause, found = _find(plain(said))
    if cause is None:
        return RUNNING
    key = connection.private_key or "one of your SSH agent's keys"
    known = {"user": connection.user, "key": key, "known_hosts": connection.known_hosts}
    return cause.hint.format(**{**known, **found})


def _find(text: str) -> tuple[_Cause | None, dict[str, str]]:
    for cause in _CAUSES:
        if found := re.search(cause.pattern, text):
            return cause, found.groupdict()
    return None, {}
