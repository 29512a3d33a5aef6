"""Whether there can be rehearsals here."""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.rehearsal.ground import missing

NO_SKIP: Final = "KVDEPLOY_TESTS_NO_SKIP"
"""Set in CI: what cannot be tested is a failure there."""


def ready_or_skip() -> None:
    if reason := missing():
        if os.environ.get(NO_SKIP):
            pytest.fail(f"{reason}, and {NO_SKIP} is set")
        pytest.skip(reason)
