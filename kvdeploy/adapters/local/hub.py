"""Models from a hub: fetched once into kvdeploy's cache, taken from there ever after."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.local.runtime import FOREIGN_ENV
from kvdeploy.errors import CheckError
from kvdeploy.proc import Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.model.outputs import RuntimeOutputs
    from kvdeploy.proc import Runner

FETCH_TIMEOUT_S: Final = 6 * 3600


def ensure_model(
    model_id: str,
    *,
    revision: str | None,
    weights: bool,
    python: RuntimeOutputs,
    cache: Path,
    runner: Runner,
    say: Callable[[str], None],
) -> Path:
    """Return the folder of a hub model; the network is used only when it is not there yet.

    The user's HF_TOKEN and HF_ENDPOINT are honoured. An interrupted fetch goes on where it was.

    Raises:
        CheckError: there is no such model, no access, or no network.
    """
    say(f"fetching {model_id} unless it is cached")

    def on_line(line: str) -> None:
        if line.strip() and not line.startswith("{"):  # the last line is the answer
            say(f"fetching {model_id}: {line.strip()[-60:]}")

    what = "weights" if weights else "shape"
    with resources.as_file(resources.files("kvdeploy.probes") / "hub.py") as program:
        outcome = runner.run(
            Command(
                argv=(
                    *(python.python, "-P", str(program)),
                    *(model_id, revision or "", str(cache), what),
                ),
                env=python.env,
                drop_env=(*FOREIGN_ENV, "HF_HUB_OFFLINE"),
                timeout_s=FETCH_TIMEOUT_S,
            ),
            on_line=on_line,
        )
    try:
        answer = json.loads(outcome.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": outcome.tail(3) or f"exit {outcome.code}", "kind": "?"}
    if "path" in answer:
        return Path(str(answer["path"]))
    msg = f"model.id: cannot fetch {model_id!r}: {answer['error']} ({answer['kind']})"
    raise CheckError(
        msg,
        hint="Check the id, HF_TOKEN and the network; or name a local folder (starting with "
        "'/' or './') or builtin:tiny.",
    )
