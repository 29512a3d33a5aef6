"""A process to be supervised: answers 200 on /health, and can be told to misbehave.

argv: PORT [ignore-term] [no-listen] [child] [runaway] [die-after=S] [say=TEXT]
"""

import http.server
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

port, words = int(sys.argv[1]), sys.argv[2:]
options = dict(w.partition("=")[::2] for w in words)
print(options.get("say", "hello"), os.environ.get("MARK", ""), flush=True)
tempfile.mkstemp()  # never removed by us
if "ignore-term" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in options:  # a child that outlives its parent unless somebody sees to it
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
if "runaway" in options:  # a child that has left for a session of its own
    runaway = [sys.executable, "-c", "import time; time.sleep(120)"]
    print("runaway", subprocess.Popen(runaway, start_new_session=True).pid, flush=True)
if "die-after" in options:

    def die() -> None:
        time.sleep(float(options["die-after"]))
        os._exit(3)

    threading.Thread(target=die, daemon=True).start()
if "no-listen" in options:
    time.sleep(120)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


http.server.HTTPServer.allow_reuse_address = True
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
