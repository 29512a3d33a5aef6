"""One end of a NIXL WRITE that is checked byte by byte, in the engines' own Python.

Spoken to by JSON lines. First comes the order: role, nonce, backend, memory, shapes, cpus,
deadline_s. A target answers with where it is to be written to (metadata, base), then, shape by
shape, with what it found. A writer is given that first answer as its second line, and answers with
each WRITE that it made. What goes wrong is a line {"error": ...}, and the end.

Ends by itself: when its stdin ends, or once deadline_s have passed.
"""

import base64
import contextlib
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PIECE = 4096
"""Bytes that are made, compared and counted together; sizes are multiples of it."""
POLL_S = 0.0005
VRAM_SPARE = 2**30
"""Bytes of a GPU that are left to the engine beside us."""
LEFT = threading.Event()
"""Whoever gave the order listens no more."""


def tell(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def piece(nonce: str, what: str, number: int = 0) -> bytes:
    """What belongs into one piece: other bytes for every nonce, shape and place."""
    return hashlib.shake_128(f"{nonce}/{what}/{number}".encode()).digest(PIECE)


class Layout:
    """Where the descriptors of one shape lie in a target: in an order of the nonce's own, a piece
    that nobody may touch before, between and after them. In units of pieces, from `start`.
    """

    def __init__(self, shape: dict[str, Any], nonce: str, start: int) -> None:
        self.name, self.count = str(shape["name"]), int(shape["count"])
        self.size = int(shape["bytes"]) // PIECE
        self.start, self.pieces = start, 1 + self.count * (self.size + 1)
        slots = list(range(self.count))
        random.Random(f"{nonce}/{self.name}").shuffle(slots)  # noqa: S311
        self.places = [start + 1 + slot * (self.size + 1) for slot in slots]

    def expected(self) -> dict[int, int]:
        """By place, the number of the piece that belongs there; the others are not touched."""
        return {
            place + i: number * self.size + i
            for number, place in enumerate(self.places)
            for i in range(self.size)
        }


def layouts(order: dict[str, Any]) -> list[Layout]:
    found: list[Layout] = []
    start = 0
    for shape in order["shapes"]:
        found.append(Layout(shape, order["nonce"], start))
        start += found[-1].pieces
    return found


class Dram:
    kind, device = "DRAM", 0

    def __init__(self, length: int, why_not_vram: str = "") -> None:
        self.why_not_vram = why_not_vram
        self._map = mmap.mmap(-1, length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def put(self, data: bytes) -> None:
        self._map[: len(data)] = data

    def get(self) -> memoryview:
        return memoryview(self._map)


class Vram:
    """Needs the torch that engines have; raises whatever it raises where there is no room."""

    kind, device, why_not_vram = "VRAM", 0, ""

    def __init__(self, length: int) -> None:
        self._torch = importlib.import_module("torch")
        free = self._torch.cuda.mem_get_info()[0]
        if free < length + VRAM_SPARE:
            text = f"the engine leaves {free >> 20} MiB of its GPU"
            raise MemoryError(text)
        self._tensor = self._torch.empty(length, dtype=self._torch.uint8, device="cuda")
        self.address = int(self._tensor.data_ptr())

    def put(self, data: bytes) -> None:
        self._tensor.copy_(self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8))
        self._torch.cuda.synchronize()

    def get(self) -> memoryview:
        self._torch.cuda.synchronize()
        return memoryview(self._tensor.cpu().numpy())


def take(order: dict[str, Any], length: int) -> Dram | Vram:
    """Memory of the kind that was asked for; ordinary one, and why, where that is not to be had."""
    if order["memory"] == "VRAM":
        try:
            return Vram(length)
        except Exception as e:  # noqa: BLE001  # no torch, no GPU, no room: told, and done without
            return Dram(length, str(e).strip().partition("\n")[0] or type(e).__name__)
    return Dram(length)


def make_agent(order: dict[str, Any]) -> Any:  # noqa: ANN401
    """Raises what NIXL raises. A backend that does not come up is told by its name alone."""
    api = importlib.import_module("nixl._api")
    name, backend = f"{order['role']}-{order['nonce']}", order["backend"]
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    if backend not in agent.backends:
        text = f"NIXL has no plugin {backend}; it has {', '.join(agent.get_plugin_list())}"
        raise RuntimeError(text)
    return agent


def until(look: Callable[[], str], what: str, ends: float) -> str:
    while not (found := look()):
        if LEFT.is_set():
            text = "nobody listens any more"
            raise EOFError(text)
        if time.monotonic() > ends:
            text = f"{what} did not come in time"
            raise TimeoutError(text)
        time.sleep(POLL_S)  # noqa: TID251
    return found


def be_target(order: dict[str, Any], ends: float) -> None:
    threading.Thread(target=listen, daemon=True).start()
    nonce, shapes = order["nonce"], layouts(order)
    length, untouched = sum(s.pieces for s in shapes) * PIECE, piece(nonce, "untouched")
    memory, agent = take(order, length), make_agent(order)
    memory.put(untouched * (length // PIECE))
    region = [(memory.address, length, memory.device, "")]
    registered = agent.register_memory(region, memory.kind, backends=[order["backend"]])
    tell(
        metadata=base64.b64encode(agent.get_agent_metadata()).decode(),
        base=memory.address,
        device=memory.device,
        memory=memory.kind,
        why_not_vram=memory.why_not_vram,
    )
    come: set[str] = set()
    for shape in shapes:

        def has_come(name: str = shape.name) -> str:
            for words in agent.get_new_notifs().values():
                come.update(w.decode() for w in words)
            return name if name in come else ""

        until(has_come, f"the notification of {shape.name!r}", ends)
        tell(shape=shape.name, **check(shape, nonce, memory.get(), untouched))
    agent.deregister_memory(registered)


def check(shape: Layout, nonce: str, seen: memoryview, untouched: bytes) -> dict[str, object]:
    """Every piece of a shape, what must not be touched included."""
    expected, wrong, touched = shape.expected(), 0, 0
    first: int | None = None
    for place in range(shape.start, shape.start + shape.pieces):
        number = expected.get(place)
        wanted = untouched if number is None else piece(nonce, shape.name, number)
        found = seen[place * PIECE : (place + 1) * PIECE]
        if found == wanted:
            continue
        wrong, touched = wrong + (number is not None), touched + (number is None)
        if first is None:
            first = next(i for i in range(PIECE) if found[i] != wanted[i])
            first += (place - shape.start) * PIECE
    return {"pieces": len(expected), "wrong": wrong, "touched": touched, "first": first}


def be_writer(order: dict[str, Any], ends: float) -> None:
    nonce, shapes = order["nonce"], layouts(order)
    sizes = [s.count * s.size * PIECE for s in shapes]
    memory, agent = take(order, sum(sizes)), make_agent(order)
    content = (piece(nonce, s.name, n) for s in shapes for n in range(s.count * s.size))
    memory.put(b"".join(content))
    region = [(memory.address, sum(sizes), memory.device, "")]
    registered = agent.register_memory(region, memory.kind, backends=[order["backend"]])
    target: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=listen, daemon=True).start()
    told = agent.add_remote_agent(base64.b64decode(target["metadata"]))
    peer = told.decode() if isinstance(told, bytes) else told
    start = memory.address
    for shape, size in zip(shapes, sizes, strict=True):
        one = shape.size * PIECE
        here = [(start + i * one, one, memory.device) for i in range(shape.count)]
        there = [(target["base"] + p * PIECE, one, target["device"]) for p in shape.places]
        began = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(here, memory.kind),
            agent.get_xfer_descs(there, target["memory"]),
            peer,
            shape.name.encode(),
        )
        agent.transfer(handle)

        def has_ended(handle: object = handle) -> str:
            state = str(agent.check_xfer_state(handle))
            return "" if state == "PROC" else state

        state = until(has_ended, f"the end of WRITE {shape.name!r}", ends)
        seconds = time.perf_counter() - began
        if state != "DONE":
            text = f"NIXL ended WRITE {shape.name!r} with {state}"
            raise RuntimeError(text)
        tell(
            shape=shape.name,
            bytes=size,
            descriptors=shape.count,
            seconds=seconds,
            backend=agent.query_xfer_backend(handle),
            memory=memory.kind,
            why_not_vram=memory.why_not_vram,
        )
        agent.release_xfer_handle(handle)
        start += size
    LEFT.wait()  # our end of the connection stays until the target has seen everything
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


def listen() -> None:
    sys.stdin.read()
    LEFT.set()


def end_after(seconds: float) -> None:
    """Whatever happens, NIXL's own waits included."""
    timer = threading.Timer(seconds, os._exit, (124,))
    timer.daemon = True
    timer.start()


def main() -> int:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    ends = time.monotonic() + order["deadline_s"]
    end_after(order["deadline_s"] + 5)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, order["cpus"] or os.sched_getaffinity(0))
    try:
        (be_target if order["role"] == "target" else be_writer)(order, ends)
    except Exception as e:  # noqa: BLE001  # all of them end as one line for the caller
        tell(error=f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
