"""Where models come from: a folder, an archive, a hub (S3 is model_s3.py).

Runs on nodes. A source lists its files and fetches some; a fetched file is whole before it gets
its name. huggingface_hub is imported where it is needed, from the environment that runs this.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from model_folder import BLOCK, THREADS, files_of, hash_file, is_wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    Fetched = Iterator[tuple["Entry", str]]
    """Each file as it comes, with the SHA-256 of its content."""

PART = ".part"
AGAIN = "it was thrown away. Run this again."


class Refusal(Exception):  # noqa: N818  # not an error of this program
    """Why it cannot be done, and what to do: one sentence or two."""


@dataclass(frozen=True)
class Entry:
    """A file of the source."""

    path: str
    size: int
    tag: str
    """Changes when the file's content does: an ETag, a hash, a time."""


class Source(Protocol):
    """What staging asks of each of them."""

    origin: str
    """What the name of the model meant when it was fetched, e.g. a commit."""

    def entries(self) -> list[Entry]:
        """Every file that engines need."""

    def fetch(self, entries: list[Entry], target: Path) -> Fetched:
        """Bring these into `target`."""


def flush(path: Path) -> None:
    """Have a file on the disk before anything says that it is there."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def copy_stream(source: IO[bytes], target: Path) -> str:
    """Write a stream to `target`, which is whole when it is there; its SHA-256."""
    digest = hashlib.sha256()
    part = target.with_name(target.name + PART)
    with part.open("wb") as file:
        while block := source.read(BLOCK):
            digest.update(block)
            file.write(block)
    flush(part)
    part.replace(target)
    return digest.hexdigest()


class FolderSource:
    """A folder that the node sees, e.g. on a shared file system."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder, self.weights = Path(job["id"]), bool(job["weights"])
        self.origin = ""

    def entries(self) -> list[Entry]:
        if not self.folder.is_dir():
            msg = (
                f"{self.folder} is no folder on this node. Mount the file system, or name another."
            )
            raise Refusal(msg)
        found = []
        for path in files_of(self.folder, weights=self.weights):
            state = (self.folder / path).stat()
            found.append(Entry(path, state.st_size, f"{state.st_mtime_ns} {self.folder}"))
        return found

    def fetch(self, entries: list[Entry], target: Path) -> Fetched:
        def copy(entry: Entry) -> tuple[Entry, str]:
            with (self.folder / entry.path).open("rb") as file:
                return entry, copy_stream(file, target / entry.path)

        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(copy, entries)


class ArchiveSource:
    """A tar file that the control machine made; it is removed when all is staged."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.archive, self.weights = Path(job["archive"]), bool(job["weights"])
        self.digest, self.origin = str(job["digest"]), ""

    def entries(self) -> list[Entry]:
        with tarfile.open(self.archive) as tar:
            return [
                Entry(member.name, member.size, self.digest)
                for member in tar.getmembers()
                if member.isfile() and is_wanted(member.name, weights=self.weights)
            ]

    def fetch(self, entries: list[Entry], target: Path) -> Fetched:
        with tarfile.open(self.archive) as tar:
            for entry in entries:
                file = tar.extractfile(entry.path)
                if file is not None:
                    yield entry, copy_stream(file, target / entry.path)


class HubSource:
    """A model hub, by its own library, which goes on with what is there of a file."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.id, self.revision = str(job["id"]), job["revision"] or None
        self.weights = bool(job["weights"])
        self.token: str | None = None
        if job["token_file"]:
            self.token = Path(job["token_file"]).read_text(encoding="utf-8").strip() or None
        self.origin = ""

    def entries(self) -> list[Entry]:
        hub = importlib.import_module("huggingface_hub")
        try:
            info = hub.HfApi(token=self.token).model_info(
                self.id, revision=self.revision, files_metadata=True
            )
        except Exception as e:
            raise Refusal(self._refusal(e)) from e
        self.origin = str(info.sha)  # fetched by its commit: a branch may move meanwhile
        return [
            Entry(f.rfilename, f.size or 0, (f.lfs.sha256 if f.lfs else f.blob_id) or "")
            for f in info.siblings
            if is_wanted(f.rfilename, weights=self.weights)
        ]

    def fetch(self, entries: list[Entry], target: Path) -> Fetched:
        hub = importlib.import_module("huggingface_hub")

        def get(entry: Entry) -> tuple[Entry, str]:
            path = Path(
                hub.hf_hub_download(
                    self.id, entry.path, revision=self.origin, local_dir=target, token=self.token
                )
            )
            return entry, prove(path, entry, self.id)

        with ThreadPoolExecutor(THREADS) as pool:
            asked = [pool.submit(get, entry) for entry in entries]
            try:
                for future in as_completed(asked):
                    yield future.result()
            except (Refusal, OSError):
                pool.shutdown(cancel_futures=True)
                raise
            except Exception as e:
                pool.shutdown(cancel_futures=True)
                raise Refusal(self._refusal(e)) from e

    def _refusal(self, e: Exception) -> str:
        kind, words = type(e).__name__, str(e).strip() or "no reason given"
        what = {
            "GatedRepoError": "it is gated, and the token has no access to it",
            "RepositoryNotFoundError": "there is no such model, or the token may not see it",
            "RevisionNotFoundError": f"it has no revision {self.revision}",
        }.get(kind, words.splitlines()[0].rstrip("."))
        return (
            f"cannot fetch {self.id!r} from the hub: {what} ({kind}). Check model.id, "
            "model.revision, the token and the node's way out; or put the model into S3."
        )


def prove(path: Path, entry: Entry, model: str) -> str:
    """Hold a file to what the hub says of its content; its SHA-256."""
    found = hash_file(path)
    if re.fullmatch("[0-9a-f]{64}", entry.tag):  # of a file in large file storage
        right = found == entry.tag
    elif re.fullmatch("[0-9a-f]{40}", entry.tag):  # of a file in git, by git's own hash
        content = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        right = blob.hexdigest() == entry.tag
    else:
        right = True
    if not right:
        path.unlink()
        msg = f"{entry.path} of {model} arrived with other content than the hub tells: {AGAIN}"
        raise Refusal(msg)
    flush(path)
    return found
