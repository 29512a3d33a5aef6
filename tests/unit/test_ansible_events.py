"""What is made of what Ansible says: progress, the log, the report, and the error at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.ansible.events import Heard
from kvdeploy.adapters.ansible.failures import explain, timed_out
from kvdeploy.adapters.ansible.mask import Mask
from kvdeploy.adapters.ansible.report import HostReport, PlayReport
from kvdeploy.adapters.ansible.results import HIDDEN, message_of
from kvdeploy.adapters.ansible.unreachable import RUNNING, hint_of, words_of
from kvdeploy.errors import KvdeployError, PlaybookError, UnreachableError
from kvdeploy.model.inventory import Connection, Host, Inventory

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG = Path("/runs/ansible.jsonl")
ROOT = Path("/p")
CONNECTION = Connection(user="ubuntu", private_key="/k/id", known_hosts="/k/known_hosts")
INVENTORY = Inventory(
    hosts=tuple(
        Host(name=f"{role}-{n}", role=role, address=f"10.0.{n}.{len(role)}")
        for role in ("prefill", "decode")
        for n in (0, 1)
    ),
    connection=CONNECTION,
)


@dataclass
class Line:
    said: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def update(self, detail: str) -> None:
        self.said.append(detail)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Ears:
    """A run to be heard, line by line."""

    def __init__(self, secrets: Mapping[str, Any] | None = None) -> None:
        self.line, self.time = Line(), 0.0
        self.entries: list[dict[str, Any]] = []
        self.heard = Heard(
            listener=self.line,
            mask=Mask(secrets or {}),
            log=lambda entry: self.entries.append(dict(entry)),
            now=lambda: self.time,
        )

    def say(self, event: str, host: str = "", role: str = "", task: str = "t", **more: Any) -> None:
        data = {"host": host, "role": role, "task": task, "task_path": "/p/x.yml:1", **more}
        self.heard.line(json.dumps({"event": event, "data": data}))

    def do(self, host: str, role: str, task: str, *, seconds: float = 1, **result: Any) -> None:
        self.say("runner_on_start", host, role, task)
        self.say("runner_on_ok", host, role, task, duration=seconds, res=result)

    def fail(self, host: str, message: str, role: str = "", task: str = "t", **more: Any) -> None:
        self.say("runner_on_failed", host, role, task, duration=1, res={"msg": message}, **more)

    def lose(self, host: str, message: str) -> None:
        self.say("runner_on_unreachable", host, duration=1, res={"msg": message})

    def end(self, status: str = "failed", **stats: Mapping[str, int]) -> None:
        self.heard.line(json.dumps({"event": "playbook_on_stats", "data": stats}))
        self.heard.line(json.dumps({"event": "kvdeploy_end", "status": status, "rc": 0}))

    def error(self) -> KvdeployError | None:
        return explain("nodes.yml", self.heard, INVENTORY, log=LOG, root=ROOT)


# --- progress --------------------------------------------------------------------------------
def test_a_host_is_told_when_it_is_done_with_a_role_with_its_time_and_changes() -> None:
    ears = Ears()
    ears.do("decode-0", "base", "Set limits", seconds=1.5, changed=True)
    ears.do("decode-0", "base", "Set sysctls", seconds=2.0, changed=True)
    ears.do("prefill-0", "base", "Set limits", seconds=0.2, changed=False)
    assert ears.line.notes == []
    ears.do("decode-0", "efa", "Look", seconds=0.5)
    assert ears.line.notes == ["   ~ decode-0: base (3.5 s, 2 changed)"]
    ears.end("successful")
    assert ears.line.notes[1:] == [
        "   = decode-0: efa (0.5 s)",
        "   = prefill-0: base (0.2 s)",
    ]


def test_a_role_that_had_nothing_to_do_on_a_host_is_not_told() -> None:
    ears = Ears()
    ears.say("runner_on_start", "router-0", "efa")
    ears.say("runner_on_skipped", "router-0", "efa", duration=0.1)
    ears.do("router-0", "", "A task outside of roles", changed=True)
    ears.say("playbook_on_play_start")
    assert ears.line.notes == []


def test_the_line_says_what_goes_on_and_on_how_many_hosts() -> None:
    ears = Ears()
    ears.say("runner_on_start", "decode-0", "efa", "Install the EFA stack")
    ears.say("runner_on_start", "decode-1", "", "Gather facts")
    ears.say("runner_on_ok", "decode-1", "", "Gather facts", duration=1, res={})
    ears.say("runner_on_ok", "decode-0", "efa", "Install the EFA stack", duration=1, res={})
    assert ears.line.said == [
        "decode-0: efa: Install the EFA stack",
        "decode-1: Gather facts and 1 more",
        "decode-0: efa: Install the EFA stack",
    ]


def test_a_retry_is_shown_and_logged() -> None:
    ears = Ears()
    ears.say("runner_on_start", "decode-0", "efa", "Count devices")
    tried = {"attempts": 1, "retries": 30, "rc": 1, "stderr": "15 of 16", "msg": ""}
    ears.say("runner_retry", "decode-0", "efa", "Count devices", res=tried)
    assert ears.line.said[-1] == "decode-0: efa: Count devices (try 2 of 30)"
    assert ears.entries[-1] == {
        "event": "runner_retry",
        "host": "decode-0",
        "role": "efa",
        "task": "Count devices",
        "message": "try 2 of 30: exit code 1: 15 of 16",
    }


def test_a_failure_is_told_at_once_and_the_role_is_not_called_done() -> None:
    ears = Ears()
    ears.do("decode-0", "nvidia", "Look", changed=False)
    ears.fail("decode-0", "no GPU", "nvidia", "Count GPUs")
    ears.lose("decode-1", "ssh: connect to host 10.0.1.6 port 22: Connection refused")
    ears.end(failures={"decode-0": 1}, dark={"decode-1": 1})
    assert ears.line.notes == [
        "   ! decode-0: Count GPUs: no GPU",
        "   ! decode-1: not reachable: connection refused",
    ]


def test_failures_that_a_task_allows_are_none() -> None:
    ears = Ears()
    ears.fail("decode-0", "no module", ignore_errors=True)
    ears.end("successful", ok={"decode-0": 1})
    assert ears.line.notes == []
    assert ears.error() is None
    assert ears.entries[0]["message"] == "no module"


# --- the log and the report ------------------------------------------------------------------
def test_the_log_has_host_role_task_seconds_and_what_changed() -> None:
    ears = Ears()
    ears.do("decode-0", "base", "Set limits", seconds=1.23456, changed=True)
    assert ears.entries == [
        {
            "event": "runner_on_ok",
            "host": "decode-0",
            "role": "base",
            "task": "Set limits",
            "seconds": 1.235,
            "changed": True,
        }
    ]


def test_the_report_has_every_host_in_the_inventorys_order() -> None:
    ears = Ears()
    ears.do("decode-0", "base", "a", seconds=1.5, changed=True)
    ears.do("prefill-0", "base", "a", seconds=1)
    ears.do("decode-0", "efa", "b", seconds=2)
    ears.do("decode-0", "base", "a handler", seconds=0.25)
    ears.end(
        "successful",
        ok={"decode-0": 3, "prefill-0": 1},
        changed={"decode-0": 1},
        skipped={"prefill-0": 4},
    )
    names = [host.name for host in INVENTORY.hosts]
    report = ears.heard.report("nodes.yml", 12.34567, names)
    assert report == PlayReport(
        playbook="nodes.yml",
        seconds=12.346,
        hosts=(
            HostReport(name="prefill-0", ok=1, skipped=4, role_seconds={"base": 1.0}),
            HostReport(name="decode-0", ok=3, changed=1, role_seconds={"base": 1.75, "efa": 2.0}),
        ),
    )
    assert report.changed == 1


# --- secrets ---------------------------------------------------------------------------------
def test_secrets_are_masked_wherever_they_come_up() -> None:
    secrets = {"token": 'a"b\\c', "keys": ["sk-1", "sk-12"], "deep": {"x": ("inner",)}, "n": 7}
    ears = Ears(secrets)
    said = 'token a"b\\c, as JSON a\\"b\\\\c, keys sk-12 and sk-1, inner'
    ears.fail("decode-0", said)
    ears.heard.line("a line that is no JSON: sk-1")
    ears.end(failures={"decode-0": 1})
    error = ears.error()
    masked = "token ***, as JSON ***, keys *** and ***, ***"
    assert error is not None
    assert error.message == f"nodes.yml failed: decode-0: {masked} (t, x.yml:1)"
    assert ears.line.notes == [f"   ! decode-0: t: {masked}"]
    assert ears.entries[0]["message"] == masked
    assert ears.heard.text == ["a line that is no JSON: ***"]


def test_an_empty_secret_masks_nothing() -> None:
    assert Mask({"token": "", "keys": [""]})({"a": ["b", 1, None]}) == {"a": ["b", 1, None]}


# --- what failed -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"msg": "use Ubuntu 24.04"}, "use Ubuntu 24.04"),
        ({"msg": ["two", "lines"]}, "two lines"),
        ({"msg": "folded\n  text\n"}, "folded text"),
        ({"msg": "Task failed: Action failed: no space left"}, "no space left"),
        (
            {"rc": 3, "msg": "non-zero return code", "stderr": "a\n\nb\nc\nd\n"},
            "exit code 3: b / c / d",
        ),
        ({"rc": 3, "msg": "non-zero return code", "stdout": "out"}, "exit code 3: out"),
        ({"rc": 3, "msg": "non-zero return code"}, "exit code 3, and it said nothing"),
        (
            {"rc": 3, "msg": "The command exited with a non-zero return code.", "stderr": "x"},
            "exit code 3: x",
        ),
        ({"rc": 100, "msg": "apt: dpkg was interrupted"}, "apt: dpkg was interrupted"),
        (
            {
                "msg": "MODULE FAILURE: No start of json char found",
                "rc": 1,
                "module_stderr": "boom",
            },
            "boom",
        ),
        ({"reason": "Could not find or access 'x.yml'"}, "Could not find or access 'x.yml'"),
        (
            {"msg": "Validation of arguments failed", "argument_errors": ["missing: efa_version"]},
            "missing: efa_version",
        ),
        ({"msg": "no", "attempts": 30}, "no (tried 30 times)"),
        ({"msg": "no", "attempts": 1}, "no"),
        ({"censored": "hidden"}, HIDDEN),
        ({}, "it did not say why"),
        (
            {
                "msg": "One or more items failed",
                "results": [
                    {"item": "a", "failed": False},
                    {"item": "b", "failed": True, "rc": 1, "msg": "", "stderr": "x"},
                    {"item": {"k": 1}, "_ansible_item_label": "c", "failed": True, "msg": "y"},
                ],
            },
            "b: exit code 1: x; c: y",
        ),
        (
            {"results": [{"item": n, "failed": True, "msg": "m"} for n in range(7)]},
            "0: m; 1: m; 2: m; 3: m; 4: m; and 2 more",
        ),
    ],
)
def test_why_a_task_failed_is_one_sentence(result: dict[str, Any], message: str) -> None:
    assert message_of(result) == message


def test_each_host_that_failed_is_named_with_role_task_and_place() -> None:
    ears = Ears()
    for host in ("decode-0", "decode-1"):
        ears.fail(host, "no EFA device", "efa", "Count devices", task_path="/p/roles/efa/v.yml:7")
    ears.fail("prefill-0", "no space", "base", "Check space", task_path="/q/elsewhere.yml:2")
    ears.do("prefill-1", "base", "Check space")
    ears.end(failures={"decode-0": 1, "decode-1": 1, "prefill-0": 1})
    error = ears.error()
    assert isinstance(error, PlaybookError)
    assert error.message == (
        "nodes.yml failed on 3 of 4 hosts:\n"
        "  decode-0, decode-1: no EFA device (efa: Count devices, roles/efa/v.yml:7)\n"
        "  prefill-0: no space (base: Check space, /q/elsewhere.yml:2)"
    )
    assert error.hint == "Put that right. Then run it again: it picks up where it was."
    assert error.log == LOG


def test_hosts_that_say_the_same_of_themselves_are_told_once() -> None:
    ears = Ears()
    for host in ("decode-0", "decode-1"):
        ears.fail(host, f"{host} has no GPU", "nvidia", "Count GPUs")
    ears.end(failures={"decode-0": 1, "decode-1": 1})
    error = ears.error()
    assert error is not None
    assert error.message == (
        "nodes.yml failed: decode-0, decode-1: has no GPU (nvidia: Count GPUs, x.yml:1)"
    )


def test_a_failure_that_was_rescued_is_not_the_reason() -> None:
    ears = Ears()
    ears.fail("decode-0", "the mirror is away", task="Ask the mirror")
    ears.fail("decode-0", "the hub is away", task="Ask the hub")
    ears.fail("decode-1", "the mirror is away", task="Ask the mirror")
    ears.end(failures={"decode-0": 1}, rescued={"decode-0": 1, "decode-1": 1})
    error = ears.error()
    assert error is not None
    assert error.message == "nodes.yml failed: decode-0: the hub is away (Ask the hub, x.yml:1)"


def test_a_run_that_broke_off_tells_every_failure_it_saw() -> None:
    ears = Ears()
    ears.fail("decode-0", "no GPU")
    error = ears.error()
    assert error is not None
    assert error.message == "nodes.yml failed: decode-0: no GPU (t, x.yml:1)"


def test_unreachable_hosts_alone_are_another_error() -> None:
    ears = Ears()
    ears.do("prefill-0", "base", "x")
    ears.lose("decode-0", "Failed to connect to the host via ssh: Connection timed out")
    ears.lose("decode-1", "Failed to connect to the host via ssh: Connection timed out")
    ears.lose("prefill-1", "ssh: connect to host 10.0.1.7 port 22: No route to host")
    ears.end(dark={"decode-0": 1, "decode-1": 1, "prefill-1": 1})
    error = ears.error()
    assert isinstance(error, UnreachableError)
    assert error.exit_code == 8
    assert error.message == (
        "nodes.yml:\n"
        "  decode-0 (10.0.0.6), decode-1 (10.0.1.6) are not reachable: it did not answer in time\n"
        "  prefill-1 (10.0.1.7) is not reachable: there is no route to it"
    )
    assert error.hint == f"{RUNNING} Then run it again: it picks up where it was."


def test_failed_and_unreachable_together_name_both() -> None:
    ears = Ears()
    ears.lose("decode-0", "Connection refused")
    ears.fail("decode-1", "no GPU")
    ears.end(failures={"decode-1": 1}, dark={"decode-0": 1})
    error = ears.error()
    assert isinstance(error, PlaybookError)
    assert error.message == (
        "nodes.yml failed on 2 of 2 hosts:\n"
        "  decode-1: no GPU (t, x.yml:1)\n"
        "  decode-0 (10.0.0.6) is not reachable: connection refused"
    )


def test_a_playbook_that_cannot_be_run_is_told_in_ansibles_words() -> None:
    ears = Ears()
    for text in (
        "\x1b[0;31m[ERROR]: the role 'efa' was not found in /p/roles\x1b[0m",
        "\x1b[0;31mOrigin: /p/nodes.yml:2:11\x1b[0m",
        "1 - hosts: all",
    ):
        ears.heard.line(json.dumps({"event": "verbose", "data": {}, "text": text}))
    ears.heard.line(json.dumps({"event": "kvdeploy_end", "status": "failed", "rc": 1}))
    error = ears.error()
    assert isinstance(error, PlaybookError)
    assert error.message == (
        "nodes.yml could not be run: the role 'efa' was not found in /p/roles (nodes.yml:2)"
    )


def test_a_worker_that_dies_is_told_with_its_last_word() -> None:
    ears = Ears()
    ears.heard.line("Traceback (most recent call last):")
    ears.heard.line("ImportError: no module named x")
    error = ears.error()
    assert error is not None
    assert error.message == "nodes.yml could not be run: ImportError: no module named x"
    silent = Ears().error()
    assert silent is not None
    assert silent.message == "nodes.yml could not be run: Ansible ended without a word"


def test_warnings_are_logged_and_are_no_reason() -> None:
    ears = Ears()
    warning = {"event": "warning", "data": {}, "text": "[WARNING]: old"}
    ears.heard.line(json.dumps(warning))
    assert ears.entries == [{"event": "warning", "message": "[WARNING]: old"}]
    assert ears.heard.text == []


def test_a_playbook_for_no_host_is_no_success() -> None:
    ears = Ears()
    ears.end("successful")
    error = ears.error()
    assert isinstance(error, PlaybookError)
    assert error.message == (
        "nodes.yml did nothing: none of its plays and tasks is for the hosts there are"
    )


def test_being_stopped_tells_what_was_going_on() -> None:
    ears = Ears()
    ears.say("runner_on_start", "decode-0", "efa", "Install")
    ears.say("runner_on_start", "decode-1", "efa", "Install")
    ears.time = 40.0
    ears.say("runner_on_start", "prefill-0", "", "Reboot")
    ears.time = 412.0
    doing = "efa: Install (412 s) on decode-0, decode-1; Reboot (372 s) on prefill-0"
    late = timed_out("nodes.yml", ears.heard, 400, log=LOG)
    assert late.message == (f"nodes.yml took over 400 s and was stopped in the middle of: {doing}")
    assert late.hint == (
        "A command under way on a host runs on to its end. "
        "Then run it again: it picks up where it was."
    )
    killed = ears.error()
    ears.heard.line(json.dumps({"event": "kvdeploy_end", "status": "canceled", "rc": 254}))
    stopped = ears.error()
    assert stopped is not None
    assert killed is not None
    assert stopped.message == killed.message
    assert stopped.message == f"nodes.yml was stopped from outside in the middle of: {doing}"


# --- ssh -------------------------------------------------------------------------------------
CHANGED_KEY = (
    "Failed to connect to the host via ssh: @@@@@@@\r\n@    WARNING: REMOTE HOST IDENTIFICATION "
    "HAS CHANGED!     @\r\nOffending ED25519 key in /my files/kh:3\r\n  remove with:\r\n"
    "Host key for i-0d has changed and you have requested strict checking.\r\n"
)


@pytest.mark.parametrize(
    ("said", "words", "hint"),
    [
        ("ssh: connect to host 10.0.0.4 port 22: Connection refused", "connection refused", "sshd"),
        ("Connection to 10.0.0.4 port 22 timed out", "it did not answer in time", RUNNING),
        ("Connection timed out during banner exchange", "it did not answer in time", RUNNING),
        ("ssh: connect to host x port 22: No route to host", "there is no route to it", RUNNING),
        (
            "ssh: Could not resolve hostname node.x: Name or service not known",
            "the name node.x cannot be resolved",
            "spelled",
        ),
        (
            CHANGED_KEY,
            "the host key of i-0d is not the one in /my files/kh, line 3",
            "Find out whether that machine was really made anew: if not, somebody may be in "
            "between. If it was, remove its old key: ssh-keygen -f '/my files/kh' -R 'i-0d'.",
        ),
        (
            "No ED25519 host key is known for i-0d and you have requested strict checking.",
            "no host key is known for i-0d",
            "add it to /k/known_hosts: 'i-0d ssh-ed25519 ...'.",
        ),
        (
            "ubuntu@10.0.0.4: Permission denied (publickey).",
            "it refused the log-in (permission denied)",
            "Is ubuntu the right user for the image, and /k/id the key",
        ),
        (
            'UNPROTECTED PRIVATE KEY FILE!\r\nLoad key "/k/id": bad permissions\r\n'
            "ubuntu@10.0.0.4: Permission denied (publickey).",
            "the key file can be read by others, so ssh does not use it",
            "Run: chmod 600 /k/id.",
        ),
        (
            "no such identity: /k/id: No such file or directory\r\nu@h: Permission denied",
            "there is no key file /k/id",
            "launched with",
        ),
        (
            'Load key "/k/id": error in libcrypto\r\nu@h: Permission denied (publickey).',
            "ssh cannot read the key /k/id: error in libcrypto",
            "launched with",
        ),
        (
            "Too many authentication failures",
            "it refused the log-in after too many keys",
            "one key",
        ),
        (
            "Stdio forwarding request failed: Session open refused by peer\r\n"
            "kex_exchange_identification: Connection closed by remote host",
            "the bastion cannot reach it",
            "let the bastion's SSH in",
        ),
        (
            "channel 0: open failed: administratively prohibited: open failed",
            "the bastion does not allow forwarding",
            "AllowTcpForwarding yes",
        ),
        (
            "Shared connection to 10.0.0.4 closed.\r\nBroken pipe",
            "the connection broke off",
            "down",
        ),
        (
            "An error occurred (TargetNotConnected) when calling the StartSession operation",
            "its SSM agent is not connected",
            "AmazonSSMManagedInstanceCore",
        ),
        (
            "An error occurred (AccessDeniedException) when calling the StartSession operation",
            "AWS does not allow a session with it",
            "ssm:StartSession",
        ),
        (
            "An error occurred (ExpiredTokenException)",
            "AWS does not accept the credentials",
            "login",
        ),
        (
            "SessionManagerPlugin is not found. Please refer to",
            "session-manager-plugin is not installed here",
            "Install",
        ),
        ("Failed to connect to the host via ssh: something new", "something new", RUNNING),
        ("", "ssh did not say why", RUNNING),
    ],
)
def test_what_ssh_says_is_told_with_what_to_do(said: str, words: str, hint: str) -> None:
    assert words_of(said) == words
    assert hint in hint_of(said, CONNECTION)


def test_without_a_key_the_agents_are_named() -> None:
    agents = CONNECTION.model_copy(update={"private_key": None})
    assert "one of your SSH agent's keys the key" in hint_of("Permission denied", agents)
