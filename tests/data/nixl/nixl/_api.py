"""Stands in for NIXL where a test is about what is said between two ends: WRITEs go over TCP.

Refuses what it was not told of. FAULT in the environment breaks one thing:
    corrupt     one byte of the last WRITE is another
    astray      a byte behind a WRITE is written too
    unnotified  nobody is told of a WRITE
    stuck       a WRITE never ends
    failing     a WRITE ends with ERR
    elsewhere   another backend is taken
"""

import ctypes
import json
import os
import socket
import threading
from typing import Any

Descriptors = list[tuple[int, int, int]]
FAULT = os.environ.get("FAULT", "")


class nixl_agent_config:  # noqa: N801  # NIXL's own name
    def __init__(self, backends: list[str]) -> None:
        self.backends = backends


class nixl_agent:  # noqa: N801  # NIXL's own name
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name, self.backends = name, [b for b in config.backends if b == "UCX"]
        self.regions: list[tuple[int, int]] = []
        self.notified: list[bytes] = []
        self.peers: dict[str, int] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, daemon=True).start()

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def serve(self) -> None:
        while True:
            with self.listener.accept()[0] as peer, peer.makefile("rb") as stream:
                order = json.loads(stream.readline())
                for address, length in order["there"]:
                    data = stream.read(length)
                    if not any(a <= address and address + length <= a + n for a, n in self.regions):
                        msg = f"{address} was never registered"
                        raise SystemExit(msg)
                    ctypes.memmove(address, data, len(data))
                self.notified += [order["notify"].encode()] if order["notify"] else []
                peer.sendall(b"\n")

    def register_memory(
        self, regions: list[tuple[int, int, int, str]], kind: str, backends: list[str]
    ) -> object:
        assert (kind, backends) == ("DRAM", self.backends)
        self.regions += [(address, length) for address, length, _, _ in regions]
        return regions

    def deregister_memory(self, regions: object) -> None:
        self.regions.clear()

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, self.listener.getsockname()[1]]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, port = json.loads(metadata)
        self.peers[name] = port
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        del self.peers[name]

    def get_xfer_descs(self, descriptors: Descriptors, kind: str) -> Descriptors:
        assert kind == "DRAM"
        return descriptors

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.notified = self.notified, []
        return {"somebody": found} if found else {}

    def initialize_xfer(
        self, operation: str, here: Descriptors, there: Descriptors, peer: str, notify: bytes
    ) -> object:
        assert (operation, len(here)) == ("WRITE", len(there))
        return (here, there, peer, notify.decode())

    def transfer(self, handle: Any) -> str:
        here, there, peer, notify = handle
        data = [bytearray(ctypes.string_at(address, length)) for address, length, _ in here]
        if FAULT == "corrupt":
            data[-1][17] ^= 1
        if FAULT == "astray":
            data[0] += b"!"
        where = [(a, len(d)) for (a, _, _), d in zip(there, data, strict=True)]
        notify = "" if FAULT == "unnotified" else notify
        with socket.create_connection(("127.0.0.1", self.peers[peer])) as way:
            way.sendall(json.dumps({"there": where, "notify": notify}).encode() + b"\n")
            for piece in data:
                way.sendall(piece)
            way.recv(1)
        return "DONE"

    def check_xfer_state(self, handle: object) -> str:
        return {"stuck": "PROC", "failing": "ERR"}.get(FAULT, "DONE")

    def query_xfer_backend(self, handle: object) -> str:
        return "POSIX" if FAULT == "elsewhere" else "UCX"

    def release_xfer_handle(self, handle: object) -> None:
        pass
