"""`cearx bench serve`: requests that arrive at a rate, of lengths drawn from a range or a file.

Owns the workload: how many requests, how long, when, and which of their lengths can be checked.
One row for each request rate. Called by `cli.py`.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from cearx.frontend.bench.arrivals import arrival_times
from cearx.frontend.bench.dataset import DatasetPrompt, sample
from cearx.frontend.bench.display import Display
from cearx.frontend.bench.endpoint import Endpoint
from cearx.frontend.bench.fleet import Fleet
from cearx.frontend.bench.metrics import Goodput
from cearx.frontend.bench.prompt_source import PromptSource
from cearx.frontend.bench.run_plan import RunRequest, details, execute, row


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens."""

    num_prompts: int = 1000
    max_concurrency: int | None = None
    """Requests in flight at once; None is no bound."""
    burstiness: float = 1.0
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn evenly from (1 - ratio) to (1 + ratio) times the given ones."""
    prefix_len: int = 0
    """Tokens that every prompt begins with, before input_len others."""
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-concurrency", self.max_concurrency, 1),
            ("--random-input-len", self.input_len, 1),
            ("--random-output-len", self.output_len, 1),
            ("--random-prefix-len", self.prefix_len, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"--burstiness must be above 0 and finite, got {self.burstiness}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}")


def draw_length(order: random.Random, middle: int, ratio: float) -> int:
    """One length of at least 1 token."""
    low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
    return order.randint(max(1, low), max(1, high))


class ServeRunner:
    """Runs one workload at one rate after the other against one endpoint."""

    def __init__(
        self,
        fleet: Fleet,
        endpoint: Endpoint,
        workload: Workload,
        source: PromptSource | list[DatasetPrompt],
        display: Display,
    ) -> None:
        """`source`: random prompts, or the prompts of a file."""
        self._fleet = fleet
        self._endpoint = endpoint
        self._workload = workload
        self._source = source
        self._display = display
        self._order = random.Random(workload.seed)

    async def run(
        self,
        rates: tuple[float, ...],
        goodput: Goodput | None,
        is_detailed: bool,
        on_row: Callable[[dict[str, Any]], None],
    ) -> bool:
        """One row a rate, after a warm-up request; answers whether every stream was right."""
        warm_up = self._requests([0.0])
        await execute(self._fleet, self._endpoint.target, warm_up)
        self._display.heading()
        is_ok = True
        for rate in rates:
            load = self._workload
            name = f"{rate:g} req/s"
            times = arrival_times(load.num_prompts, rate, load.burstiness, load.seed)
            with self._display.bar(name, load.num_prompts) as on_progress:
                outcome = await execute(
                    self._fleet,
                    self._endpoint.target,
                    self._requests(times),
                    max_concurrency=load.max_concurrency,
                    goodput=goodput,
                    on_progress=on_progress,
                )
            one = row(outcome, **_settings(load, rate))
            self._display.row(name, one)
            if outcome.figures.request_goodput is not None:
                self._display.note(f"  goodput {outcome.figures.request_goodput:.2f} req/s")
            on_row(one | (details(outcome.run.records) if is_detailed else {}))
            is_ok = is_ok and outcome.is_ok
        return is_ok

    def _requests(self, times: list[float]) -> list[RunRequest]:
        load = self._workload
        if isinstance(self._source, list):
            drawn = sample(self._source, len(times), self._order.randrange(2**32))
            return [
                RunRequest(
                    body=self._endpoint.body(prompt.text, prompt.output_len),
                    start_s=time,
                    output_len=prompt.output_len if load.ignore_eos else None,
                )
                for prompt, time in zip(drawn, times, strict=True)
            ]
        requests = []
        for time in times:
            input_len = draw_length(self._order, load.input_len, load.range_ratio)
            output_len = draw_length(self._order, load.output_len, load.range_ratio)
            num_tokens = load.prefix_len + input_len
            requests.append(
                RunRequest(
                    body=self._endpoint.body(self._source.prompt(num_tokens), output_len),
                    start_s=time,
                    input_len=num_tokens,
                    output_len=output_len if load.ignore_eos else None,
                )
            )
        return requests


def _settings(load: Workload, rate: float) -> dict[str, Any]:
    """The row's settings; an infinite rate is the text 'inf', since JSON has no infinity."""
    return {
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": load.burstiness,
        "num_prompts": load.num_prompts,
        "max_concurrency": load.max_concurrency,
    }
