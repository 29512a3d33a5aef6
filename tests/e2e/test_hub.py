"""Models from a hub, with the hub library that the runtime really holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters.local import hub, runtime
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.errors import CheckError
from kvdeploy.proc import LocalRunner
from tests.e2e.hub import run_hub

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.model.outputs import RuntimeOutputs

pytestmark = [pytest.mark.real_process, pytest.mark.e2e]


@pytest.fixture(scope="module")
def python() -> RuntimeOutputs:
    return runtime.build("cpu", LocalRunner(), lambda _: None)


def fetch(model_id: str, python: RuntimeOutputs, cache: Path, *, weights: bool = True) -> Path:
    return hub.ensure_model(
        model_id,
        revision=None,
        weights=weights,
        python=python,
        cache=cache,
        runner=LocalRunner(),
        say=lambda _: None,
    )


def test_a_model_is_fetched_once_and_taken_from_the_cache_ever_after(
    python: RuntimeOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensure_tiny_model(tmp_path / "models", seed=1)
    with run_hub("acme/small", model) as known:
        monkeypatch.setenv("HF_ENDPOINT", known.url)
        path = fetch("acme/small", python, tmp_path / "hub")
        asked = len(known.asked)
        assert fetch("acme/small", python, tmp_path / "hub") == path
        assert len(known.asked) == asked
    assert {p.name for p in path.iterdir()} == {p.name for p in model.iterdir()}
    weights = "model.safetensors"
    assert (path / weights).read_bytes() == (model / weights).read_bytes()
    assert fetch("acme/small", python, tmp_path / "hub") == path  # the hub is gone


def test_dummy_weights_fetch_the_shape_alone(
    python: RuntimeOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensure_tiny_model(tmp_path / "models", seed=1)
    with run_hub("acme/small", model) as known:
        monkeypatch.setenv("HF_ENDPOINT", known.url)
        path = fetch("acme/small", python, tmp_path / "hub", weights=False)
        names = {p.name for p in path.iterdir()}
        assert "config.json" in names
        assert "model.safetensors" not in names
        # Asked for with its weights, it is fetched whole.
        assert (fetch("acme/small", python, tmp_path / "hub") / "model.safetensors").exists()


def test_a_model_that_is_not_there_is_told(
    python: RuntimeOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensure_tiny_model(tmp_path / "models", seed=1)
    with run_hub("acme/small", model) as known:
        monkeypatch.setenv("HF_ENDPOINT", known.url)
        with pytest.raises(CheckError) as caught:
            fetch("acme/large", python, tmp_path / "hub")
    assert caught.value.message.startswith("model.id: cannot fetch 'acme/large': ")
    assert "HF_TOKEN" in caught.value.hint
