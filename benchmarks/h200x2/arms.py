"""The set-ups that are compared, and what was expected of each before it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from kvdeploy.model.bench import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdeploy.model.routing import Mode


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One set-up. What it leaves out is as kvdeploy has it by default."""

    name: str
    engines: str
    """Whose engines it asks: an arm that differs by its router alone has those of another."""
    connector: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    """Of every engine."""
    decode_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Of every engine."""
    stock: bool = False
    """vllm-router stands before the engines, if there is one."""
    modes: tuple[Mode, ...] = ("push",)
    expected: str = ""

    def tell_differences(self) -> str:
        """From default, as a reader is told: '`block_size: 16`'."""
        parts = (self.connector, self.router, self.args, self.decode_args, self.env)
        told = [f"`{name}: {value}`" for part in parts for name, value in part.items()]
        return ", ".join([*told, "vllm-router"] if self.stock else told)


DEFAULT = Arm(
    name="default",
    engines="default",
    modes=("push", "push-sequential", "aggregated"),
)
PULL = Arm(
    name="pull",
    engines="pull",
    connector={"mode": "pull"},
    modes=("pull",),
    expected="TTFT 1.2 times default's where decode is busy (16 and 48 at once), as much at 4",
)
STOCK = Arm(
    name="stock",
    engines="stock",
    connector={"mode": "pull", "block_size": 16},
    stock=True,
    modes=("pull",),
    expected="TTFT p50 3 times default's at 16 at once: eight times the descriptors, no admission",
)


def tuned(name: str, expected: str, **differs: Any) -> Arm:  # noqa: ANN401  # any field of an arm
    return Arm(name=name, engines=name, expected=expected, **differs)


def admitted(name: str, expected: str, **router: Any) -> Arm:  # noqa: ANN401
    return Arm(name=name, engines="default", router=router, expected=expected)


ADMISSION = (
    admitted("admit-any", "TTFT p50 twice default's at 16 at once", prefill_at_once=None),
    admitted("admit-2", "as default at 16 at once, worse at 48", prefill_at_once=2),
    admitted("admit-4", "TTFT p50 half of default's at 16, worse p50 at 48", prefill_at_once=4),
    admitted("decode-32", "TPOT p90 lower at 48 at once, TTFT p99 higher", decode_at_once=32),
)
TUNING = (
    tuned(
        "block-16", "post time 6 times, TTFT p50 1.1 times default's", connector={"block_size": 16}
    ),
    tuned("block-64", "within 5 % of default", connector={"block_size": 64}),
    tuned("block-256", "within 5 % of default", connector={"block_size": 256}),
    tuned(
        "batch-4096",
        "TTFT p50 1.1 times default's (vLLM's own is 8192): a prompt takes two steps",
        args={"max-num-batched-tokens": 4096},
    ),
    tuned(
        "batch-16384",
        "TTFT p50 higher, requests/s as many: two prompts a step, the first waits for the second",
        args={"max-num-batched-tokens": 16384},
    ),
    tuned("threads-1", "within 5 %: one post a request", connector={"threads": 1}),
    tuned("threads-8", "within 5 %", connector={"threads": 8}),
    tuned("ucx-put", "within 5 %: cuda_ipc either way", env={"UCX_RNDV_SCHEME": "put_zcopy"}),
    tuned("ucx-rails", "within 5 %: one host", env={"UCX_MAX_RNDV_RAILS": "4"}),
    tuned(
        "decode-caches",
        "a tenth of the bytes where 90 % are shared; nothing else unless transfers were waited for",
        decode_args={"enable-prefix-caching": True},
    ),
)
ARMS = {arm.name: arm for arm in (DEFAULT, PULL, STOCK, *ADMISSION, *TUNING)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large everything is."""

    input_tokens: int
    output_tokens: int
    concurrency: tuple[int, ...]
    seconds: float
    """Of a run."""
    rounds: int
    requests: int
    """Of a run, at most."""
    cold_starts: int
    start_s: float
    """Of engines, for the first estimate."""
    warm_s: float
    """Of a run before it counts, and of its counters after it: for the estimate."""
    scenarios: tuple[str, ...] = ("shared", "unique")
    modes: tuple[Mode, ...] = DEFAULT.modes
    """Of default, where it is compared."""


LARGE = Shape(
    input_tokens=8192,
    output_tokens=64,
    concurrency=(16, 4, 48),
    seconds=8,
    rounds=2,
    requests=100_000,
    cold_starts=3,
    start_s=110,
    warm_s=4,
)
SMALL = Shape(
    input_tokens=256,
    output_tokens=8,
    concurrency=(2, 1),
    seconds=3,
    rounds=2,
    requests=12,
    cold_starts=1,
    start_s=45,
    warm_s=4,
)


@dataclass(frozen=True, kw_only=True)
class Act:
    """Set-ups that are measured side by side with `default`, on the same cells."""

    name: Literal["compare", "cold", "admission", "tuning"]
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]

    def only(self, names: Sequence[str]) -> Act:
        return replace(self, arms=tuple(arm for arm in self.arms if arm.name in names))


def build_acts(shape: Shape) -> Iterator[Act]:
    """The most important first: what comes last may have no time left."""

    def cell(scenario: str, clients: int) -> Cell:
        return Cell(
            scenario=scenario,
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            concurrency=clients,
        )

    shared = tuple(cell("shared", n) for n in shape.concurrency)
    unique = tuple(cell("unique", n) for n in shape.concurrency)
    of = {"shared": shared, "unique": unique}
    first, *others = (of[name] for name in shape.scenarios)
    yield Act(name="compare", arms=(STOCK, PULL), cells=first)
    # What was up last comes first: engines take their time to start.
    yield Act(name="cold", arms=(PULL, STOCK), cells=(cell("cold", 1),))
    for cells in others:
        yield Act(name="compare", arms=(STOCK, PULL), cells=cells)
    yield Act(name="admission", arms=ADMISSION, cells=shared)
    yield Act(name="tuning", arms=TUNING, cells=(shared[0], unique[0]))
