"""Who works on the nodes of a cluster on AWS, and with which key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvdeploy.adapters.ansible.client import Ansible
from kvdeploy.adapters.aws import network
from kvdeploy.adapters.remote import Remote
from kvdeploy.adapters.sshkeys import make_key
from kvdeploy.errors import CheckError
from kvdeploy.planning.access import build_connection, named_key, needs_own_key
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.aws_preflight import aws_section, read_public_key
from kvdeploy.stages.nodes import Crew

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.store import Store
    from kvdeploy.model.inventory import Connection
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def crew_of(spec: ClusterSpec, store: Store, folder: Path, runner: Runner) -> Crew:
    """Whoever works on the nodes; what is said meanwhile goes to `folder`."""
    # Nodes that boot are asked every few seconds: that is not written down as what was run.
    remote = Remote(LocalRunner(), connection_of(spec, store), log=folder / "ssh.log")
    return Crew(
        spec=spec,
        root=store.root,
        packages=store.dir / "packages",
        plays=Ansible(folder / "ansible.jsonl", runner=runner),
        remote=remote,
        environment=os.environ,
    )


def connection_of(spec: ClusterSpec, store: Store) -> Connection:
    section = aws_section(spec)
    key = str(store.login_key) if needs_own_key(section.access) else None
    if (named := named_key(section.access)) is not None:
        path = store.root / Path(named).expanduser()
        # Beside a public key there may be none: then an agent, or ssh's configuration, has it.
        key = str(path) if section.access.private_key_file or path.exists() else None
    return build_connection(
        section, private_key=key, known_hosts=str(store.known_hosts), learn=True
    )


def public_key_of(
    spec: ClusterSpec, store: Store, runner: Runner, *, aws: Aws, make_in: Path
) -> str | None:
    """The public key that EC2 is told; None where it knows one already, or none is wanted.

    A cluster that was made from another checkout keeps the key that it has: another one would
    replace its nodes.

    Args:
        spec: of the cluster.
        store: where the cluster's own key lies, if nobody named one.
        runner: makes it.
        aws: knows the key of a cluster that is there.
        make_in: the folder for one that is not there yet.

    Raises:
        AwsError: AWS does not tell.
    """
    if not needs_own_key(aws_section(spec).access):
        return read_public_key(spec, store.root)
    public = store.login_key.with_name(f"{store.login_key.name}.pub")
    if public.exists():
        return public.read_text(encoding="ascii").strip()
    name = key_pair_of(spec)
    if (known := network.public_key_of(aws, name)) is not None:
        return known
    make_in.mkdir(parents=True, exist_ok=True)
    return make_key(runner, make_in / store.login_key.name, comment=name).public


def refuse_lost_key(spec: ClusterSpec, store: Store) -> None:
    """Nodes that nobody here can log in to are not worked on.

    Raises:
        CheckError: the cluster's own key is on another machine.
    """
    if needs_own_key(aws_section(spec).access) and not store.login_key.exists():
        msg = f"the key to the nodes of {spec.name!r} is not here: {store.login_key}"
        raise CheckError(
            msg,
            hint="Copy it from where the cluster was made, or name a key of yours in "
            "aws.access.public_key_file: that replaces the nodes.",
        )


def key_pair_of(spec: ClusterSpec) -> str:
    """The name of the key pair that infra/ makes."""
    return f"kvdeploy-{spec.name}"
