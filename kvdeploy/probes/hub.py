"""Fetch a model from a hub into a cache, in the runtime's Python, with its huggingface_hub.

argv: model id, revision or '', cache folder, 'weights' or 'shape'. Prints one JSON object on the
last line of stdout: {"path": ...} or {"error": ..., "kind": ...}. Needs the network only when the
cache does not hold the model.
"""

import importlib
import json
import sys

SHAPE = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]


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
            path = fetch(**wanted)
        answer = {"path": path}
    except Exception as e:  # noqa: BLE001  # all of them end as one line for the caller
        answer = {"error": str(e).strip().splitlines()[0], "kind": type(e).__name__}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
