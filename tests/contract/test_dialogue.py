"""A program that is spoken to while it runs."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters import dialogue
from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_process


def start(root: Path, program: str, **env: str) -> Dialogue:
    return Dialogue((sys.executable, "-u", "-c", program), env=env, log=root / "log")


def test_it_answers_and_what_else_it_prints_is_passed_over(tmp_path: Path) -> None:
    program = (
        "import json, sys\n"
        "print('loading'); print('{not json'); print('[1]')\n"
        "for line in sys.stdin: print(json.dumps({'twice': 2 * json.loads(line)['n']}))\n"
    )
    with start(tmp_path, program) as one:
        for n in (1, 21):
            one.say({"n": n})
            assert one.hear(10) == {"twice": 2 * n}
    assert one.hear(1) == {"error": "ended (0): [1]"}


def test_one_that_ends_says_how(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier one\n")
    with start(tmp_path, "import sys; sys.exit('no memory')") as one:
        one.say({"n": 1})
        assert one.hear(10) == {"error": "ended (1): no memory"}
        assert one.hear(10) == {"error": "ended (1): no memory"}
    with start(tmp_path, "raise SystemExit(3)") as one:
        assert one.hear(10) == {"error": "ended (3)"}


def test_one_that_is_killed_says_by_what(tmp_path: Path) -> None:
    with start(tmp_path, "input()") as one:
        os.kill(one.pid, signal.SIGKILL)
        assert one.hear(10) == {"error": "was killed by SIGKILL"}


def test_one_that_says_nothing_is_made_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue, "LEAVE_S", 0.1)
    monkeypatch.setattr(dialogue, "END_S", 0.2)
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}'); time.sleep(60)\n"
    )
    with start(tmp_path, program) as one:
        assert one.hear(10) == {}
        assert one.hear(0.1) == {"error": "said nothing for 0 s"}
    assert one.hear(1) == {"error": "was killed by SIGKILL"}


def test_it_sees_the_environment_that_it_is_given_alone(tmp_path: Path) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    with start(tmp_path, program, MARK="x", LC_CTYPE="C.UTF-8") as one:
        assert one.hear(10) == {"MARK": "x", "LC_CTYPE": "C.UTF-8"}


def test_one_that_is_not_there_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="cannot start /no/such: No such file or directory"):
        Dialogue(("/no/such",), env={}, log=tmp_path / "log")
