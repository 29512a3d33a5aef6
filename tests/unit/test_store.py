from __future__ import annotations

import json
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from kvdeploy import __version__
from kvdeploy.adapters.store import Store, clusters, write_text
from kvdeploy.errors import LockedError, StateError
from kvdeploy.model.record import SCHEMA, Record, StageRecord
from kvdeploy.proc import Command, Outcome

if TYPE_CHECKING:
    from pathlib import Path


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "demo")


def record(*stages: str) -> Record:
    known = {name: StageRecord(digest="d", result={"n": name}) for name in stages}
    return Record(cluster="demo", stages=known)


# --- writing ---------------------------------------------------------------------------------
def test_a_file_is_replaced_in_one_step_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_text(path, "one")
    reader = path.open(encoding="utf-8")
    write_text(path, "two")
    with reader:  # who opened the old file sees all of it and nothing of the new one
        assert reader.read() == "one"
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_text(path, "for everybody", mode=0o644)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert files(path.parent) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \udcff")
    assert path.read_text() == "old"
    assert files(tmp_path) == ["file"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path, seen, ends = tmp_path / "file", set(), threading.Event()
    texts = ["a" * 200_000, "b" * 200_000]
    write_text(path, texts[0])

    def read() -> None:
        while not ends.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(20):
        write_text(path, texts[i % 2])
    ends.set()
    reader.join()
    assert seen <= set(texts)


# --- the record ------------------------------------------------------------------------------
def test_making_a_store_touches_nothing(tmp_path: Path, store: Store) -> None:
    assert not store.exists()
    assert store.read() == Record(cluster="demo", target="local", kvdeploy_version=__version__)
    assert store.read(target="aws").target == "aws"
    assert files(tmp_path) == []


def test_what_was_written_is_read_again(store: Store) -> None:
    store.write(record("runtime", "fleet"))
    assert store.read() == record("runtime", "fleet")


@pytest.mark.parametrize("text", ["", "{", '{"cluster": 3}', "[]", '{"stages": {}}'])
def test_a_damaged_record_says_how_to_get_on(store: Store, text: str) -> None:
    path = store.dir / "record.json"
    write_text(path, text)
    with pytest.raises(StateError) as caught:
        store.read()
    assert caught.value.message == f"{path}: the record is damaged"
    assert caught.value.hint == (
        f"'kvdeploy down' stops what runs and works without it; then delete {path} "
        "and run 'kvdeploy up'."
    )


def test_a_record_of_a_newer_kvdeploy_is_left_alone(store: Store) -> None:
    path = store.dir / "record.json"
    newer = {
        "schema_version": SCHEMA + 1,
        "cluster": "demo",
        "kvdeploy_version": "9.9.9",
        "from_the_future": True,
    }
    write_text(path, json.dumps(newer))
    with pytest.raises(StateError) as caught:
        store.read()
    assert caught.value.message == (
        f"{path}: written by kvdeploy 9.9.9, which is newer than this one ({__version__})"
    )
    assert caught.value.hint == "Use that version, or a newer one."
    assert json.loads(path.read_text()) == newer


def test_keys_of_a_later_version_with_the_same_schema_are_no_harm(store: Store) -> None:
    write_text(store.dir / "record.json", '{"cluster": "demo", "added_later": 1}')
    assert store.read().cluster == "demo"


def test_forgetting_the_fleet_keeps_what_was_built_and_the_logs(store: Store) -> None:
    store.write(record("runtime", "model", "fleet", "proof"))
    write_text(store.processes / "prefill-0" / "launch.json", "{}")
    write_text(store.processes / "prefill-0" / "log", "the engine's last words")
    run = store.new_run("down")
    run.line("hello")
    assert store.exists()
    store.forget_fleet(run)
    assert set(store.read().stages) == {"runtime", "model"}
    assert not store.exists()
    assert run.log.exists()
    assert (run.path / "logs" / "prefill-0.log").read_text() == "the engine's last words"


def test_a_fleet_can_be_forgotten_although_the_record_is_damaged(store: Store) -> None:
    write_text(store.dir / "record.json", "{")
    write_text(store.processes / "prefill-0" / "launch.json", "{}")
    store.forget_fleet(store.new_run("down"))
    assert not store.exists()
    assert (store.dir / "record.json").read_text() == "{"


def test_clusters_are_those_of_which_something_may_run(tmp_path: Path) -> None:
    assert clusters(tmp_path) == []
    for name in ("b", "a"):
        Store(tmp_path, name).processes.mkdir(parents=True)
    Store(tmp_path, "gone").write(record())
    assert clusters(tmp_path) == ["a", "b"]


# --- the lock --------------------------------------------------------------------------------
def test_a_second_run_is_told_who_holds_the_cluster(tmp_path: Path, store: Store) -> None:
    other = Store(tmp_path, "demo")
    with store.locked("up"), pytest.raises(LockedError) as caught, other.locked("down"):
        pass
    holder, _, since = caught.value.message.partition(", since ")
    assert holder == f"cluster 'demo' is held by 'kvdeploy up' (pid {os.getpid()}"
    assert since.endswith(" UTC)")
    assert caught.value.hint == "Wait for it to end, or stop it; then run this again."


def test_the_lock_is_let_go_however_the_run_ends(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.locked("up"):
        _ = 1 / 0
    with store.locked("down"):
        text = (store.dir / "lock").read_text()
    assert text.startswith("'kvdeploy down'")
    assert (store.dir / "lock").read_text() == ""


def test_clusters_do_not_lock_each_other(tmp_path: Path, store: Store) -> None:
    with store.locked("up"), Store(tmp_path, "other").locked("up"):
        pass


# --- the run's log ---------------------------------------------------------------------------
def test_commands_are_kept_with_the_names_of_their_variables_only(store: Store) -> None:
    command = Command(
        argv=("fetch", "--token", "hf_secret"),
        env={"HF_TOKEN": "hf_secret", "A": "value-of-a"},
        secrets=frozenset({"hf_secret"}),
    )
    run = store.new_run("up")
    for code in (0, 3):
        run.command(Outcome(command=command, code=code, stdout="o", stderr="e", seconds=1.234))
    text = (run.path / "commands.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"command": "fetch --token '***'", "env": ["A", "HF_TOKEN"], "code": code, "seconds": 1.23}
        for code in (0, 3)
    ]
    assert "hf_secret" not in text
    assert "value-of-a" not in text


def test_a_run_has_a_folder_named_after_its_time_and_verb(store: Store) -> None:
    run = store.new_run("smoke")
    assert run.path.parent == store.dir / "runs"
    stamp, _, verb = run.path.name.partition("-")
    assert (len(stamp), stamp[8], verb) == (15, "T", "smoke")


def test_runs_of_the_same_second_have_a_folder_each_and_sort_by_their_order(store: Store) -> None:
    paths = [store.new_run("image").path for _ in range(5)]
    assert len(set(paths)) == 5
    assert sorted(paths) == paths


def test_lines_and_reports_of_a_run_are_kept(store: Store) -> None:
    run = store.new_run("smoke")
    run.line("one")
    run.line("two")
    assert [line.partition(" ")[2] for line in run.log.read_text().splitlines()] == ["one", "two"]
    path = run.report("smoke", {"proven": True})
    assert path == run.path / "reports" / "smoke.json"
    assert json.loads(path.read_text()) == {"proven": True}
