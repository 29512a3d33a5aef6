"""Which runs a bench makes, and in what order. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.model.bench import MODES as ALL
from kvdeploy.model.bench import Cell
from kvdeploy.model.routing import MODES
from kvdeploy.planning.bench.prompts import LEAST_INPUT, longest_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdeploy.model.outputs import Device
    from kvdeploy.model.routing import Connector, Mode

INPUT_TOKENS: Final = {"cuda": 8192, "cpu": 512}
OUTPUT_TOKENS: Final = {"cuda": 64, "cpu": 16}
CONCURRENCY: Final = {"cuda": (4, 16), "cpu": (1, 4)}
"""What is asked where nobody says it; lengths are cut to what the model takes."""

COLD_STARTS: Final = 3
"""Of decode engines, in a run of cold pairs: each makes one sample a pair."""
ALONE: Final = ("long", "cold")
"""Scenarios that are asked one request at a time."""
LAST: Final = ("fragmented", "cold")
"""Scenarios that leave the engines as others should not find them."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The matrix as asked for; () and None are defaults."""

    scenarios: tuple[str, ...]
    input_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run to be made."""

    mode: Mode
    cell: Cell
    round: int
    starts: int = COLD_STARTS
    """Of decode engines, where the cell is of cold pairs."""


def build_cells(wishes: Wishes, *, max_length: int, device: Device) -> tuple[Cell, ...]:
    """Every point of the matrix.

    Raises ValueError: a point does not fit the model. The message names all that do not.
    """
    outputs = wishes.output_tokens or (min(OUTPUT_TOKENS[device], max_length // 8),)
    cells: list[Cell] = []
    for scenario in wishes.scenarios:
        for output in outputs:
            room = max_length - output
            usual = min(INPUT_TOKENS[device], room * 3 // 4)
            inputs = (room,) if scenario == "long" else wishes.input_tokens or (usual,)
            clients = (1,) if scenario in ALONE else wishes.concurrency or CONCURRENCY[device]
            cells += [
                Cell(scenario=scenario, input_tokens=i, output_tokens=output, concurrency=c)
                for i in inputs
                for c in clients
            ]
    wrong = [why for cell in cells if (why := _why_not(cell, max_length))]
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return tuple(dict.fromkeys(sorted(cells, key=_lateness)))


def _lateness(cell: Cell) -> int:
    return LAST.index(cell.scenario) + 1 if cell.scenario in LAST else 0


def _why_not(cell: Cell, max_length: int) -> str:
    if cell.input_tokens < LEAST_INPUT:
        return f"{cell.input_tokens} input tokens are too few: take {LEAST_INPUT} or more"
    longest = longest_prompt(cell)
    if longest + cell.output_tokens <= max_length:
        return ""
    lengths = f"{longest} + {cell.output_tokens}"
    return (
        f"{cell}: prompt and answer come to {lengths} tokens, and model.max_length is "
        f"{max_length}: take less, or --scenario without {cell.scenario}"
    )


def default_modes(connector: Connector, *, restart: bool) -> tuple[Mode, ...]:
    """Those that the fleet's own engines can serve; with `restart` all."""
    return tuple(m for m in ALL if restart or m in MODES[connector])


def needs_restart(modes: Sequence[Mode], connector: Connector) -> tuple[Mode, ...]:
    """The modes that other engines than the fleet's are needed for."""
    return tuple(m for m in modes if m not in MODES[connector])


def order(
    modes: Sequence[Mode], cells: Sequence[Cell], rounds: int, connector: Connector
) -> Iterator[tuple[Connector, list[Planned]]]:
    """Runs in their order, as (connector of the engines, runs) until engines change.

    On the same engines modes take turns on every cell, A B A B. Where engines must be started anew
    in between, the second round begins with those that run: A B B A takes half the restarts, and
    what drifts evenly with time falls on both alike.
    """
    other = needs_restart(modes, connector)
    own = [m for m in modes if m not in other]
    if not other:
        yield connector, _turns(own, cells, range(1, rounds + 1))
        return
    foreign: Connector = "pull" if connector == "push" else "push"
    groups: list[tuple[Connector, Sequence[Mode]]] = [(connector, own), (foreign, other)]
    blocks: list[tuple[Connector, list[Planned]]] = []
    for number in range(1, rounds + 1):
        for name, group in groups if number % 2 else reversed(groups):
            planned = _turns(group, cells, (number,))
            if blocks and blocks[-1][0] == name:
                blocks[-1][1].extend(planned)
            elif planned:
                blocks.append((name, planned))
    for name, planned in blocks:
        yield name, sorted(planned, key=lambda p: _lateness(p.cell))


def _turns(modes: Sequence[Mode], cells: Sequence[Cell], rounds: Sequence[int]) -> list[Planned]:
    return [
        Planned(mode=mode, cell=cell, round=number)
        for cell in cells
        for number in rounds
        for mode in modes
        if not (cell.scenario == "cold" and mode == "aggregated")  # it uses no pair
    ]
