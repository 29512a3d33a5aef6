"""Fetch a model from a hub into a cache, in the runtime's Python, with its huggingface_hub.

argv: model id, revision or '', cache folder, 'weights' or 'shape'. Prints one JSON object on the
last line of stdout: {"path": ...} or {"error": ..., "kind": ...}. Needs the network only when the
cache does not hold the whole model.
"""

import importlib
import json
import pathlib
import sys

SHAPE = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken"]


def main() -> None:
    model, revision, cache, what = sys.argv[1:5]
    fetch = importlib.import_module("huggingface_hub").snapshot_download
    wanted = {
        "repo_id": model,
        "revision": revision or None,
        "cache_dir": cache,
        "allow_patterns": [*SHAPE, "*.safetensors"] if what == "weights" else SHAPE,
    }
    try:
        try:
            path = fetch(**wanted, local_files_only=True)
        except Exception:  # noqa: BLE001  # whatever says that it is not cached
            path = None
        if path is None or not is_whole(pathlib.Path(path), what):
            path = fetch(**wanted)
        answer = {"path": path}
    except Exception as e:  # noqa: BLE001  # all of them end as one line for the caller
        answer = {"error": str(e).strip().splitlines()[0], "kind": type(e).__name__}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def is_whole(folder: pathlib.Path, what: str) -> bool:
    """Whether nothing is missing. The hub's library may take any folder for a cached model: what
    an interrupted fetch left, or a shape without weights.
    """
    if not (folder / "config.json").exists():
        return False
    if what != "weights":
        return True
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).exists() for shard in shards)
    return any("-of-" not in file.name for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
