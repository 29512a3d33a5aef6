"""The hosts that playbooks work on, and how they are reached."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvdeploy.model.base import Stored
from kvdeploy.model.launch import Role


class Connection(Stored):
    """How every host of one inventory is reached over SSH."""

    user: str
    port: int = 22
    private_key: str | None = None
    """Path of the key; None: what the user's SSH agent and configuration offer."""
    known_hosts: str
    """Path of the file of host keys; only this one is asked."""
    learn_host_keys: bool = False
    """Whether a key that is seen for the first time is written down and trusted (a new machine);
    a key that differs from the one written down is always refused."""
    bastion: str | None = None
    """user@host to go through. Its own host key must be in `known_hosts`, and it takes the same
    key."""
    ssm_region: str | None = None
    """Set: through AWS Session Manager in this region, and through no bastion; hosts need
    `instance_id`."""


class Host(Stored):
    """One node."""

    name: str
    """e.g. 'decode-0'."""
    role: Role
    address: str
    """Its private address: engines are told it, and SSH uses it unless it goes through SSM."""
    instance_id: str | None = None
    """i-...; also the name under which its host key is known, so that a replaced node is new."""
    vars: dict[str, Any] = Field(default_factory=dict)
    """Of this host alone."""


class Inventory(Stored):
    """Groups are the roles; `gpu` holds prefill and decode, `all` everything."""

    hosts: tuple[Host, ...]
    """Never empty: a playbook without hosts succeeds at nothing."""
    connection: Connection
    group_vars: dict[Literal["all", "gpu", "prefill", "decode", "router"], dict[str, Any]] = Field(
        default_factory=dict
    )
