"""What the programs of the roles vllm, nixl and model decide: from words, sizes and files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdeploy.adapters.tinymodel import ensure_tiny_model
from tests.nodeprograms import load

builder = load("vllm", "build_environment")
prober = load("nixl", "probe_nixl")
folders = load("model", "model_folder")
sources = load("model", "model_sources")

AGAIN = "Run this again when the cause is gone: it goes on from here."


# --- the engines' environment ------------------------------------------------------------------


def test_an_environment_is_named_by_its_pins_its_python_and_what_is_added() -> None:
    name = builder.digest("a==1\nb==2\n", "3.12")
    assert builder.digest("# a comment\n\n a==1\nb==2", "3.12") == name
    others = [
        builder.digest("a==1\nb==3\n", "3.12"),
        builder.digest("a==1\nb==2\n", "3.11"),
        builder.digest("a==1\nb==2\n", "3.12", "import os"),
    ]
    assert len({name, *others}) == 4


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            "there is no space left below /opt: 3.5 GiB are free. Free some, or give the node a "
            "larger disk; then run this again.",
        ),
        (
            "Collecting vllm\nERROR: Wheel 'vllm' located at /x/vllm.whl is invalid.\n",
            "a package arrived damaged (ERROR: Wheel 'vllm' located at /x/vllm.whl is invalid). "
            "What pip had kept was thrown away: run this again, and look at the index when it "
            "happens twice.",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for aiohttp==3.14.5\n",
            "pip cannot reach its package index (aiohttp==3.14.5). Check the node's way out and "
            f"pip's configuration (/etc/pip.conf). {AGAIN}",
        ),
        (
            "ERROR: No matching distribution found for torch==2.13.0+cpu\n",
            "pip's index has nothing for this Python (torch==2.13.0+cpu). Check pip's "
            "configuration (/etc/pip.conf): PyTorch's CPU wheels have an index of their own. "
            f"{AGAIN}",
        ),
        ("one\ntwo\n\nthree\nfour\nfive.\n", f"pip failed: two | three | four | five. {AGAIN}"),
        ("", f"pip failed: it said nothing. {AGAIN}"),
    ],
)
def test_what_pip_prints_becomes_one_sentence(output: str, sentence: str) -> None:
    assert builder.explain(output, Path("/opt"), 3.5) == sentence


FIT = {
    "vllm": "0.33.0",
    "nixl": "1.5.1",
    "connectors": ["NixlConnector", "NixlPushConnector"],
    "gpus": 8,
}
LEAST = {"vllm": "0.24", "nixl": "1.3.2"}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"vllm": "0.24.0+cpu", "nixl": "1.3.2"}, []),
        ({"vllm": "0.9.2"}, ["vllm 0.9.2 will not do, 0.24 or newer is needed"]),
        ({"nixl": "1.3.1"}, ["nixl 1.3.1 will not do, 1.3.2 or newer is needed"]),
        ({"nixl": None}, ["nixl (missing) will not do, 1.3.2 or newer is needed"]),
        ({"connectors": ["NixlConnector"]}, ["vllm 0.33.0 does not know NixlPushConnector"]),
        (
            {"gpus": 0, "cuda_error": "Found no NVIDIA driver on your system"},
            ["torch finds no usable NVIDIA GPU (Found no NVIDIA driver on your system)"],
        ),
    ],
)
def test_an_environment_is_held_to_its_gates(changes: dict[str, Any], problems: list[str]) -> None:
    assert builder.judge(FIT | changes, LEAST, "NixlPushConnector", gpu=True) == problems


def test_no_gpu_is_no_fault_where_none_is_asked_for() -> None:
    assert builder.judge(FIT | {"gpus": 0}, LEAST, "NixlPushConnector", gpu=False) == []


def installed(site: Path, name: str) -> Path:
    """A package as pip leaves it."""
    info = site / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("whole = True\n")
    (site / f"{name}.pyc").write_bytes(b"whatever pip compiled")
    (info / "METADATA").write_text(f"Name: {name}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(
        f'{name}.py,sha256=x,13\n"{name}.pyc",sha256=x,7\n{name}-1.dist-info/RECORD,,\n'
    )
    return info


def test_what_a_killed_pip_left_is_seen(tmp_path: Path) -> None:
    whole, halfway = installed(tmp_path, "whole"), installed(tmp_path, "halfway")
    short, lost = installed(tmp_path, "short"), installed(tmp_path, "lost")
    assert builder.half_installed(tmp_path) == []
    (halfway / "INSTALLER").unlink()
    (tmp_path / "short.py").write_text("whol")
    (tmp_path / "lost.py").unlink()
    assert builder.half_installed(tmp_path) == [halfway, lost, short]
    assert whole.exists()


def test_environments_are_removed_but_for_the_new_one_and_the_one_in_use(tmp_path: Path) -> None:
    names = ["cpu-aaaaaaaaaaaa", "cuda-bbbbbbbbbbbb", "cuda-cccccccccccc", "cuda-dddddddddddd"]
    strange = ["s3-eeeeeeeeeeee", "cuda-notours"]
    for name in (*names, *strange):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").touch()
    link = tmp_path / "runtime"
    link.symlink_to(tmp_path / names[1])
    job = {"link": str(link), "family": ["cpu", "cuda"]}
    assert builder._prune(job, tmp_path / names[2]) == ["cpu-aaaaaaaaaaaa", "cuda-dddddddddddd"]
    left = {path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()}
    assert left == {names[1], names[2], *strange}


# --- NIXL's plugin -----------------------------------------------------------------------------

EFA = "/opt/amazon/efa/lib"
SEEN = {
    "backend": "LIBFABRIC",
    "plugin": "/opt/kvdeploy/x/libplugin_LIBFABRIC.so",
    "error": "",
    "needs": [(1, 0), (1, 1), (1, 10)],
    "has": [(1, 0), (1, 9), (1, 10)],
    "library": f"{EFA}/libfabric.so.1",
    "efa": "1.51.0",
    "release": "2.7.0",
    "libfabric": [f"{EFA}/libfabric.so.1.30.0"],
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"plugin": ""}, "its NIXL has no plugin for LIBFABRIC"),
        (
            {"has": [(1, 8), (1, 9)], "efa": "1.50.0", "release": "2.6.0", "error": "version ..."},
            "libplugin_LIBFABRIC.so needs FABRIC_1.10, and the node's libfabric 2.6.0 "
            f"({EFA}/libfabric.so.1, EFA 1.50.0) has up to FABRIC_1.9",
        ),
        (
            {"has": [], "error": "libfabric.so.1: cannot open shared object file", "libfabric": []},
            "libplugin_LIBFABRIC.so does not load: libfabric.so.1: cannot open shared object file "
            "(the EFA installer brings it)",
        ),
        (
            {"libfabric": ["/usr/lib/x86_64-linux-gnu/libfabric.so.1.17.0"]},
            "libplugin_LIBFABRIC.so met /usr/lib/x86_64-linux-gnu/libfabric.so.1.17.0, and must "
            f"meet the one below {EFA} alone: a distribution's libfabric does not know EFA's RDMA",
        ),
        (
            {"libfabric": [f"{EFA}/libfabric.so.1.30.0", "/usr/lib/libfabric.so.1"]},
            "libplugin_LIBFABRIC.so met /usr/lib/libfabric.so.1, and must meet the one below "
            f"{EFA} alone: a distribution's libfabric does not know EFA's RDMA",
        ),
        ({"backend": "UCX", "libfabric": []}, ""),
    ],
)
def test_a_plugin_is_judged_by_what_it_met(changes: dict[str, Any], problem: str) -> None:
    assert prober.judge(SEEN | changes, EFA) == problem


def test_symbol_versions_are_read_from_a_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF\0fi_open\0FABRIC_1.10\0FABRIC_1.9\0FABRIC_1.1\0XFABRIC_9.9\0")
    assert prober.symbols(library) == [(1, 1), (1, 9), (1, 10)]


# --- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/x.json", "../x.json", ".cache/x.json", "a/.b/x.json"])
def test_paths_that_lead_out_or_are_hidden_are_never_taken(path: str) -> None:
    assert not folders.is_wanted(path, weights=True)


def test_engines_need_shape_and_weights_and_nothing_else() -> None:
    assert folders.is_wanted("deep/tokenizer.json", weights=False)
    assert folders.is_wanted("model-00001-of-00002.safetensors", weights=True)
    assert not folders.is_wanted("model.safetensors", weights=False)
    assert not folders.is_wanted("consolidated.00.pth", weights=True)


def tensors(size: int) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (tensors(100), ""),
        (tensors(100)[:-1], "is cut short: it has {n} bytes, and its header promises {whole}"),
        (tensors(100) + b"x", "is too long: it has {n} bytes, and its header promises {whole}"),
        (tensors(100)[:20], "is cut short: it has {n} bytes, not even its whole header"),
        (b"", "is cut short: it has {n} bytes, not even its whole header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "is no safetensors file"),
    ],
)
def test_a_safetensors_file_tells_its_own_length(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    expected = problem.format(n=len(content), whole=len(tensors(100)))
    assert folders.safetensors_problem(file) == expected


def test_a_folder_tells_what_it_lacks(tmp_path: Path) -> None:
    problems = folders.folder_problems(tmp_path, weights=True)
    assert problems == ["config.json is missing", "it has no weights (*.safetensors)"]
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(tensors(10))
    assert folders.folder_problems(tmp_path, weights=True) == [
        "config.json is no JSON",
        "model.safetensors.index.json is missing",
    ]
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    assert folders.folder_problems(tmp_path, weights=True) == [
        "other.safetensors is missing, and model.safetensors.index.json names it"
    ]
    (tmp_path / "other.safetensors").write_bytes(tensors(10))
    assert folders.folder_problems(tmp_path, weights=True) == []
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 1}')
    assert folders.folder_problems(tmp_path, weights=True) == [
        "model.safetensors.index.json is no index"
    ]


def test_the_model_that_kvdeploy_makes_is_whole(tmp_path: Path) -> None:
    assert folders.folder_problems(ensure_tiny_model(tmp_path, seed=1), weights=True) == []


GIT_BLOB = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
"""git hash-object of 'hello'."""
SHA256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.mark.parametrize("tag", [GIT_BLOB, SHA256, ""])
def test_a_hubs_file_is_held_to_whatever_hash_the_hub_tells(tmp_path: Path, tag: str) -> None:
    file = tmp_path / "x.json"
    file.write_text("hello")
    assert sources.prove(file, sources.Entry("x.json", 5, tag), "acme/small") == SHA256
    if tag:
        file.write_text("hallo")
        with pytest.raises(sources.Refusal) as refused:
            sources.prove(file, sources.Entry("x.json", 5, tag), "acme/small")
        assert str(refused.value) == (
            "x.json of acme/small arrived with other content than the hub tells: it was thrown "
            "away. Run this again."
        )
        assert not file.exists()


def test_a_digest_names_content_and_not_order() -> None:
    one = {"path": "a", "size": 1, "sha256": "x", "tag": "anything"}
    two = {"path": "b", "size": 2, "sha256": "y", "tag": ""}
    assert folders.digest_of([one, two]) == folders.digest_of([two, one | {"tag": "else"}])
    assert folders.digest_of([one, two]) != folders.digest_of([one, two | {"sha256": "z"}])
