"""Serves /health, /v1/models, /v1/completions and /metrics, and tells at /standin what it was
started with. STANDIN_START_S: seconds until it is healthy. STANDIN_EXIT: it ends at once, so."""

import itertools
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="@MODEL@"} 0.0
# HELP vllm:nixl_bytes_transferred Bytes transferred per NIXL transfer.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_sum{engine="0",model_name="@MODEL@"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="@MODEL@"} 0.0
"""


def option(words: list[str], name: str, default: str) -> str:
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return default


def several(words: list[str], name: str) -> list[str]:
    after = words[words.index(name) + 1 :] if name in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), after))


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "serve"]
    if "--version" in words:
        print(vllm.__version__)
        return
    if code := os.environ.get("STANDIN_EXIT"):
        sys.exit(f"engine core initialization failed ({code})")
    host, port = option(words, "--host", "0.0.0.0"), int(option(words, "--port", "8000"))
    names = several(words, "--served-model-name") or [option(words, "--model", "model")]
    model = names[0]
    transfer = json.loads(option(words, "--kv-transfer-config", "{}"))
    connector = transfer.get("kv_connector")
    if connector is not None and connector not in KVConnectorFactory._registry:
        sys.exit(f"Unsupported connector type: {connector}")
    for backend in transfer.get("kv_connector_extra_config", {}).get("backends", []):
        from nixl._api import nixl_agent

        nixl_agent("standin").create_backend(backend)
    ready = time.monotonic() + float(os.environ.get("STANDIN_START_S", "0.3"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def say(self, code: int, body: object, kind: str = "application/json") -> None:
            content = body if isinstance(body, str) else json.dumps(body)
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                self.say(200 if time.monotonic() > ready else 503, "")
            elif self.path == "/version":
                self.say(200, {"version": vllm.__version__})
            elif self.path == "/v1/models":
                data = [{"id": name, "object": "model"} for name in names]
                self.say(200, {"object": "list", "data": data})
            elif self.path == "/metrics":
                self.say(200, METRICS.replace("@MODEL@", model), "text/plain; version=0.0.4")
            elif self.path == "/standin":
                self.say(200, {"argv": words, "transfer": transfer, "env": dict(os.environ)})
            else:
                self.say(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            choice = {"index": 0, "text": " stand-in", "finish_reason": "length"}
            self.say(200, {"id": "cmpl-0", "model": model, "choices": [choice]})

    server = ThreadingHTTPServer((host, port), Handler)

    def stop(number: int, frame: object) -> None:
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"INFO Started server process [{os.getpid()}] on http://{host}:{port}", flush=True)
    server.serve_forever()
    print("INFO Application shutdown complete.", flush=True)


if __name__ == "__main__":
    main()
