"""Stream one completion from a router, with the standard library only.

usage: stream.py PROMPT [URL]
"""

import json
import sys
import time
import urllib.request

prompt = sys.argv[1]
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"

with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
    model = json.load(answer)["data"][0]["id"]
request = urllib.request.Request(
    f"{url}/v1/completions",
    json.dumps({"model": model, "prompt": prompt, "max_tokens": 32, "stream": True}).encode(),
    {"Content-Type": "application/json"},
)
started, first = time.perf_counter(), None
sys.stdout.write(f"{model}: {prompt}")
with urllib.request.urlopen(request, timeout=60) as stream:
    for line in stream:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            sys.exit(f"\n{event['error']['message']}")
        first = first or time.perf_counter() - started
        sys.stdout.write(event["choices"][0]["text"] if event["choices"] else "")
        sys.stdout.flush()
if first is None:
    sys.exit("\nno token came")
sys.stdout.write(f"\nfirst token after {first * 1000:.0f} ms\n")
