"""A model hub that knows one model and remembers what it was asked, and with which tokens."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0" * 40


@dataclass
class Hub:
    url: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


@contextmanager
def run_hub(model_id: str, folder: Path, address: str = "127.0.0.1") -> Iterator[Hub]:
    """Serve the files of `folder` as `model_id`, in the words of the hub's HTTP interface."""
    hub = Hub()
    files = sorted(folder.iterdir())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
            found = self._find(path)
            self.send_response(200 if found is not None else 404)
            if found is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(found or b"")))
            self.send_header("ETag", f'"{hashlib.sha256(found or b"").hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(found or b"")

        @staticmethod
        def _find(path: str) -> bytes | None:
            if path.startswith(f"/api/models/{model_id}/tree/"):
                tree = [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name}
                    for p in files
                ]
                return json.dumps(tree).encode()
            if f"{path}/".startswith(f"/api/models/{model_id}/"):
                siblings = [{"rfilename": p.name, **_metadata(p)} for p in files]
                return json.dumps({"id": model_id, "sha": COMMIT, "siblings": siblings}).encode()
            file = folder / path.rpartition("/")[2]
            if path == f"/{model_id}/resolve/{COMMIT}/{file.name}" and file.exists():
                return file.read_bytes()
            return None

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://{address}:{server.server_address[1]}"
        yield hub
        server.shutdown()


def _metadata(path: Path) -> dict[str, object]:
    """What the hub tells of a file's content: git's hash, and SHA-256 where it is large."""
    content = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    told: dict[str, object] = {"size": len(content), "blobId": blob}
    if path.suffix == ".safetensors":
        sha256 = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
    return told
