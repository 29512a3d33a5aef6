"""The whole environment of Ansible and all that it starts. Of the caller's it sees only what is
listed here: ansible-runner writes its environment to disk, and a variable of somebody's shell must
not change what a playbook does.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.ansible.private import MARKER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.adapters.ansible.private import Private

KEPT: Final = ("HOME", "USER", "LOGNAME", "TMPDIR", "SSH_AUTH_SOCK")
KEPT_FOR_AWS: Final = frozenset(
    {"HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}
)
"""Of the AWS CLI, beside AWS_*, when nodes are reached through Session Manager."""


def build_environment(
    caller: Mapping[str, str], private: Private, playbooks: Path, *, aws: bool
) -> dict[str, str]:
    """The variables that Ansible runs with.

    Args:
        caller: the variables that kvdeploy was started with.
        private: the run's folder.
        playbooks: the folder of the playbooks.
        aws: whether connections go through the AWS CLI.
    """
    kept = {
        name: value
        for name, value in caller.items()
        if name in KEPT or (aws and (name.startswith("AWS_") or name.upper() in KEPT_FOR_AWS))
    }
    return {
        **kept,
        "PATH": search_path(caller),
        "LC_ALL": "C.UTF-8" if sys.platform == "linux" else "en_US.UTF-8",
        MARKER: str(private.path),
        "ANSIBLE_CONFIG": str(playbooks / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(playbooks / "roles"),
        "ANSIBLE_HOME": str(private.ansible),
        "ANSIBLE_LOCAL_TEMP": str(private.ansible / "tmp"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(private.control),
        # ansible-runner turns it off where it is not set, and that beats every other setting.
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_INVENTORY_ENABLED": "yaml",
        "ANSIBLE_INVENTORY_UNPARSED_FAILED": "True",
        "ANSIBLE_ANY_ERRORS_FATAL": "False",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "False",
        "ANSIBLE_NO_TARGET_SYSLOG": "True",
        "ANSIBLE_NOCOLOR": "True",
    }


def search_path(caller: Mapping[str, str]) -> str:
    """PATH, with the programs beside this Python first: its environment need not be active."""
    own = dict.fromkeys((str(Path(sys.executable).parent), sysconfig.get_path("scripts")))
    return os.pathsep.join((*own, caller.get("PATH", os.defpath)))
