from __future__ import annotations

import json
import math
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters import tinymodel
from kvdeploy.adapters.tinymodel import EOS, ensure_tiny_model
from kvdeploy.errors import CheckError
from kvdeploy.planning.sizing import bytes_per_token, parse_geometry

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("cache"), seed=0)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_weights(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def read_tensor(folder: Path, name: str) -> list[float]:
    header, data = read_weights(folder)
    start, end = header[name]["data_offsets"]
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(start, end, 2)]


def test_every_file_that_an_engine_wants_is_there(model: Path) -> None:
    assert sorted(p.name for p in model.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_weights_file_is_whole_and_has_every_tensor_of_a_four_layer_llama(model: Path) -> None:
    header, data = read_weights(model)
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for tensor in header.values():
        assert tensor["data_offsets"] == [end, end + 2 * math.prod(tensor["shape"])]
        assert tensor["dtype"] == "BF16"
        end = tensor["data_offsets"][1]
    assert end == len(data)
    assert len(header) == 3 + 4 * 9
    assert header["model.layers.3.self_attn.k_proj.weight"]["shape"] == [128, 256]


def test_weights_are_normal_with_their_spread_and_norms_are_one(model: Path) -> None:
    weights = read_tensor(model, "model.layers.0.self_attn.q_proj.weight")
    spread = math.sqrt(sum(w * w for w in weights) / len(weights))
    assert spread == pytest.approx(tinymodel.SPREADS["q_proj"], rel=0.02)
    assert sum(weights) / len(weights) == pytest.approx(0, abs=0.002)
    assert set(read_tensor(model, "model.norm.weight")) == {1.0}


def test_only_printable_characters_and_the_end_can_be_answered(model: Path) -> None:
    flat = read_tensor(model, "lm_head.weight")
    rows = [flat[i : i + 256] for i in range(0, len(flat), 256)]
    alive = {i for i, row in enumerate(rows) if any(row)}
    assert alive == {*range(32, 127), EOS}


def test_one_token_is_one_byte_and_its_id_is_the_byte(model: Path) -> None:
    vocab = read_json(model / "tokenizer.json")["model"]["vocab"]
    assert list(vocab.values()) == list(range(259))
    assert (vocab["A"], vocab["\u0120"], vocab["\u010a"]) == (ord("A"), ord(" "), ord("\n"))
    assert (vocab["<s>"], vocab["</s>"], vocab["<pad>"]) == (256, 257, 258)


def test_no_id_of_the_head_is_without_a_token(model: Path) -> None:
    vocab = read_json(model / "tokenizer.json")["model"]["vocab"]
    assert read_json(model / "config.json")["vocab_size"] == len(vocab)


def test_a_token_of_it_costs_2_kib_of_cache(model: Path) -> None:
    geometry = parse_geometry(read_json(model / "config.json"), dtype="auto")
    assert bytes_per_token(geometry) == 2048


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "803f"),
        (-2.0, "00c0"),
        (1.00390625, "803f"),  # halfway: to the even one below
        (1.01171875, "823f"),  # halfway: to the even one above
        (1.005, "813f"),
    ],
)
def test_numbers_are_rounded_to_the_nearest_bfloat16(value: float, expected: str) -> None:
    assert tinymodel._bf16(value).hex() == expected


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    tmp_path: Path, model: Path
) -> None:
    again = ensure_tiny_model(tmp_path, seed=0)
    other = ensure_tiny_model(tmp_path, seed=1)
    assert again.name == model.name
    assert other.name != model.name
    for path in model.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert read_weights(other)[1] != read_weights(model)[1]


def test_a_model_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    folder = ensure_tiny_model(tmp_path, seed=0, on_progress=said.append)
    (folder / "mark").touch()
    assert ensure_tiny_model(tmp_path, seed=0, on_progress=said.append) == folder
    assert (folder / "mark").exists()
    assert said == [f"making a tiny model in {folder}"]


def test_a_changed_recipe_is_another_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tinymodel.SPREADS, "lm_head", 0.5)
    assert ensure_tiny_model(tmp_path, seed=0).name != model.name


def test_a_maker_that_is_stopped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, n: int) -> bytes:
        # The configuration is written by now, the weights are not.
        (workshop,) = tmp_path.iterdir()
        assert (workshop / "config.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("random.Random.randbytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_model(tmp_path, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_makers_at_the_same_time_do_each_other_no_harm(tmp_path: Path) -> None:
    start = threading.Barrier(4)
    folders: list[Path] = []

    def wait(said: str) -> None:
        start.wait(timeout=10)  # each has seen that there is no model yet

    def make() -> None:
        folders.append(ensure_tiny_model(tmp_path, seed=0, on_progress=wait))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert list(tmp_path.iterdir()) == [folders[0]]


def test_another_user_s_engine_can_read_it(model: Path) -> None:
    assert model.stat().st_mode & 0o755 == 0o755


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckError) as e:
        ensure_tiny_model(tmp_path / "file", seed=0)
    assert e.value.message.startswith(f"cannot write the tiny model to {tmp_path}/file/tiny-llama")
    assert e.value.message.endswith(": File exists")
    assert e.value.hint == "free some disk space, or choose another cache folder"
