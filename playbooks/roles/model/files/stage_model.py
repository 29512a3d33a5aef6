"""Bring a model into its folder on a node, whole or not at all; or pack one for the nodes.

argv: stage, on a node; describe or pack, on the control machine. stdin: the job, one JSON object.
The last line of stdout is one JSON object; {"error": SENTENCE} and exit code 1 where it cannot be
done.

Files come into a folder beside the final one, whose journal names those that are whole, so that
whoever comes after a killed run fetches only the others. The folder gets its name when everything
is there, its manifest included.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import model_folder
from model_folder import FORMAT, MANIFEST
from model_s3 import S3Source
from model_sources import PART, ArchiveSource, Entry, FolderSource, HubSource, Refusal, flush

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_sources import Source

SOURCES: dict[str, Callable[[dict[str, Any]], Source]] = {
    "s3": S3Source,
    "hub": HubSource,
    "shared": FolderSource,
    "copy": ArchiveSource,
}
JOURNAL = ".kvdeploy-journal"
GIB = 2**30


@contextmanager
def alone(final: Path) -> Iterator[None]:
    """One at a time: a run whose connection was lost may still be at work."""
    with (final.parent / f".{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stage(job: dict[str, Any]) -> dict[str, Any]:
    """Stage the model unless another run has done it meanwhile."""
    final = Path(job["path"])
    final.parent.mkdir(parents=True, exist_ok=True)
    with alone(final):
        before = model_folder.check(job)
        if before["whole"] and not job["refresh"]:
            return {"changed": False, "fetched": []}
        if job["in_place"]:
            return link(final, Path(job["id"]), weights=bool(job["weights"]))
        source = SOURCES[job["source"]](job)
        entries = source.entries()
        if not any(entry.path == "config.json" for entry in entries):
            msg = f"{job['id']} holds no model: it has no config.json. Check model.id."
            raise Refusal(msg)
        part = final.parent / f".{final.name}.staging"
        done = resume(part, final, job, entries)
        todo = [entry for entry in entries if entry.path not in done]
        if before["whole"] and not todo and before["digest"] == _digest(done, entries):
            shutil.rmtree(part)
            return {"changed": False, "fetched": []}
        _ensure_space(part, todo)
        for entry in entries:
            (part / entry.path).parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("HF_HOME", str(part / ".hub"))
        with (part / JOURNAL).open("a", encoding="utf-8") as journal:
            for entry, sha256 in source.fetch(todo, part):
                size = (part / entry.path).stat().st_size
                file = {"path": entry.path, "size": size, "tag": entry.tag, "sha256": sha256}
                done[entry.path] = file
                journal.write(json.dumps(file) + "\n")
                journal.flush()
        if problems := model_folder.folder_problems(part, weights=bool(job["weights"])):
            msg = (
                f"the model at its source ({job['id']}) is not whole: {'; '.join(problems)}. It "
                "was not put in place. Upload it again, then run this again."
            )
            raise Refusal(msg)
        digest = settle(part, final, job, source.origin, [done[e.path] for e in entries])
    if job["archive"]:
        Path(job["archive"]).unlink(missing_ok=True)
    return {"changed": True, "fetched": sorted(e.path for e in todo), "digest": digest}


def _digest(done: dict[str, dict[str, Any]], entries: list[Entry]) -> str:
    return model_folder.digest_of([done[entry.path] for entry in entries])


def resume(
    part: Path, final: Path, job: dict[str, Any], entries: list[Entry]
) -> dict[str, dict[str, Any]]:
    """What need not be fetched: path -> its record. All else is removed from `part`.

    Whole files of an earlier run that was for the same model, and files of the folder in use that
    are still what the source has, by their content.
    """
    wanted = {entry.path: entry for entry in entries}
    done = {}
    for line in _lines(part / JOURNAL):
        entry, file = wanted.get(line.get("path", "")), part / line.get("path", "?")
        if entry and _is_same(entry, line) and _has_size(file, line["size"]):
            done[entry.path] = line
    for path in part.rglob("*") if part.is_dir() else ():
        name = path.relative_to(part).as_posix()
        if path.is_file() and name not in done and not name.startswith((JOURNAL, ".cache/")):
            path.unlink()
    manifest = model_folder.read_manifest(final) if not final.is_symlink() else None
    if manifest and [manifest["source"], manifest["id"]] == [job["source"], job["id"]]:
        held = [
            file
            for file in manifest["files"]
            if (e := wanted.get(file["path"])) and e.path not in done and _is_same(e, file)
        ]
        bad = model_folder.staged_problems(final, held, hashes=True)
        for file in held:
            if file["path"] not in bad:
                target = part / file["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(final / file["path"], target)
                done[file["path"]] = file
    part.mkdir(parents=True, exist_ok=True)
    (part / JOURNAL).write_text("".join(f"{json.dumps(f)}\n" for f in done.values()))
    return done


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the last one, cut off
                continue


def _is_same(entry: Entry, file: dict[str, Any]) -> bool:
    """Whether the source still has what was staged; a hub may not tell a file's size."""
    return bool(entry.tag) and entry.tag == file["tag"] and entry.size in (0, file["size"])


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _ensure_space(part: Path, todo: list[Entry]) -> None:
    needed, free = sum(entry.size for entry in todo), shutil.disk_usage(part).free
    if needed > free:
        raise Refusal(_no_space(part, free, f" needs {_size(needed)} more and"))


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def _no_space(part: Path, free: int, needs: str = "") -> str:
    return (
        f"there is no space for the model: {part.parent}{needs} has {_size(free)} free. "
        "Remove models that are no longer used there, or use an instance type with larger disks."
    )


def settle(
    part: Path, final: Path, job: dict[str, Any], origin: str, files: list[dict[str, Any]]
) -> str:
    """Write the manifest and give the folder its name. Returns the digest of its content."""
    digest = model_folder.digest_of(files)
    manifest = {key: job[key] for key in ("source", "id", "revision")}
    manifest |= {"format": FORMAT, "weights": bool(job["weights"]), "origin": origin}
    (part / JOURNAL).unlink()
    for leftover in (part / ".cache", part / ".hub"):
        shutil.rmtree(leftover, ignore_errors=True)
    document = part / (MANIFEST + PART)
    document.write_text(json.dumps(manifest | {"digest": digest, "files": files}, indent=1) + "\n")
    # The files are on the disk since each was whole: no power cut keeps this and loses them.
    flush(document)
    document.replace(part / MANIFEST)
    _make_way(final)
    part.rename(final)
    shutil.rmtree(_old(final), ignore_errors=True)
    return digest


def link(final: Path, target: Path, *, weights: bool) -> dict[str, Any]:
    """Use a folder where it is, under the name that all nodes know."""
    if problems := model_folder.folder_problems(target, weights=weights):
        msg = f"{target} on this node is no whole model: {'; '.join(problems)}. Check model.id."
        raise Refusal(msg)
    new = final.with_name(f".{final.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    _make_way(final)
    new.replace(final)
    shutil.rmtree(_old(final), ignore_errors=True)
    return {"changed": True, "fetched": []}


def _old(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _make_way(final: Path) -> None:
    """Move aside what has the name. Engines that run keep their open files."""
    shutil.rmtree(_old(final), ignore_errors=True)
    if final.is_symlink() or final.is_file():
        final.unlink()
    elif final.exists():
        final.rename(_old(final))


def describe(job: dict[str, Any]) -> dict[str, Any]:
    """The digest that a folder of this machine has once it is staged, and its size."""
    folder = Path(job["id"])
    if problems := model_folder.folder_problems(folder, weights=bool(job["weights"])):
        msg = f"{folder} on this machine is no whole model: {'; '.join(problems)}. Check model.id."
        raise Refusal(msg)
    paths = model_folder.files_of(folder, weights=bool(job["weights"]))
    size = sum((folder / path).stat().st_size for path in paths)
    if size > job["limit_gib"] * GIB:
        msg = (
            f"{folder} has {_size(size)}, and at most {job['limit_gib']} GiB are copied from this "
            "machine to every node. Put the model into S3 and name it s3://BUCKET/KEY."
        )
        raise Refusal(msg)
    files = [
        {
            "path": p,
            "size": (folder / p).stat().st_size,
            "sha256": model_folder.hash_file(folder / p),
        }
        for p in paths
    ]
    return {"digest": model_folder.digest_of(files), "size": size}


def pack(job: dict[str, Any]) -> dict[str, Any]:
    """Make the archive that nodes are given."""
    folder = Path(job["id"])
    archive = Path(tempfile.mkdtemp(prefix="kvdeploy-model-")) / "model.tar"
    with tarfile.open(archive, "w") as tar:
        for path in model_folder.files_of(folder, weights=bool(job["weights"])):
            tar.add((folder / path).resolve(), arcname=path)
    return {"archive": str(archive)}


def main() -> int:
    """Do what argv says with the job of stdin."""
    job = json.load(sys.stdin)
    verbs = {"stage": stage, "describe": describe, "pack": pack}
    code = 0
    try:
        answer = verbs[sys.argv[1]](job)
    except Refusal as e:
        code, answer = 1, {"error": str(e)}
    except OSError as e:
        code, answer = 1, {"error": f"{e.filename or 'the disk'}: {e.strerror}. Run this again."}
        if e.errno == errno.ENOSPC:
            parent = Path(job["path"]).parent
            answer["error"] = _no_space(parent / "-", shutil.disk_usage(parent).free)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
