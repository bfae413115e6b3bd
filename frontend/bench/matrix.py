"""`cearx bench matrix`: bursts of so many streams at once, prompts and outputs of exact lengths.

Owns the thirty official points and the order in which they run, all in one lifetime of the server.
A point is `concurrency` requests sent at the same moment after one warm-up request. Called by
`cli.py`.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.display import Display
from cearx.frontend.bench.endpoint import Endpoint
from cearx.frontend.bench.fleet import Fleet
from cearx.frontend.bench.prompt_source import PromptSource
from cearx.frontend.bench.run_plan import RunRequest, execute, row

POINT = re.compile(r"C(\d+)/I(\d+)/O(\d+)")
WARM_UP_TOKENS = 16


class MatrixPoint(msgspec.Struct, frozen=True, order=True):
    concurrency: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"C{self.concurrency}/I{self.input_len}/O{self.output_len}"


OFFICIAL_POINTS = tuple(
    MatrixPoint(concurrency, input_len, output_len)
    for concurrency, input_lens in (
        (1, (32, 256, 4096)),
        (4, (32, 256, 4096)),
        (16, (32, 256)),
        (64, (32, 256)),
    )
    for input_len in input_lens
    for output_len in (256, 1024, 4096)
)


def parse_points(text: str) -> tuple[MatrixPoint, ...]:
    """'all', or points like C1/I32/O256 with commas between; raises ValueError."""
    if text == "all":
        return OFFICIAL_POINTS
    points = []
    for part in text.split(","):
        found = POINT.fullmatch(part.strip())
        if found is None or "0" in found.groups():
            raise ValueError(f"a point looks like C1/I32/O256, all at least 1, got {part!r}")
        points.append(MatrixPoint(*map(int, found.groups())))
    return tuple(points)


class MatrixRunner:
    """Runs points against one endpoint."""

    def __init__(
        self, fleet: Fleet, endpoint: Endpoint, source: PromptSource, display: Display
    ) -> None:
        self._fleet = fleet
        self._endpoint = endpoint
        self._source = source
        self._display = display

    async def run(
        self,
        points: tuple[MatrixPoint, ...],
        repeat: int,
        on_row: Callable[[dict[str, Any]], None],
    ) -> bool:
        """Every point `repeat` times over; answers whether all were exact and complete."""
        self._display.heading()
        rates: list[float] = []
        is_ok = True
        for turn in range(repeat):
            for point in points:
                one = await self._point(point, turn)
                self._display.row(str(point), one)
                on_row(one)
                is_ok = is_ok and one["status"] == "ok"
                rates.append(one["output_throughput"])
        if is_ok:
            mean = math.exp(sum(map(math.log, rates)) / len(rates))
            self._display.note(f"{len(rates)} of {len(rates)} ok, geometric mean {mean:.1f} tok/s")
        return is_ok

    async def _point(self, point: MatrixPoint, turn: int) -> dict[str, Any]:
        settings = {**msgspec.to_builtins(point), "repeat": turn}
        try:
            requests = list(self._requests(point, point.concurrency, point.output_len))
            warm_up = list(self._requests(point, 1, min(point.output_len, WARM_UP_TOKENS)))
        except BenchError as error:
            return _impossible(settings, point, str(error))
        await execute(self._fleet, self._endpoint.target, warm_up)
        with self._display.bar(str(point), point.concurrency) as on_progress:
            outcome = await execute(
                self._fleet, self._endpoint.target, requests, on_progress=on_progress
            )
        return row(outcome, **settings)

    def _requests(self, point: MatrixPoint, count: int, output_len: int) -> Iterator[RunRequest]:
        for _ in range(count):
            yield RunRequest(
                body=self._endpoint.body(self._source.prompt(point.input_len), output_len),
                input_len=point.input_len,
                output_len=output_len,
            )


def _impossible(settings: dict[str, Any], point: MatrixPoint, reason: str) -> dict[str, Any]:
    """The row of a point whose prompts cannot be made."""
    return {
        **settings,
        "status": "failed",
        "completed": 0,
        "failed": point.concurrency,
        "errors": {reason: point.concurrency},
        "output_throughput": 0.0,
        "client_limits": [],
    }
