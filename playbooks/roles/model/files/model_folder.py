"""Tell whether a folder holds a whole model: all its files, each as long as it should be.

Runs on nodes, with the standard library alone. Called by itself it answers one job (stdin, JSON)
with one JSON object on the last line of stdout.

A staged folder has a manifest, written last: every file with its size and SHA-256. Without one (a
shared file system, an image) the files speak for themselves: safetensors files tell their own
length, and an index names all of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

MANIFEST = ".kvdeploy-manifest.json"
FORMAT = 1
SHAPE = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
"""Everything of a model but its weights."""
WEIGHTS = ("*.safetensors",)
HEADER_LIMIT = 100_000_000
"""Of the safetensors format itself."""
THREADS = 16
BLOCK = 16 * 2**20


def is_wanted(path: str, *, weights: bool) -> bool:
    """Whether engines need this file of a model. Hidden files never, nor paths that lead out."""
    if path.startswith("/") or any(part.startswith(".") for part in path.split("/")):
        return False
    return any(fnmatch(path, pattern) for pattern in SHAPE + (WEIGHTS if weights else ()))


def files_of(folder: Path, *, weights: bool) -> list[str]:
    """The files of a folder that engines need."""
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(path for path in paths if is_wanted(path, weights=weights))


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def digest_of(files: list[dict[str, Any]]) -> str:
    """One name for all of a model's content, wherever it came from."""
    told = sorted((file["path"], file["size"], file["sha256"]) for file in files)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def safetensors_problem(path: Path) -> str:
    """Hold a file's length to what its header promises; '' when it is right.

    Format: header length (u64, little endian), JSON header with each tensor's place, data.
    Source: https://github.com/huggingface/safetensors#format
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= HEADER_LIMIT and 8 + length > size):
            return f"is cut short: it has {size} bytes, not even its whole header"
        if length > HEADER_LIMIT:
            return "is no safetensors file"
        try:
            header = json.loads(file.read(length))
            ends = [t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"]
            promised = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is no safetensors file"
    if size < promised:
        return f"is cut short: it has {size} bytes, and its header promises {promised}"
    if size > promised:
        return f"is too long: it has {size} bytes, and its header promises {promised}"
    return ""


def folder_problems(folder: Path, *, weights: bool) -> list[str]:
    """What a folder lacks to be a whole model, by its own word."""
    problems = []
    try:
        json.loads((folder / "config.json").read_bytes())
    except OSError:
        problems.append("config.json is missing")
    except ValueError:
        problems.append("config.json is no JSON")
    if not weights:
        return problems
    found = [path for path in files_of(folder, weights=True) if path.endswith(".safetensors")]
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    for index in indexes:
        try:
            named = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            problems.append(f"{index.name} is no index")
            continue
        problems += [
            f"{name} is missing, and {index.name} names it" for name in named if name not in found
        ]
    if not indexes and any("-of-" in name for name in found):
        problems.append("model.safetensors.index.json is missing")
    if not found:
        problems.append("it has no weights (*.safetensors)")
    for name in found:
        if problem := safetensors_problem(folder / name):
            problems.append(f"{name} {problem}")
    return problems


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What was staged; None where nothing was, or nothing that this version knows."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def staged_problems(folder: Path, files: list[dict[str, Any]], *, hashes: bool) -> dict[str, str]:
    """Files that are not what was staged: path -> what is wrong."""

    def look(file: dict[str, Any]) -> str:
        try:
            size = (folder / file["path"]).stat().st_size
            if size != file["size"]:
                return f"has {size} bytes, and {file['size']} were staged"
            if hashes and hash_file(folder / file["path"]) != file["sha256"]:
                return "has changed since it was staged"
        except OSError:
            return "is missing"
        return ""

    with ThreadPoolExecutor(THREADS) as pool:
        found = zip(files, pool.map(look, files), strict=True)
    return {file["path"]: problem for file, problem in found if problem}


def fingerprint(folder: Path, *, weights: bool) -> str:
    """A name for an unstaged model, from what can be read at once: not its tensors' values."""
    told = []
    for path in files_of(folder, weights=weights):
        with (folder / path).open("rb") as file:
            start = hashlib.sha256(file.read(2**20)).hexdigest()
        told.append({"path": path, "size": (folder / path).stat().st_size, "sha256": start})
    return f"~{digest_of(told)}"


def check(job: dict[str, Any]) -> dict[str, Any]:
    """Whether job['path'] holds the model that is wanted, and what it lacks if not."""
    folder, weights = Path(job["path"]), bool(job["weights"])
    if not folder.exists():
        return {"whole": False, "problems": ["it is not there"], "digest": ""}
    manifest = read_manifest(folder)
    if job["source"] == "none" or job["in_place"]:
        there = not job["in_place"] or folder.resolve() == Path(job["id"]).resolve()
        problems = folder_problems(folder, weights=weights) if there else ["it leads elsewhere"]
        digest = manifest["digest"] if manifest else ""
        if not problems:
            digest = digest or fingerprint(folder, weights=weights)
        return {"whole": not problems, "problems": problems, "digest": digest}
    if manifest is None or folder.is_symlink():
        return {"whole": False, "problems": ["it was not staged to its end"], "digest": ""}
    held = [manifest[key] for key in ("source", "id", "revision", "weights")]
    if held != [job["source"], job["id"], job["revision"], weights]:
        problems = [f"it holds {manifest['id']} {manifest['revision']}".rstrip()]
    elif job["digest"] and manifest["digest"] != job["digest"]:
        problems = ["it holds an earlier state of the model"]
    else:
        found = staged_problems(folder, manifest["files"], hashes=bool(job["hashes"]))
        problems = [f"{path} {problem}" for path, problem in found.items()]
        problems += folder_problems(folder, weights=weights) if not problems else []
    return {"whole": not problems, "problems": problems, "digest": manifest["digest"]}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(check(json.load(sys.stdin))) + "\n")
