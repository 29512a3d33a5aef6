"""What can be known of playbooks and roles without a host: each role has the house's shape, says of
itself what is true, and holds no version.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvdeploy.model import catalog

PLAYBOOKS: Final = Path(__file__).parents[2] / "playbooks"
ROLES: Final = sorted(
    path for path in (PLAYBOOKS / "roles").iterdir() if path.is_dir() and path.name[0] != "."
)
LEADS: Final = sorted(PLAYBOOKS.glob("*.yml"))
FIXED: Final = ("meta/main.yml", "meta/argument_specs.yml", "tasks/main.yml", "README.md")
NAME: Final = r"(?<![\w.'/-])({})\b(?!\.(?:py|sh|yml|json)\b)"
VERSION: Final = re.compile(r"(?<![\w.-])\d+\.\d+\.\d+(?:\.\d+)?(?![\w.-])")
ADDRESS: Final = re.compile(r"^(?:127|169\.254|0)\.")
EACH_ROLE: Final = pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None


def specs(role: Path) -> dict[str, Any]:
    """Entry point -> its options."""
    declared = load(role / "meta/argument_specs.yml")["argument_specs"]
    return {name: spec.get("options", {}) for name, spec in declared.items()}


def options(role: Path) -> dict[str, Any]:
    """Of all entry points."""
    return {name: told for spec in specs(role).values() for name, told in spec.items()}


def texts(role: Path) -> dict[Path, str]:
    """Everything of a role that Ansible reads as a template."""
    found = [
        *(p for d in ("tasks", "handlers", "vars", "defaults") for p in (role / d).glob("*.yml")),
        *(p for p in (role / "templates").rglob("*") if p.is_file()),
    ]
    return {path: path.read_text(encoding="utf-8") for path in found}


def tasks(found: Any) -> list[dict[str, Any]]:
    """Every task of a file, those of its blocks too."""
    flat = []
    for task in found or ():
        flat.append(task)
        for part in ("block", "rescue", "always"):
            flat += tasks(task.get(part))
    return flat


# --- shape ----------------------------------------------------------------------------------------
@EACH_ROLE
def test_a_role_has_the_houses_shape(role: Path) -> None:
    assert [name for name in FIXED if not (role / name).is_file()] == []
    entries = specs(role)
    assert "main" in entries
    for entry in entries:
        assert (role / f"tasks/{entry}.yml").is_file(), f"{entry} is declared and has no tasks"
    galaxy = load(role / "meta/main.yml")["galaxy_info"]
    assert galaxy["author"] == "kvdeploy"
    assert galaxy["license"] == "Apache-2.0"


@EACH_ROLE
def test_tasks_are_named_by_sentences_of_fully_named_modules(role: Path) -> None:
    for path in [*(role / "tasks").glob("*.yml"), *(role / "handlers").glob("*.yml")]:
        for task in tasks(load(path)):
            assert re.match(r"^[A-Z].* .*[^.]$", task["name"]), (path.name, task["name"])
            modules = [key for key in task if "." in key]
            assert "block" in task or modules, (path.name, task["name"])
            assert all(m.startswith("ansible.builtin.") for m in modules), (path.name, modules)


@EACH_ROLE
def test_defaults_are_exactly_those_that_argument_specs_tells(role: Path) -> None:
    declared = {name: o["default"] for name, o in options(role).items() if "default" in o}
    defaults = load(role / "defaults/main.yml") or {}
    assert defaults == declared
    required = {name for name, o in options(role).items() if o.get("required")}
    assert required | set(declared) == set(options(role)), "neither required nor with a default"
    assert not required & set(defaults), "a required one with a default is never missing"


@EACH_ROLE
def test_every_variable_has_its_roles_name_and_is_declared(role: Path) -> None:
    prefix = f"{role.name}_"
    assert [name for name in options(role) if not name.startswith(prefix)] == []
    known = set(options(role))
    own = set(load(role / "vars/main.yml") or {})
    assert [name for name in own if not name.startswith(f"_{prefix}")] == []
    given, registered = set(), set()
    for path in [*(role / "tasks").glob("*.yml"), *(role / "handlers").glob("*.yml")]:
        for task in tasks(load(path)):
            given |= set(task.get("vars", {})) | set(task.get("ansible.builtin.set_fact", {}))
            given |= {v for k, v in task.get("loop_control", {}).items() if k.endswith("_var")}
            registered |= {task[key] for key in ("register",) if key in task}
    assert [n for n in registered if not n.startswith((f"__{prefix}", f"_{prefix}"))] == []
    for path, text in texts(role).items():
        used = set(re.findall(NAME.format(rf"_{{0,2}}{prefix}[a-z0-9_]+"), code(text)))
        unknown = used - known - own - given - registered - tags(role)
        assert unknown == set(), (path.name, unknown)


def code(text: str) -> str:
    """Without comments and without what is between quotes inside of expressions."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    return re.sub(r"'[^'\n]*'", "''", text)


def tags(role: Path) -> set[str]:
    found: set[str] = set()
    for path in (role / "tasks").glob("*.yml"):
        for task in tasks(load(path)):
            for module in task.values():
                if isinstance(module, dict):
                    found |= set((module.get("apply") or {}).get("tags", ()))
            found |= set(task.get("tags", ()))
    return found


@EACH_ROLE
def test_tags_are_the_roles_own(role: Path) -> None:
    assert [t for t in tags(role) if t != "always" and not t.startswith(role.name)] == []


@EACH_ROLE
def test_its_readme_tells_of_every_public_variable_or_where_all_are_told(role: Path) -> None:
    told = (role / "README.md").read_text(encoding="utf-8")
    if "(meta/argument_specs.yml)" not in told:
        assert [name for name in options(role) if not re.search(rf"\b{name}\b", told)] == []


# --- versions -------------------------------------------------------------------------------------
def test_no_role_holds_a_version() -> None:
    """They live in kvdeploy/model/catalog.py and the lock files alone."""
    pins = {catalog.EFA_INSTALLER, catalog.EFA_KEY_FINGERPRINT}
    found = []
    for path in PLAYBOOKS.rglob("*"):
        if not path.is_file() or path.suffix not in {".yml", ".j2", ".py", ".sh", ".service"}:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = strings(text)
        words = {w for w in VERSION.findall(text) if not ADDRESS.match(w)} | {
            pin for pin in pins if pin in text
        }
        found += [f"{path.relative_to(PLAYBOOKS)}: {word}" for word in words]
    assert found == []


def strings(program: str) -> str:
    """Those of a Python program, without its docstrings."""
    tree = ast.parse(program)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return "\n".join(
        str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in prose
    )


# --- Ansible's own word ---------------------------------------------------------------------------
@pytest.mark.parametrize("playbook", LEADS, ids=lambda path: path.name)
def test_ansible_can_read_the_playbook(playbook: Path, tmp_path: Path) -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "--syntax-check", playbook],
        check=False,
        capture_output=True,
        text=True,
        cwd=PLAYBOOKS,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(PLAYBOOKS / "ansible.cfg"),
            "ANSIBLE_HOME": str(tmp_path),
            "ANSIBLE_LOCALHOST_WARNING": "false",
        },
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("playbook", LEADS, ids=lambda path: path.name)
def test_no_play_lets_one_host_stop_the_others(playbook: Path) -> None:
    for play in load(playbook):
        assert not play.get("any_errors_fatal")
        assert "max_fail_percentage" not in play
