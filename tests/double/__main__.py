"""The double's process: ``python -m tests.double [--port 0] [--region us-west-2]``.

Listens on 127.0.0.1 only. One line of JSON on stdout says where, once it answers. It ends when its
standard input closes, when its parent dies (Linux), or on SIGTERM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from types import FrameType

PR_SET_PDEATHSIG: Final = 1

MOTO_SETTINGS: Final = {
    "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # 1,300 images that nobody asked for, at every reset
    "MOTO_ACCOUNT_ID": "123456789012",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.double", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--region", default="us-west-2", help="the region that is told things")
    parser.add_argument("--ready-file", type=Path, help="also written there once it answers")
    options = parser.parse_args()

    end_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    os.environ.update(MOTO_SETTINGS)
    os.environ["AWS_DEFAULT_REGION"] = options.region

    # moto reads its settings as it is imported.
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    from tests.double import images
    from tests.double.gateway import Gateway

    class Quiet(MotoRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Calls are recorded, not printed."""

    images.seed(options.region)
    server: Any = make_server(
        "127.0.0.1", options.port, Gateway(options.region), threaded=True, request_handler=Quiet
    )
    server.daemon_threads = True
    ready = json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()})
    if options.ready_file is not None:
        half = options.ready_file.with_suffix(".half")
        half.write_text(ready + "\n", encoding="utf-8")
        half.replace(options.ready_file)
    sys.stdout.write(ready + "\n")
    sys.stdout.flush()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    server.serve_forever()


def end_with_parent() -> None:
    """The kernel ends us with the thread that started us; a parent dead already is noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:
            raise SystemExit(0)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
